"""Keys of captured work: what differs between two graphs of one engine, and how messages name it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from fastspec.shapes import KEY_BLOCK, StepShape


class StepKey(NamedTuple):
    """One decoding step.

    Attributes:
        rows: rows that it runs over.
        shape: everything else that was fixed on the host.
    """

    rows: int
    shape: StepShape


class PromptKey(NamedTuple):
    """One pass over a chunk of a prompt.

    Attributes:
        tokens: size of the chunk.
        draft: the pass is the draft model's, not the target's.
        rows: prompts that go through together, each with a chunk of that size.
    """

    tokens: int
    draft: bool
    rows: int = 1


class PartKey(NamedTuple):
    """One part of a step, captured alone so that it can be timed.

    Attributes:
        part: "draft" or "score".
        step: the whole step.
    """

    part: str
    step: StepKey


def describe(key: Hashable) -> str:
    """The key in words, for messages and profilers. A key of another type is its own name."""
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
    positions = f", {shape.num_blocks * KEY_BLOCK} positions"
    begin = f", none before {shape.first_block * KEY_BLOCK}" if shape.first_block else ""
    grammars = "" if shape.grammars is None else f", grammars {shape.grammars}"
    k = "first tokens" if shape.first_token else f"k = {shape.num_drafts}"
    return f"{rows} rows, {k}, {shape.sampler}{recorded}{positions}{begin}{grammars}"
