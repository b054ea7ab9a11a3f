"""Reads and checks the rows of a call of `score`. A row is a prompt, followed by the tokens of a given answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastspec.errors import UnsupportedOption
from fastspec.inputs.options import Options, checked_mode, resolve, top_logprobs
from fastspec.inputs.prompts import RawPrompts, read
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.table import PROCESSED, RAW, ScoreOptions
from fastspec.inputs.values import column, whole

if TYPE_CHECKING:
    from transformers import GenerationConfig

T = TypeVar("T")
_NEUTRAL: Final = RowOptions(0.0, 0, 1.0, 0.0, 0)
_CALLER = 4  # stack levels from `RawPrompts.prompts` to the user's line


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row of a call of `score`.

    Attributes:
        tokens: token ids, without padding.
        length: number of tokens of the prompt.
        fed: number of first tokens that prefill passes process. Decode steps score the rest. The rest has at least the
            last token, except in a row of one token.
    """

    tokens: list[int]
    length: int
    fed: int

    @property
    def given(self) -> tuple[int, ...]:
        """Tokens whose log-probabilities are computed in decode steps."""
        return tuple(self.tokens[self.fed :])

    def parts(self, of_prompt: list[T], of_steps: list[T]) -> tuple[list[T], list[T]]:
        """Splits results of single tokens into (results of the prompt's tokens, results of the answer's tokens).

        The prompt's first token has no result.

        Args:
            of_prompt: results of the first `fed` tokens, without the first token.
            of_steps: results of the tokens of `given`.
        """
        last = self.length - self.fed
        return of_prompt + of_steps[:last], of_steps[last:]


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """Checked arguments of a call of `score`.

    Attributes:
        rows: the rows of the call, without padding.
        raw: the same rows as the user passed them, with padding.
        options: options of the decode steps. `options.rows` has one entry for each row of `scored`, which are the rows
            of more than one token. An answer is the tokens after the prompt. For a row without an answer, the entry
            changes no logits.
    """

    rows: list[ScoredRow]
    raw: RawPrompts
    options: Options

    @property
    def scored(self) -> list[ScoredRow]:
        """The rows with tokens that decode steps score: all rows of more than one token."""
        return [row for row in self.rows if row.given]


@dataclass(frozen=True, slots=True)
class ScoreMode:
    """Distribution of the log-probabilities of answers.

    Attributes:
        mode: argument logprobs_mode of `score`. None: "raw".
        checkpoint: generation config of the target's checkpoint. None: it has none.
        config: argument generation_config of `score`. None: not given.
        keywords: sampling options of `score` by keyword. None: not given.
    """

    mode: Any = None
    checkpoint: GenerationConfig | None = None
    config: GenerationConfig | None = None
    keywords: Mapping[str, Any] | None = None

    def options(self, rows: int, width: int, vocab_size: int, context: int) -> Options | None:
        """Reads the options that change the log-probabilities of answers.

        Returns None if answers are scored by the target's unprocessed logits.

        Args:
            rows: number of rows.
            width: number of tokens of the longest row.
            vocab_size: upper limit of token ids (exclusive).
            context: largest number of tokens of a row.

        Raises:
            ValueError: options were given without logprobs_mode="processed", or a value is invalid.
            UnsupportedOption: a keyword is not an option of `score`.
        """
        given = {name: value for name, value in (self.keywords or {}).items() if value is not None}
        if others := sorted(given.keys() - ScoreOptions.__annotations__.keys()):
            raise UnsupportedOption(
                f"score has no option {others[0]!r}; it has {', '.join(ScoreOptions.__annotations__)}"
            )
        if checked_mode(self.mode) == RAW:
            if given or self.config is not None:
                name = min(given, default="generation_config")
                raise ValueError(
                    f"{name} does not change log-probabilities of the raw target; give logprobs_mode={PROCESSED!r} too"
                )
            return None
        merged = {**given, "logprobs_mode": PROCESSED, "logprobs": True, "max_new_tokens": context}
        limits: dict[str, int] = {"num_rows": rows, "prompt_length": width, "vocab_size": vocab_size}
        found = resolve(self.checkpoint, self.config, merged, context=context, **limits)
        return found if found.processed_logprobs else None


RAW_SCORES: Final = ScoreMode()


