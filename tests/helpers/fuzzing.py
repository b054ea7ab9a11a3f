"""What the fuzz tests share: sizes of a run, small models, and what their results are checked against."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastspec
from fastspec import DeterministicProposer, FastSpecGenerator, GenerateOutput, NGram
from fastspec.proposers.interface import Proposer
from fastspec.sampling.rules import BLOCK, COUPLED
from tests.helpers.checkpoints import make_model
from tests.helpers.fuzz_calls import CONTEXT, DRAFTS, VOCAB, Call, Row, text_of

PACKAGE = Path(fastspec.__file__).parent
DRAFT_CONTEXT = 40  # long rows outgrow the draft
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
_ALWAYS: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
CI = settings(max_examples=300, derandomize=True, **_ALWAYS)  # the same examples in every run
NIGHTLY = settings(max_examples=10_000, derandomize=False, print_blob=True, **_ALWAYS)


def raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made the error, not something that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(PACKAGE) and (last.line or "").startswith("raise ")


How = tuple[str, str]  # a rule of verification, and one of PROPOSERS


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

    def forced(self, row: Row, tokens: list[int], stops: tuple[int, ...]) -> tuple[list[int], int]:
        """What a greedy row takes after each of its own tokens, and how many of these are beyond doubt."""
        with torch.no_grad():
            logits = self._model(torch.tensor([[*row.prompt, *tokens]])).logits[0, len(row.prompt) - 1 : -1]
        wanted = []
        for place, given in enumerate(logits.double().tolist()):
            shaped = shape(row, given, tokens[:place], stops)
            best, second = sorted(shaped, reverse=True)[:2]
            if best - second < self.TIE:
                return wanted, place
            wanted.append(shaped.index(best))
        return wanted, len(tokens)

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


def shape(row: Row, logits: list[float], output: list[int], stops: tuple[int, ...]) -> list[float]:
    """The definition: what a row's options make of its logits after some tokens of its own."""
    seen, banned = {*row.prompt, *output}, {*row.bad} - {*stops} | {*row.suppressed}
    for token in range(VOCAB):
        value = logits[token] + dict(row.bias).get(token, 0.0)
        if token in seen:
            value = value * row.repetition if value < 0 else value / row.repetition
        value -= row.frequency * output.count(token) + row.presence * (token in output)
        waits = token in stops and len(output) < row.least
        left_out = row.allowed is not None and token not in row.allowed
        logits[token] = -math.inf if token in banned or waits or left_out else value
    return logits


