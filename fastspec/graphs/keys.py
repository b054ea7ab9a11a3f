"""Keys of captured CUDA graphs. Each graph of an engine has its own key, and messages name the graph by it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from fastspec.shapes import KEY_BLOCK, StepShape


class StepKey(NamedTuple):
    """Key of a decode step.

    Attributes:
        rows: number of batch slots that the step covers.
        shape: everything else that is fixed in a captured step, such as the number of draft tokens.
    """

    rows: int
    shape: StepShape


class PromptKey(NamedTuple):
    """Key of a prefill pass.

    Attributes:
        tokens: number of tokens per row.
        draft: True for a pass of the draft model.
        rows: number of rows of the pass. Several rows may have tokens of the same prompt.
    """

    tokens: int
    draft: bool
    rows: int = 1


class PartKey(NamedTuple):
    """Key of one part of a step, which is captured separately to measure its time.

    Attributes:
        part: "draft" (the draft's passes) or "score" (the target's pass).
        step: key of the whole step.
    """

    part: str
    step: StepKey


def describe(key: Hashable) -> str:
    """Describes the step or pass of a key, for messages and profilers. A key of another type is formatted by `str`."""
    if isinstance(key, StepKey):
        return _step(key.rows, key.shape)
    if isinstance(key, PromptKey):
        prompts = "prompt" if key.rows == 1 else f"{key.rows} prompts"
        return f"{prompts}, {key.tokens} tokens" + (", of the draft" if key.draft else "")
    if isinstance(key, PartKey):
        return f"{key.part}: {describe(key.step)}"
    return str(key)


def _step(rows: int, shape: StepShape) -> str:
    recorded = "" if shape.top_logprobs is None else f", {shape.top_logprobs} top logprobs"
    recorded += " after options" if shape.processed else ""
    positions = f", {shape.num_blocks * KEY_BLOCK} positions"
    begin = f", none before {shape.first_block * KEY_BLOCK}" if shape.first_block else ""
    grammars = "" if shape.grammars is None else f", grammars {shape.grammars}"
    k = "first tokens" if shape.first_token else f"k = {shape.num_drafts}"
    return f"{rows} rows, {k}, {shape.sampler}{recorded}{positions}{begin}{grammars}"
