"""Reads and checks the options of each row (output sequence). If an option is a list, it has one value per prompt."""

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

_IN_WORDS = 10  # number of ids that an error lists


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Checked options of one row. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    Attributes:
        temperature, top_k, top_p, min_p: see `fastspec.sampling.distribution.compute_probs`.
        seed: seed of the row's random numbers.
        repetition_penalty, presence_penalty, frequency_penalty: see `fastspec.sampling.processors.ProcessorRows`.
        bias: (id, bias) pairs, each id once. -inf bans the id.
        allowed: ids that the row may emit. None: every id.
        min_new_tokens: number of new tokens before which no stop id is allowed.
        draft_limit: upper limit of draft tokens per step. 0: no speculation. None: the generator's limit.
        grammar: grammar that the text must follow. None: any text.
        given: token ids that the row must emit, to record their log-probabilities. None: the target chooses them.
        processed_logprobs: True if recorded log-probabilities are those of the distribution from which the row samples.
        prediction: token ids that the row is likely to repeat. Empty: there are none.
        session: name of a group of requests. Draft tokens of the row may come from earlier answers of its group. None:
            no group.
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
    given: tuple[int, ...] | None = None
    processed_logprobs: bool = False

    @property
    def guided(self) -> bool:
        """True if the host sends draft tokens and token masks for each decode step of the row."""
        return self.grammar is not None or self.given is not None

    @property
    def processed(self) -> bool:
        """True if the row has an option that changes logits, other than temperature, top_k, top_p and min_p."""
        changed = any(getattr(self, name) != each.neutral for name, each in NUMBERS.items() if each.changes_greedy)
        return changed or bool(self.bias) or self.allowed is not None or self.min_new_tokens > 0

    @property
    def plain(self) -> bool:
        """True if the row is greedy and no option changes its logits."""
        return self.temperature == 0 and not self.processed


def read_number(name: str, value: Any) -> float:
    """Checks the value of an option of `NUMBERS`. None gives the option's neutral value.

    Raises:
        ValueError: the value is not a number, or out of range.
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
        given: option values by keyword: one value, or one per prompt. None: not given.
        num_rows: number of prompts.
        copies: number of rows per prompt. They differ only in their seeds.
        vocab_size: upper limit of ids (exclusive).
        stop_ids: token ids that end a row. As in transformers, bad_words_ids does not ban them.
        do_sample: True if rows sample. False: rows are greedy, whatever the temperature.
        max_new_tokens: upper limit of new tokens of a row, and so of min_new_tokens.

    Raises:
        ValueError: a value out of range, a list of a wrong length, or options that leave no id for the first token.
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
    """Checks the numeric options of one row, given by keyword. Returns {field of `RowOptions`: value}."""
    least = values.whole("min_new_tokens", row["min_new_tokens"] or 0, low=0)
    if least > max_new_tokens:
        raise ValueError(
            f"min_new_tokens={least} is more than the {max_new_tokens} new tokens of the limit; change one of them"
        )
    checked: dict[str, Any] = {"temperature": _temperature(row["temperature"]) if do_sample else 0.0}
    checked |= {name: read_number(name, row[name]) for name in NUMBERS if name not in checked}
    return checked | {"min_new_tokens": least, "draft_limit": _draft_limit(row["num_speculative_tokens"])}


def _draft_limit(value: Any) -> int | None:
    """Reads num_speculative_tokens of a row. Returns None if it is "auto" or not given."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return None
    if isinstance(value, str):
        raise ValueError(f"num_speculative_tokens must be a whole number or {AUTO!r}, got {value!r}")
    return values.whole("num_speculative_tokens", value, low=0)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Biases by token id, banned token ids and allowed token ids of each prompt. Allowed ids None: all are allowed."""

    bias: list[dict[int, float]]
    banned: list[set[int]]
    allowed: list[tuple[int, ...] | None]

    @classmethod
    def of(cls, given: Mapping[str, Any], num_rows: int, vocab_size: int, stop_ids: tuple[int, ...]) -> _Ids:
        """Reads biases, banned ids and allowed ids of each prompt from `given`, a call's options by keyword."""
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
    """Raises ValueError if the options of the prompt with this index allow no token as the first new one."""
    banned = {key for key, value in options["bias"] if value == -math.inf}
    waiting = set(stop_ids) if options["min_new_tokens"] else set()
    allowed = options["allowed"]
    left = vocab_size - len(banned | waiting) if allowed is None else len(set(allowed) - banned - waiting)
    if not left:
        named = "all ids" if allowed is None else f"allowed_token_ids={list(allowed[:_IN_WORDS])!r}"
        raise ValueError(
            f"prompt {index}: its options ban every token of {named} (bad_words_ids, suppress_tokens, biases of -inf, "
            "stop ids before min_new_tokens or min_length); leave at least one token allowed"
        )


def _temperature(value: Any) -> float:
    """Reads a row's temperature. 0 is greedy.

    A value below MIN_TEMPERATURE gives 0, because in fp32 the distribution then is the greedy one. Some clients send
    1e-5 when they mean greedy decoding.
    """
    number = values.real("temperature", value, 1.0, low=0.0, high=MAX_TEMPERATURE)
    return 0.0 if number < MIN_TEMPERATURE else number


def _seeds(seed: Any, num_rows: int, copies: int, drawn: bool) -> list[int]:
    """Returns the seed of each row.

    Args:
        seed: the option `seed`. A list has one seed per row. From a single number the seed of each row is derived.
            None: a random number takes the place of the single number.
        num_rows: number of prompts.
        copies: number of rows per prompt.
        drawn: True if rows sample.
    """
    if values.is_list(seed):
        of = "prompts" if copies == 1 else f"rows ({num_rows} prompts times num_return_sequences)"
        rows = values.per_row("seed", values.listed(seed), num_rows * copies, of)
        return [values.whole("seed", one, low=-(2**63), high=2**63 - 1) for one in rows]
    if seed is None:
        # torch's CPU generator, whatever the default device is: torch.manual_seed then makes a call repeatable. Greedy
        # rows need no random numbers, so they leave that generator unchanged
        seed = int(torch.randint(2**63 - 1, (), device="cpu").item()) if drawn else secrets.randbits(63)
    base = values.whole("seed", seed, low=-(2**63), high=2**63 - 1)
    return [derive_seed(base, prompt, copy) for prompt in range(num_rows) for copy in range(copies)]


def derive_seed(seed: int, prompt_index: int, return_index: int) -> int:
    """Derives the signed 64-bit seed of a row from the call's seed, by SplitMix64 finalisers.

    Args:
        seed: seed of the call.
        prompt_index: index of the row's prompt.
        return_index: index of the row among the rows of its prompt.
    """
    state = seed % 2**64
    for word in (prompt_index, return_index):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