def read_scored(
    input_ids: Any,
    attention_mask: Any,
    lengths: Any,
    top: Any,
    *,
    prompts: bool,
    vocab_size: int,
    max_length: int,
    mode: ScoreMode = RAW_SCORES,
) -> ScoreInputs:
    """Reads and checks the arguments of `score`. Uses no device memory.

    Args:
        input_ids, attention_mask, lengths: see `score`.
        top: argument top_logprobs of `score`.
        prompts: argument prompt_logprobs of `score`.
        vocab_size: upper limit of token ids (exclusive).
        max_length: largest number of tokens of a row.
        mode: distribution of the log-probabilities of answers.

    Raises:
        ValueError: a row or value is invalid. The message says where it is.
        UnsupportedOption: a sampling option in `mode` is not an option of `score`.
    """
    raw = read(input_ids, attention_mask)
    texts = raw.prompts(vocab_size, stacklevel=_CALLER)
    limits = column("lengths", lengths, len(texts))
    rows = [_row(index, text, limits[index], max_length, prompts=prompts) for index, text in enumerate(texts)]
    found = top_logprobs("top_logprobs", top, vocab_size) or 0
    under = mode.options(len(rows), raw.width, vocab_size, max_length)
    waits = under is not None and any(row.min_new_tokens for row in under.rows)
    stop_ids = under.stop_ids if under is not None and waits else ()
    chosen = [
        _scored(index, row, _NEUTRAL if under is None else under.rows[index], stop_ids)
        for index, row in enumerate(rows)
        if row.given
    ]
    options = Options(
        max_new_tokens=max((len(row.given) for row in rows), default=1),
        stop_ids=stop_ids,
        stop_strings=(),
        pad_token_id=0,
        rows=tuple(chosen),
        copies=1,
        return_dict=True,
        num_speculative_tokens=None,
        top_logprobs=found,
        prompt_top_logprobs=found if prompts else None,
        seeded=True,
        processed_logprobs=any(row.processed_logprobs for row in chosen),
    )
    return ScoreInputs(rows, raw, options)


def _scored(index: int, row: ScoredRow, options: RowOptions, stop_ids: tuple[int, ...]) -> RowOptions:
    """Returns the options of a row, with `given` set to the tokens that decode steps score.

    Args:
        index: index of the row, for errors.
        row: the row.
        options: options that change the log-probabilities of the row's answer.
        stop_ids: ids that end an answer. () if no row has min_new_tokens.

    Raises:
        ValueError: the options ban a token, or a stop id is not the last token.
    """
    if row.length == len(row.tokens):  # its last token belongs to the prompt, which is scored raw
        return replace(_NEUTRAL, given=row.given)
    banned = {key for key, value in options.bias if value == -math.inf}
    allowed = None if options.allowed is None else {*options.allowed}
    for place, token in enumerate(row.given):
        early = place < options.min_new_tokens and token in stop_ids
        if token in banned or early or (allowed is not None and token not in allowed):
            raise ValueError(
                f"row {index}, position {row.length + place}: the options ban id {token}, so no answer has it there; "
                "loosen them, or take logprobs_mode='raw'"
            )
        if token in stop_ids and place < len(row.given) - 1:
            raise ValueError(
                f"row {index}, position {row.length + place}: id {token} ends an answer, and with min_new_tokens it "
                "may only come last; shorten the row, or leave min_new_tokens out"
            )
    return replace(options, seed=0, draft_limit=None, given=row.given, processed_logprobs=not options.plain)


def _row(index: int, tokens: list[int], length: Any, max_length: int, *, prompts: bool) -> ScoredRow:
    """Checks one row of `score`, and returns it.

    Args:
        index: index of the row, for errors.
        tokens: token ids of the row.
        length: number of tokens of the prompt. None: the whole row is the prompt.
        max_length: largest number of tokens of a row.
        prompts: True if prompts are scored, too.

    Raises:
        ValueError: the row is too long or has nothing to score, or its length is out of range.
    """
    if len(tokens) > max_length:
        raise ValueError(
            f"row {index} has {len(tokens)} tokens, more than max_length={max_length}. Shorten it, or make the "
            "generator with a larger max_length"
        )
    length = len(tokens) if length is None else whole("lengths", length, low=1, high=len(tokens))
    if length == len(tokens) and not prompts:
        raise ValueError(
            f"row {index} has nothing to score: all of its {length} tokens are its prompt, and prompt_logprobs is "
            "False. Give lengths that leave an answer, or prompt_logprobs=True"
        )
    return ScoredRow(tokens, length, fed=min(length, max(1, len(tokens) - 1)))
