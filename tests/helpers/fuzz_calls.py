"""Random calls of the fuzz tests: rows with options of every kind, and the ways to pass them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

VOCAB, CONTEXT, DRAFTS = 31, 64, 4
# the text of each id: letters, two letters, and parts of what others hold, so that a stop string has many ways to come
LETTERS = [*"abcdefghijklmnopq", "ab", "bc", "cab", " ", "dd", "é", "a ", "d", "ba", "x", "abc", "y", "z", "w"][:VOCAB]


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer in which id i is LETTERS[i], or a second spelling of it."""
    names = [f"{text}{chr(0x200B) * LETTERS[:index].count(text)}" for index, text in enumerate(LETTERS)]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoders.Sequence([decoders.Replace(chr(0x200B), ""), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def text_of(tokens: Sequence[int]) -> str:
    """What the tokens say."""
    return "".join(LETTERS[token] for token in tokens)


@dataclass(frozen=True)
class Row:
    """A prompt and its options; those from `repetition` on are neutral by default."""

    prompt: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    least: int = 0
    drafts: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the row takes the model's largest logit as it is."""
        return self == Row(self.prompt, 0.0, self.top_k, self.top_p, self.min_p, self.seed, drafts=self.drafts)

    def shaping(self) -> dict[str, Any]:
        """Its values of the options that are neutral by default, as `generate` names and takes them."""
        return {
            "repetition_penalty": self.repetition,
            "presence_penalty": self.presence,
            "frequency_penalty": self.frequency,
            "logit_bias": dict(self.bias) or None,
            "allowed_token_ids": None if self.allowed is None else list(self.allowed),
            "bad_words_ids": [[token] for token in self.bad] or None,
            "suppress_tokens": list(self.suppressed) or None,
            "min_new_tokens": self.least,
        }


NEUTRAL = Row((), 0.0, 0, 1.0, 0.0, 0).shaping()


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
    strings: tuple[str, ...] = ()
    copies: int = 1

    @property
    def sampled(self) -> bool:
        return any(row.temperature for row in self.rows)

    @property
    def width(self) -> int:
        return max(len(row.prompt) for row in self.rows)

    @property
    def whole(self) -> list[Row]:
        """The rows of the result: a prompt's copies one after the other, each with a seed of its own."""
        return [replace(row, seed=row.seed ^ copy) for row in self.rows for copy in range(self.copies)]

    @property
    def drafts(self) -> int:
        """Drafts per step that the statistics name."""
        limits = [row.drafts for row in self.rows]
        if any(limit is not None for limit in limits):
            return DRAFTS if None in limits else max(limit for limit in limits if limit is not None)
        return DRAFTS if self.k is None else self.k

    def limit(self, row: Row) -> int:
        """Drafts that the row may have in a step."""
        return self.drafts if row.drafts is None else row.drafts

    def end(self, row: Row, tokens: Sequence[int]) -> int | None:
        """How many of the tokens there are up to a stop id or the end of a stop string."""
        before = text_of(row.prompt)
        for count, token in enumerate(tokens, 1):
            text = before + text_of(tokens[:count])
            known = len(before) + len(text_of(tokens[: count - 1]))
            if token in self.stops or any(text.find(one, max(0, known - len(one) + 1)) >= 0 for one in self.strings):
                return count
        return None

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
            for name in ("temperature", "top_k", "top_p", "min_p"):
                options[name] = [getattr(row, name) for row in self.rows]
            options["seed"] = [row.seed for row in self.whole]
        options |= self._shaping()
        if self.form == "flat":
            return (prompts[0],), options
        if self.form == "tensors":
            return ([torch.tensor(prompt) for prompt in prompts],), options
        if self.form == "padded":
            padded = [[self.pad] * (self.width - len(prompt)) + prompt for prompt in prompts]
            mask = [[0] * (self.width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            return (torch.tensor(padded), torch.tensor(mask)), options
        return (prompts,), options

    def _shaping(self) -> dict[str, Any]:
        """Options that some row has, one value for all where all have the same, else one per row."""
        options: dict[str, Any] = {}
        for name, neutral in NEUTRAL.items():
            values = [row.shaping()[name] for row in self.rows]
            if any(value != neutral for value in values):
                options[name] = values[0] if all(value == values[0] for value in values) else values
        if any(row.drafts is not None for row in self.rows):
            options["num_speculative_tokens"] = [row.drafts for row in self.rows]
        if self.strings:
            options |= {"stop_strings": list(self.strings), "tokenizer": letters()}
        if self.copies > 1:
            options["num_return_sequences"] = self.copies
        return options


IDS = st.integers(0, VOCAB - 1)
PROMPTS = st.one_of(
    st.integers(1, 50).map(lambda length: tuple(7 * length * place % VOCAB for place in range(length))),
    st.lists(IDS, min_size=1, max_size=6).map(tuple),
)
SEEDS = st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
SAMPLED = {
    "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 0, 1, 5, VOCAB, 1000]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.0]),
    "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
}
GREEDY = dict(zip(SAMPLED, map(st.just, (0.0, 0, 1.0, 0.0)), strict=True))
FEW = st.lists(IDS, max_size=3, unique=True).map(tuple)
# what each row may add to its sampling; always leaves ids that are neither banned nor stop ids
SHAPED = {
    "repetition": st.sampled_from([1.0, 1.0, 1.3, 2.0, 0.5]),
    "presence": st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.0]),
    "frequency": st.sampled_from([0.0, 0.0, 0.25, 2.0, -0.5]),
    "bias": st.dictionaries(IDS, st.sampled_from([9.0, 3.0, -3.0, float("-inf")]), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    "allowed": st.one_of(st.none(), st.lists(IDS, min_size=20, unique=True).map(tuple)),
    "bad": FEW,
    "suppressed": FEW,
    "least": st.sampled_from([0, 1, 2, 4, 20]),
    "drafts": st.sampled_from([None, None, *range(DRAFTS + 1)]),
}
KINDS = {
    "greedy": st.builds(Row, PROMPTS, seed=SEEDS, **GREEDY),
    "sampled": st.builds(Row, PROMPTS, seed=SEEDS, **SAMPLED),
    "shaped": st.builds(Row, PROMPTS, seed=SEEDS, **GREEDY, **SHAPED),
    "both": st.builds(Row, PROMPTS, seed=SEEDS, **SAMPLED, **SHAPED),
}
MIXES = [
    ("both",),
    ("greedy",),
    ("sampled", "greedy"),
    ("shaped", "greedy"),
    ("both", "sampled", "shaped", "greedy"),
]


@st.composite
def calls(draw: st.DrawFn, texts: Any, max_rows: int = 4, *, copies: bool = True) -> Call:
    """Any good call; `texts`(prompt, count) is the plain text of a row, whose tokens stop calls now and then."""
    kinds = draw(st.sampled_from(MIXES))
    rows = draw(st.lists(st.one_of(*(KINDS[kind] for kind in kinds)), min_size=1, max_size=max_rows))
    room = CONTEXT - max(len(row.prompt) for row in rows)
    cap = draw(st.one_of(st.integers(1, min(12, room)), st.sampled_from([min(20, room), min(16, room), 1])))
    text = texts(draw(st.sampled_from(rows)).prompt, cap)[0]
    stops = draw(st.lists(st.one_of(IDS, st.sampled_from(text), st.sampled_from(text[:5])), max_size=3))
    strings = draw(st.lists(pieces(text_of(text)), max_size=2)) if "shaped" in kinds or "both" in kinds else []
    form = draw(st.sampled_from(["lists", "tensors", "padded", "flat"] if len(rows) == 1 else ["lists", "padded"]))
    call = Call(
        tuple(replace(row, least=min(row.least, cap)) for row in rows),
        form,
        cap,
        tuple(stops),
        draw(IDS),
        draw(st.sampled_from([None, *range(DRAFTS + 1)])),
        draw(st.sampled_from([None, None, 0, 2])),
        tuple(strings),
    )
    return replace(call, copies=draw(st.sampled_from([1, 1, 2, 3]))) if copies and call.sampled else call


@st.composite
def pieces(draw: st.DrawFn, text: str) -> str:
    """A few characters of a text, or a letter."""
    at = draw(st.integers(0, max(0, len(text) - 1)))
    return text[at : at + draw(st.integers(1, 4))] or draw(st.sampled_from("abz"))
