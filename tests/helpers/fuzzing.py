"""What the fuzz tests share: sizes of a run, small models, random calls, and the model they are checked against."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastspec
from fastspec import FastSpecGenerator, GenerateOutput
from tests.helpers.checkpoints import make_model

PACKAGE = Path(fastspec.__file__).parent
CONTEXT, DRAFT_CONTEXT = 64, 40  # long rows outgrow the draft
DRAFTS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
VOCAB = SMALL["vocab_size"]
_ALWAYS: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
CI = settings(max_examples=300, derandomize=True, **_ALWAYS)  # the same examples in every run
NIGHTLY = settings(max_examples=10_000, derandomize=False, print_blob=True, **_ALWAYS)


def raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made the error, not something that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(PACKAGE) and (last.line or "").startswith("raise ")


# Calls


@dataclass(frozen=True)
class Row:
    """A prompt and its sampling options."""

    prompt: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class Call:
    """One call of generate() or stream(). `form` is how the prompts are passed."""

    rows: tuple[Row, ...]
    form: str
    max_new_tokens: int
    stops: tuple[int, ...]
    pad: int
    k: int | None
    logprobs: int | None

    @property
    def sampled(self) -> bool:
        return any(row.temperature for row in self.rows)

    @property
    def width(self) -> int:
        return max(len(row.prompt) for row in self.rows)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords of the call."""
        prompts: Any = [list(row.prompt) for row in self.rows]
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": list(self.stops) or None,
            "pad_token_id": self.pad,
            "num_speculative_tokens": self.k,
            "logprobs": self.logprobs,
            "do_sample": self.sampled,
        }
        if self.sampled:
            for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
                options[name] = [getattr(row, name) for row in self.rows]
        if self.form == "flat":
            return (prompts[0],), options
        if self.form == "tensors":
            return ([torch.tensor(prompt) for prompt in prompts],), options
        if self.form == "padded":
            padded = [[self.pad] * (self.width - len(prompt)) + prompt for prompt in prompts]
            mask = [[0] * (self.width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            return (torch.tensor(padded), torch.tensor(mask)), options
        return (prompts,), options


IDS = st.integers(0, VOCAB - 1)
PROMPTS = st.one_of(
    st.integers(1, 50).map(lambda length: tuple(7 * length * place % VOCAB for place in range(length))),
    st.lists(IDS, min_size=1, max_size=6).map(tuple),
)
SEEDS = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
SAMPLED_ROWS = st.builds(
    Row,
    PROMPTS,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=SEEDS,
)
GREEDY_ROWS = st.builds(Row, PROMPTS, *map(st.just, (0.0, 0, 1.0, 0.0)), seed=SEEDS)


@st.composite
def calls(draw: st.DrawFn, oracle: Oracle, max_rows: int = 4) -> Call:
    """Any good call. Stop ids come from the plain text of a row as often as from nowhere."""
    kind = draw(st.sampled_from([GREEDY_ROWS, st.one_of(GREEDY_ROWS, SAMPLED_ROWS)]))
    rows = tuple(draw(st.lists(kind, min_size=1, max_size=max_rows)))
    room = CONTEXT - max(len(row.prompt) for row in rows)
    cap = draw(st.one_of(st.integers(1, min(12, room)), st.sampled_from([1, min(20, room)])))
    text = oracle.text(draw(st.sampled_from(rows)).prompt, cap)[0]
    stops = draw(st.lists(st.one_of(IDS, st.sampled_from(text)), max_size=3))
    form = draw(st.sampled_from(["lists", "tensors", "padded", "flat"] if len(rows) == 1 else ["lists", "padded"]))
    k = draw(st.sampled_from([None, *range(DRAFTS + 1)]))
    return Call(rows, form, cap, tuple(stops), draw(IDS), k, draw(st.sampled_from([None, None, 0, 2])))


# The model


class Oracle:
    """Plain decoding by transformers, one row at a time, cut where fp32 cannot tell the two best ids apart."""

    TIE = 1e-3  # of logits whose rounding errors are near 1e-5

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._texts: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def text(self, prompt: tuple[int, ...], count: int) -> tuple[list[int], int]:
        """The first `count` greedy tokens after a prompt, and how many of them are beyond doubt."""
        known = self._texts.get(prompt)
        if known is None or len(known[0]) < count:
            known = self._texts[prompt] = self._generate(prompt, count)
        return known[0][:count], min(known[1], count)

    def _generate(self, prompt: tuple[int, ...], count: int) -> tuple[list[int], int]:
        out: Any = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        ties = (best[:, 0] - best[:, 1] < self.TIE).tolist()
        return out.sequences[0, len(prompt) :].tolist(), ties.index(True) if True in ties else count


@dataclass
class Pair:
    """A target, and a draft that is right now and then: the same weights with noise, and a shorter context."""

    target: Path
    draft: Path

    @classmethod
    def make(cls, root: Path) -> Pair:
        model = make_model("mistral", std=0.4, **{**SMALL, "head_dim": 16, "sliding_window": 12})
        model.save_pretrained(root / "target")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        model.config.max_position_embeddings = DRAFT_CONTEXT
        model.save_pretrained(root / "draft")
        return cls(root / "target", root / "draft")

    def generator(self, *, page_size: int, batch: int) -> FastSpecGenerator:
        return FastSpecGenerator(
            self.target,
            self.draft,
            num_speculative_tokens=DRAFTS,
            max_batch_size=batch,
            max_length=CONTEXT,
            page_size=page_size,
            device="cpu",
            progress=False,
        )

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval())

    @cached_property
    def lonely(self) -> FastSpecGenerator:
        """A generator of its own for one row at a time."""
        return self.generator(page_size=64, batch=1)

    def check(self, call: Call, out: GenerateOutput) -> None:
        """Compares a call's whole result with plain decoding, and sampled rows with themselves alone."""
        for row, tokens, reason in zip(call.rows, out.new_tokens, out.finish_reasons, strict=True):
            self.check_row(call, row, tokens, reason)
        check_sequences(call, out)
        check_stats(call, out)

    def check_row(self, call: Call, row: Row, tokens: list[int], reason: str | None) -> None:
        """One row; `reason` None: it was left before its end."""
        upto = call.max_new_tokens if reason else len(tokens)
        wanted, sure = self.alone(call, row, upto) if row.temperature else self.oracle.text(row.prompt, upto)
        stop = next((place for place, token in enumerate(wanted) if token in call.stops), None)
        if stop is not None:
            wanted, sure = wanted[: stop + 1], min(sure, stop + 1)
        assert tokens[:sure] == wanted[:sure], f"{row}: got {tokens}, wanted {wanted}, of which {sure} are sure"
        assert 0 < len(tokens) <= call.max_new_tokens or reason is None
        assert not set(tokens[:-1]) & set(call.stops)
        if reason and sure == len(wanted):
            assert len(tokens) == len(wanted)
        if reason:
            assert reason == ("stop" if tokens[-1] in call.stops else "length")
            assert reason == "stop" or len(tokens) == call.max_new_tokens

    def alone(self, call: Call, row: Row, upto: int) -> tuple[list[int], int]:
        """What the row becomes in another generator, without neighbours."""
        single = Call((row,), "lists", call.max_new_tokens, call.stops, call.pad, call.k, None)
        arguments, options = single.arguments()
        out = self.lonely.generate(*arguments, **options, return_dict_in_generate=True)
        assert isinstance(out, GenerateOutput)
        assert all(0 <= token < VOCAB for token in out.new_tokens[0])
        tokens = out.new_tokens[0][:upto]
        return tokens, len(tokens)


def check_sequences(call: Call, out: GenerateOutput) -> None:
    longest = max(len(tokens) for tokens in out.new_tokens)
    rows = []
    for row, tokens in zip(call.rows, out.new_tokens, strict=True):
        before, after = call.width - len(row.prompt), longest - len(tokens)
        rows.append([call.pad] * before + list(row.prompt) + tokens + [call.pad] * after)
    assert out.sequences.tolist() == rows
    assert (out.logprobs is None) == (call.logprobs is None)
    if out.logprobs is not None and out.top_logprobs is not None:
        assert [len(values) for values in out.logprobs] == [len(tokens) for tokens in out.new_tokens]
        assert all(value <= 0 for values in out.logprobs for value in values)
        assert all(len(pairs) == call.logprobs for tops in out.top_logprobs for pairs in tops)


def check_stats(call: Call, out: GenerateOutput) -> None:
    k = DRAFTS if call.k is None else call.k
    assert out.stats.k == k
    for row, tokens in zip(out.stats.rows, out.new_tokens, strict=True):
        assert row.emitted == len(tokens) == row.steps + row.accepted - row.dropped
        assert sum(row.histogram) == row.steps
        assert sum(count * accepted for accepted, count in enumerate(row.histogram)) == row.accepted
        assert row.accepted <= row.drafted <= k * (row.steps - row.plain_steps)
        assert 0 <= row.dropped <= k
    for name in ("steps", "drafted", "accepted", "emitted", "dropped"):
        assert getattr(out.stats, name) == sum(getattr(row, name) for row in out.stats.rows)
