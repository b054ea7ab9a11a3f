"""Options of one row, checked: lists with one value per prompt become one `RowOptions` a row."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastspec.adaptive.controller import AUTO
from fastspec.grammar.spec import KINDS, GrammarSpec
from fastspec.inputs import values
from fastspec.inputs.table import MAX_TEMPERATURE, MIN_TEMPERATURE, NUMBERS

_IN_WORDS = 10  # ids named in an error


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
        prediction: text that the row is likely to repeat; empty: none.
        session: name of the requests whose answers may draft for one another; None: none.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    min_new_tokens: int = 0
    draft_limit: int | None = None
    grammar: GrammarSpec | None = None
    prediction: tuple[int, ...] = ()
    session: str | None = None

    @property
    def processed(self) -> bool:
        """True if an option other than temperature and filters changes the logits."""
        changed = any(getattr(self, name) != each.neutral for name, each in NUMBERS.items() if each.changes_greedy)
        return changed or bool(self.bias) or self.allowed is not None or self.min_new_tokens > 0

    @property
    def plain(self) -> bool:
        """True if the row takes the largest unchanged logit."""
        return self.temperature == 0 and not self.processed


def read_number(name: str, value: Any) -> float:
    """Checks the value of an option that is one number a row; None is its neutral value.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    number = NUMBERS[name]
    if isinstance(number.neutral, int):
        given = number.neutral if value is None else value
        return values.whole(name, given, low=int(number.low), high=int(number.high))
    return values.real(name, value, number.neutral, low=number.low, high=number.high)


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
    """Makes the options of `copies` rows per prompt.

    Args:
        given: values by keyword, one for all prompts or one per prompt; None where the caller gave none.
        num_rows: prompts.
        copies: rows that each prompt becomes; they differ only in their seeds.
        vocab_size: ids lie below it.
        stop_ids: end a row; transformers takes them out of bad_words_ids.
        do_sample: False is greedy, whatever the temperature.
        max_new_tokens: upper limit of min_new_tokens.

    Raises:
        ValueError: a value out of range, a list of another length, or no id left that a row could begin with.
        UnsupportedOption: a banned or biased sequence of several ids.
    """
    columns = {name: values.column(name, given[name], num_rows) for name in (*COLUMNS, *KINDS)}
    ids = _Ids.of(given, num_rows, vocab_size, stop_ids)
    predictions = values.id_sequences("predictions", given["predictions"], num_rows, vocab_size)
    sessions = values.texts("session", given["session"], num_rows)
    seeds = _seeds(given["seed"], num_rows, copies, do_sample)
    rows = []
    for index in range(num_rows):
        row = {name: column[index] for name, column in columns.items()}
        options = _numbers(row, do_sample, max_new_tokens) | ids.of_row(index) | {"grammar": GrammarSpec.read(row)}
        options |= {"prediction": predictions[index], "session": sessions[index]}
        _check_choice(index, options, vocab_size, stop_ids)
        rows += [RowOptions(**options, seed=seed) for seed in seeds[index * copies : (index + 1) * copies]]
    return tuple(rows)


COLUMNS = (*NUMBERS, "min_new_tokens", "num_speculative_tokens")


def _numbers(row: Mapping[str, Any], do_sample: bool, max_new_tokens: int) -> dict[str, Any]:
    """Checks the options of one row that are numbers."""
    least = values.whole("min_new_tokens", row["min_new_tokens"] or 0, low=0)
    if least > max_new_tokens:
        raise ValueError(f"min_new_tokens={least} is more than the {max_new_tokens} new tokens at most; change one")
    checked: dict[str, Any] = {"temperature": _temperature(row["temperature"]) if do_sample else 0.0}
    checked |= {name: read_number(name, row[name]) for name in NUMBERS if name not in checked}
    return checked | {"min_new_tokens": least, "draft_limit": _draft_limit(row["num_speculative_tokens"])}


def _draft_limit(value: Any) -> int | None:
    """Reads the largest number of drafts of a row; None leaves it to the generator, or to "auto"."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return None
    if isinstance(value, str):
        raise ValueError(f"num_speculative_tokens must be a whole number or {AUTO!r}, got {value!r}")
    return values.whole("num_speculative_tokens", value, low=0)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Biased, banned and allowed ids of each prompt."""

    bias: list[dict[int, float]]
    banned: list[set[int]]
    allowed: list[tuple[int, ...] | None]

    @classmethod
    def of(cls, given: Mapping[str, Any], num_rows: int, vocab_size: int, stop_ids: tuple[int, ...]) -> _Ids:
        """Reads the ids of each row from the options of a call."""
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
    """Raises ValueError for a row that could not take any token."""
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
    """The temperature of a row; 0 is greedy.

    Below MIN_TEMPERATURE it is 0: the distribution's limit, which fp32 does not tell from it. Clients send 1e-5 or less
    where they mean greedy decoding.
    """
    number = values.real("temperature", value, 1.0, low=0.0, high=MAX_TEMPERATURE)
    return 0.0 if number < MIN_TEMPERATURE else number


def _seeds(seed: Any, num_rows: int, copies: int, drawn: bool) -> list[int]:
    """Returns the caller's seeds, one per row, or seeds derived from (seed, prompt index, return index)."""
    if values.is_list(seed):
        of = "prompts" if copies == 1 else f"rows ({num_rows} prompts times num_return_sequences)"
        rows = values.per_row("seed", values.listed(seed), num_rows * copies, of)
        return [values.whole("seed", one, low=-(2**63), high=2**63 - 1) for one in rows]
    if seed is None:
        # torch's CPU generator, whatever the default device: torch.manual_seed then repeats a call. Greedy rows draw
        # nothing, so they take no number from the caller's generator
        seed = int(torch.randint(2**63 - 1, (), device="cpu").item()) if drawn else secrets.randbits(63)
    base = values.whole("seed", seed, low=-(2**63), high=2**63 - 1)
    return [derive_seed(base, prompt, copy) for prompt in range(num_rows) for copy in range(copies)]


def derive_seed(seed: int, prompt_index: int, return_index: int) -> int:
    """Derives a signed 64-bit row seed from (seed, prompt index, return index) by a chain of SplitMix64 finalisers."""
    state = seed % 2**64
    for word in (prompt_index, return_index):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
