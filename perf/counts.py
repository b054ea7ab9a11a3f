"""Tokens per step of the shipped pair: counts of calls, which do not depend on the machine."""

from __future__ import annotations

from typing import Any

from fastspec import FastSpecGenerator, GenerateOutput, demo_pair

PROMPT, NEW = 48, 96  # tokens of a prompt, and new ones

Counts = tuple[list[float], list[float]]  # tokens and steps of each prompt


def shipped_generator(**options: Any) -> FastSpecGenerator:
    """A generator of the shipped pair on the CPU, for prompts of PROMPT tokens and NEW new ones."""
    return FastSpecGenerator(
        *demo_pair(), max_batch_size=8, max_length=PROMPT + NEW, device="cpu", progress=False, **options
    )


def counts_of(output: object) -> tuple[Counts, float]:
    """(counts, acceptance) of a call."""
    assert isinstance(output, GenerateOutput)
    rows = output.stats.rows
    counts = [float(row.emitted) for row in rows], [float(row.steps) for row in rows]
    return counts, output.stats.acceptance_rate or 0.0
