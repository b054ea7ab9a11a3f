"""Rows of a call of `score`, checked: each becomes a prompt and the given tokens of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from fastspec.inputs.options import Options, top_logprobs
from fastspec.inputs.prompts import RawPrompts, read
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.values import column, whole

T = TypeVar("T")
_CALLER = 4  # stack levels from `RawPrompts.prompts` to the user's line


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One row of a call of `score`.

    Attributes:
        tokens: token ids, without padding.
        length: tokens of its prompt.
        fed: tokens that passes over prompts feed. The last token is never one of them: a step scores it.
    """

    tokens: list[int]
    length: int
    fed: int

    @property
    def given(self) -> tuple[int, ...]:
        """Tokens that steps score."""
        return tuple(self.tokens[self.fed :])

    def parts(self, of_prompt: list[T], of_steps: list[T]) -> tuple[list[T], list[T]]:
        """Divides results into those of the prompt from the second token on, and those of the answer.

        Args:
            of_prompt: a result for each token of `fed` from the second on.
            of_steps: a result for each token of `given`.
        """
        last = self.length - self.fed
        return of_prompt + of_steps[:last], of_steps[last:]


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """Checked arguments of a call of `score`.

    Attributes:
        rows: the rows of the call.
        raw: rows with the caller's padding.
        options: options of the requests, one for each row that has something to score.
    """

    rows: list[ScoredRow]
    raw: RawPrompts
    options: Options

    @property
    def scored(self) -> list[ScoredRow]:
        """The rows that have something to score: a row of one token has nothing."""
        return [row for row in self.rows if row.given]


def read_scored(
    input_ids: Any, attention_mask: Any, lengths: Any, top: Any, *, prompts: bool, vocab_size: int, max_length: int
) -> ScoreInputs:
    """Reads and checks the arguments of `score`. Touches no device memory.

    Args:
        input_ids, attention_mask, lengths: see `score`.
        top: its top_logprobs.
        prompts: its prompt_logprobs.
        vocab_size: token ids lie below it.
        max_length: tokens that a row may have.

    Raises:
        ValueError: a bad row or value, named with its place.
    """
    raw = read(input_ids, attention_mask)
    texts = raw.prompts(vocab_size, stacklevel=_CALLER)
    limits = column("lengths", lengths, len(texts))
    rows = [_row(index, text, limits[index], max_length, prompts=prompts) for index, text in enumerate(texts)]
    found = top_logprobs("top_logprobs", top, vocab_size) or 0
    given = [row.given for row in rows if row.given]
    options = Options(
        max_new_tokens=max(map(len, given), default=1),
        stop_ids=(),
        stop_strings=(),
        pad_token_id=0,
        rows=tuple(RowOptions(0.0, 0, 1.0, 0.0, 0, given=tokens) for tokens in given),
        copies=1,
        return_dict=True,
        num_speculative_tokens=None,
        top_logprobs=found,
        prompt_top_logprobs=found if prompts else None,
        seeded=True,
    )
    return ScoreInputs(rows, raw, options)


def _row(index: int, tokens: list[int], length: Any, max_length: int, *, prompts: bool) -> ScoredRow:
    """Checks one row."""
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