class Unsure(DeterministicProposer):
    """A proposer of one's own: some drafts, as many as the row's length says, one of them no id at all.

    How many does not depend on k: a row alone has its own limit as k, and among others the largest limit of all.
    """

    def guess(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(k)
        drafts = tokens.gather(1, (lengths[:, None] - 1 - places).clamp_min(0))
        return torch.where(places == 3, VOCAB, drafts), (lengths % (DRAFTS + 1)).clamp(max=k)


# (with a draft model, proposer)
PROPOSERS: dict[str, tuple[bool, Callable[[], Proposer | None]]] = {
    "model": (True, lambda: None),
    "lookup": (False, lambda: NGram(1, 3)),
    "both": (True, NGram),
    "own": (False, Unsure),
    "nothing": (False, lambda: None),
}


@dataclass
class Pair:
    """A target, and a draft that is right now and then: the same weights with noise, and a shorter context."""

    target: Path
    draft: Path
    made: dict[tuple[str, str], FastSpecGenerator] = field(default_factory=dict)

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

    def generator(
        self, *, page_size: int, batch: int, verification: str = BLOCK, proposer: str = "model"
    ) -> FastSpecGenerator:
        with_draft, make = PROPOSERS[proposer]
        return FastSpecGenerator(
            self.target,
            self.draft if with_draft else None,
            proposer=make(),
            verification=verification,
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

    def lonely(self, verification: str, proposer: str) -> FastSpecGenerator:
        """A generator of its own for one row at a time; under the coupled rule without any drafts."""
        key = (verification, "nothing" if verification == COUPLED else proposer)
        if key not in self.made:
            self.made[key] = self.generator(page_size=64, batch=1, verification=key[0], proposer=key[1])
        return self.made[key]

    def check(self, call: Call, out: GenerateOutput, how: How) -> None:
        """Compares a call's whole result with plain decoding, and sampled rows with themselves alone."""
        for row, tokens, reason in zip(call.whole, out.new_tokens, out.finish_reasons, strict=True):
            self.check_row(call, row, tokens, reason, how)
        check_sequences(call, out)
        check_stats(call, out, how)

    def check_row(self, call: Call, row: Row, tokens: list[int], reason: str | None, how: How) -> None:
        """One row; `reason` None: it was left before its end."""
        if row.temperature:
            wanted = self.alone(call, row, how)
            sure = len(wanted)
            assert reason is None or len(tokens) == sure, f"{row}: got {tokens}, wanted {wanted}"
        elif row.plain:
            wanted, sure = self.oracle.text(row.prompt, len(tokens))
        else:
            wanted, sure = self.oracle.forced(row, tokens, call.stops)
        assert tokens[:sure] == wanted[: min(sure, len(tokens))], f"{row}: got {tokens}, wanted {wanted}, {sure} sure"
        assert 0 < len(tokens) <= call.max_new_tokens or reason is None
        end = call.end(row, tokens)
        assert end in (None, len(tokens)), f"{row}: {tokens} goes on after its end"
        assert reason in (None, "length" if end is None else "stop")
        assert reason != "length" or len(tokens) == call.max_new_tokens

    def alone(self, call: Call, row: Row, how: How) -> list[int]:
        """What the row becomes in another generator, without neighbours."""
        k = call.k if all(one.drafts is None for one in call.rows) else None  # a list of drafts leaves `k` out
        if how[0] == COUPLED:
            row = replace(row, drafts=None)
        single = Call((row,), "lists", call.max_new_tokens, call.stops, call.pad, k, None, call.strings)
        arguments, options = single.arguments()
        if how[0] == COUPLED:
            options.pop("num_speculative_tokens")
        out = self.lonely(*how).generate(*arguments, **options, return_dict_in_generate=True)
        assert isinstance(out, GenerateOutput)
        assert all(0 <= token < VOCAB for token in out.new_tokens[0])
        return out.new_tokens[0]


def check_sequences(call: Call, out: GenerateOutput) -> None:
    longest = max(len(tokens) for tokens in out.new_tokens)
    rows = []
    for row, tokens in zip(call.whole, out.new_tokens, strict=True):
        before, after = call.width - len(row.prompt), longest - len(tokens)
        rows.append([call.pad] * before + list(row.prompt) + tokens + [call.pad] * after)
    assert out.sequences.tolist() == rows
    assert (out.logprobs is None) == (call.logprobs is None)
    if out.logprobs is not None and out.top_logprobs is not None:
        assert [len(values) for values in out.logprobs] == [len(tokens) for tokens in out.new_tokens]
        assert all(value <= 0 for values in out.logprobs for value in values)
        assert all(len(pairs) == call.logprobs for tops in out.top_logprobs for pairs in tops)
    assert (out.texts is not None) == bool(call.strings)
    for row, tokens, text in zip(call.whole, out.new_tokens, out.texts or (), strict=bool(call.strings)):
        assert text == cut_text(call, row, tokens)


def cut_text(call: Call, row: Row, tokens: list[int]) -> str:
    """The text of the tokens up to the end of the stop string that ends first."""
    before, new = text_of(row.prompt), text_of(tokens)
    known = len(before) + len(text_of(tokens[:-1]))
    starts = [((before + new).find(one, max(0, known - len(one) + 1)), len(one)) for one in call.strings]
    return new[: min((at + length - len(before) for at, length in starts if at >= 0), default=len(new))]


def check_stats(call: Call, out: GenerateOutput, how: How) -> None:
    k = 0 if how[1] == "nothing" else call.drafts
    assert out.stats.k == k
    for asked, row, tokens in zip(call.whole, out.stats.rows, out.new_tokens, strict=True):
        assert row.emitted == len(tokens) == row.steps + row.accepted - row.dropped
        assert sum(row.histogram) == row.steps
        assert sum(count * accepted for accepted, count in enumerate(row.histogram)) == row.accepted
        assert row.accepted <= row.drafted <= min(k, call.limit(asked)) * (row.steps - row.plain_steps)
        assert row.dropped in (0, 1)
    for name in ("steps", "drafted", "accepted", "emitted", "dropped"):
        assert getattr(out.stats, name) == sum(getattr(row, name) for row in out.stats.rows)
