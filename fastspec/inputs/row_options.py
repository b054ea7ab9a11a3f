"""Options of one row: what the sampler does with it, checked and told apart by prompt."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fastspec.adaptive.controller import AUTO
from fastspec.grammar.spec import KINDS, GrammarSpec
from fastspec.inputs import values

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
MAX_PENALTY = 2.0  # of presence and frequency, either way, as in vLLM
MAX_REPETITION = 1e4
_IN_WORDS = 10  # ids named in an error


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric option of a row, declared at its field of `RowOptions`: everything but its formula.

    Attributes:
        name: keyword of `generate`, and attribute of `RowOptions`.
        fills: the field of `DecodeState` that admission sets to the value.
        neutral: the value that changes nothing; None from the caller means it.
        low, high: least and largest value. An int `neutral` admits whole numbers only.
        in_transformers: a field of transformers' GenerationConfig. Otherwise the option is ours.
        changes_greedy: it changes logits, so a greedy row's tokens too. Otherwise it acts on the distribution alone.
    """

    name: str
    fills: str
    neutral: float
    low: float
    high: float
    in_transformers: bool
    changes_greedy: bool

    def read(self, value: Any) -> float:
        """The checked value of what a caller gave.

        Raises:
            ValueError: it is no number, or out of range.
        """
        if isinstance(self.neutral, int):
            given = self.neutral if value is None else value
            return values.whole(self.name, given, low=int(self.low), high=int(self.high))
        return values.real(self.name, value, self.neutral, low=self.low, high=self.high)


def _number(
    fills: str, neutral: float, low: float, high: float, *, in_transformers: bool = True, changes_greedy: bool = False
) -> dict[str, Any]:
    """Metadata of a field of `RowOptions`: a `Number` but for its name."""
    return {"number": (fills, neutral, low, high, in_transformers, changes_greedy)}


_REPETITION = _number("repetition", 1.0, 1 / MAX_REPETITION, MAX_REPETITION, changes_greedy=True)
_PRESENCE, _FREQUENCY = (
    _number(fills, 0.0, -MAX_PENALTY, MAX_PENALTY, in_transformers=False, changes_greedy=True)
    for fills in ("presence", "frequency")
)


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of one row. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    Attributes:
        temperature, top_k, top_p, min_p: as in `fastspec.sampling.distribution.compute_probs`.
        seed: of the row's randomness.
        repetition_penalty, presence_penalty, frequency_penalty: as in `fastspec.sampling.processors.ProcessorRows`.
        bias: (id, bias) pairs, each id once; -inf bans.
        allowed: ids that may come at all; None: every id.
        min_new_tokens: no stop id comes before so many.
        draft_limit: drafts per step at most; 0 opts out of speculation, None takes what the generator drafts.
        grammar: that the text follows; None: any text.
    """

    temperature: float = field(metadata=_number("temperature", 1.0, 0.0, MAX_TEMPERATURE))
    top_k: int = field(metadata=_number("top_k", 0, 0, 2**31 - 1))
    top_p: float = field(metadata=_number("top_p", 1.0, 0.0, 1.0))
    min_p: float = field(metadata=_number("min_p", 0.0, 0.0, 1.0))
    seed: int
    repetition_penalty: float = field(default=1.0, metadata=_REPETITION)
    presence_penalty: float = field(default=0.0, metadata=_PRESENCE)
    frequency_penalty: float = field(default=0.0, metadata=_FREQUENCY)
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    min_new_tokens: int = 0
    draft_limit: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def processed(self) -> bool:
        """Whether anything but temperature and filters changes the logits."""
        changed = any(getattr(self, each.name) != each.neutral for each in NUMBERS if each.changes_greedy)
        return changed or bool(self.bias) or self.allowed is not None or self.min_new_tokens > 0

    @property
    def plain(self) -> bool:
        """Whether the row takes the model's largest logit, as it is."""
        return self.temperature == 0 and not self.processed


NUMBERS = tuple(Number(each.name, *each.metadata["number"]) for each in fields(RowOptions) if each.metadata)


def rows_of(
    given: Mapping[str, Any],
    *,
    num_rows: int,
    copies: int,
    vocab_size: int,
    stop_ids: tuple[int, ...],
    do_sample: bool,
    max_new_tokens: int,
) -> tuple[RowOptions, ...]:
    """Options of `copies` rows per prompt, of the fields of `given`: one value for all, or one per prompt.

    Args:
        given: values by name, as the caller gave them or their defaults.
        num_rows: prompts.
        copies: rows that each prompt becomes; they differ in their seeds alone.
        vocab_size: ids lie below it.
        stop_ids: end a row; transformers takes them out of bad_words_ids.
        do_sample: False: greedy, whatever the temperature.
        max_new_tokens: no row may have to have more.

    Raises:
        ValueError: a value out of range, a list of another length, or no id left that a row could begin with.
        UnsupportedOption: a banned or biased sequence of several ids.
    """
    columns = {name: values.column(name, given[name], num_rows) for name in (*_COLUMNS, *KINDS)}
    ids = _Ids.of(given, num_rows, vocab_size, stop_ids)
    seeds = _seeds(given["seed"], num_rows, copies, do_sample)
    rows = []
    for index in range(num_rows):
        row = {name: column[index] for name, column in columns.items()}
        options = _numbers(row, do_sample, max_new_tokens) | ids.of_row(index) | {"grammar": GrammarSpec.read(row)}
        _check_choice(index, options, vocab_size, stop_ids)
        rows += [RowOptions(**options, seed=seed) for seed in seeds[index * copies : (index + 1) * copies]]
    return tuple(rows)


_COLUMNS = (*(each.name for each in NUMBERS), "min_new_tokens", "num_speculative_tokens")


def _numbers(row: Mapping[str, Any], do_sample: bool, max_new_tokens: int) -> dict[str, Any]:
    """Checked options of one row that are numbers."""
    least = values.whole("min_new_tokens", row["min_new_tokens"] or 0, low=0)
    if least > max_new_tokens:
        raise ValueError(f"min_new_tokens={least} is more than the {max_new_tokens} new tokens at most; change one")
    checked: dict[str, Any] = {"temperature": _temperature(row["temperature"]) if do_sample else 0.0}
    checked |= {each.name: each.read(row[each.name]) for each in NUMBERS if each.name not in checked}
    return checked | {"min_new_tokens": least, "draft_limit": _draft_limit(row["num_speculative_tokens"])}


def _draft_limit(value: Any) -> int | None:
    """Drafts of a row per step at most; None leaves it to the generator, or to "auto"."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return None
    if isinstance(value, str):
        raise ValueError(f"num_speculative_tokens must be a whole number or {AUTO!r}, got {value!r}")
    return values.whole("num_speculative_tokens", value, low=0)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids that each prompt's rows are biased to, may not take, or may take alone."""

    bias: list[dict[int, float]]
    banned: list[set[int]]
    allowed: list[tuple[int, ...] | None]

    @classmethod
    def of(cls, given: Mapping[str, Any], num_rows: int, vocab_size: int, stop_ids: tuple[int, ...]) -> _Ids:
        common = values.sequence_biases("sequence_bias", given["sequence_bias"], vocab_size)
        words = values.single_words("bad_words_ids", given["bad_words_ids"], num_rows, vocab_size)
        suppressed = values.id_columns("suppress_tokens", given["suppress_tokens"], num_rows, vocab_size)
        return cls(
            [_sum(common, own) for own in values.biases("logit_bias", given["logit_bias"], num_rows, vocab_size)],
            [set(word) - set(stop_ids) | set(gone or ()) for word, gone in zip(words, suppressed, strict=True)],
            values.id_columns("allowed_token_ids", given["allowed_token_ids"], num_rows, vocab_size),
        )

    def of_row(self, index: int) -> dict[str, Any]:
        bias = self.bias[index] | dict.fromkeys(self.banned[index], -math.inf)
        return {"bias": tuple(sorted(bias.items())), "allowed": self.allowed[index]}


def _sum(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {*first, *second}}


def _check_choice(index: int, options: Mapping[str, Any], vocab_size: int, stop_ids: tuple[int, ...]) -> None:
    """Refuses a row that no token is left for."""
    banned = {key for key, value in options["bias"] if value == -math.inf}
    waiting = set(stop_ids) if options["min_new_tokens"] else set()
    allowed = options["allowed"]
    left = vocab_size - len(banned | waiting) if allowed is None else len(set(allowed) - banned - waiting)
    if not left:
        named = "all ids" if allowed is None else f"allowed_token_ids={list(allowed[:_IN_WORDS])!r}"
        raise ValueError(
            f"prompt {index}: no token could come, of {named}, after what is banned (bad_words_ids, suppress_tokens, "
            "biases of -inf, stop ids before min_new_tokens or min_length); leave it at least one"
        )


def _temperature(value: Any) -> float:
    """0 is greedy; between it and the least temperature, logits divided by it would leave fp32."""
    number = values.real("temperature", value, 1.0, low=0.0, high=MAX_TEMPERATURE)
    if 0 < number < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}, got {value!r}"
        )
    return number


def _seeds(seed: Any, num_rows: int, copies: int, drawn: bool) -> list[int]:
    """The caller's seeds, one per row, or as many derived from (seed, prompt index, return index)."""
    if values.is_list(seed):
        of = "prompts" if copies == 1 else f"rows ({num_rows} prompts times num_return_sequences)"
        rows = values.per_row("seed", values.listed(seed), num_rows * copies, of)
        return [values.whole("seed", one, low=-(2**63), high=2**63 - 1) for one in rows]
    if seed is None:
        # torch's CPU generator, whatever the default device is: torch.manual_seed repeats a call. Greedy rows draw
        # nothing, and leave the caller's random numbers alone
        seed = int(torch.randint(2**63 - 1, (), device="cpu").item()) if drawn else secrets.randbits(63)
    base = values.whole("seed", seed, low=-(2**63), high=2**63 - 1)
    return [derive_seed(base, prompt, copy) for prompt in range(num_rows) for copy in range(copies)]


def derive_seed(seed: int, prompt_index: int, return_index: int) -> int:
    """A signed 64-bit row seed from (seed, prompt index, return index): SplitMix64 finalisers in a chain."""
    state = seed % 2**64
    for word in (prompt_index, return_index):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
