"""Straight-line Python for the place at which a row continues in a text that it repeats."""

from __future__ import annotations

from collections.abc import Sequence

from fastspec.kernels.reference.lookup import GAP


def common(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Number of last tokens that two sequences share."""
    count = 0
    while count < min(most, len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count


def followed(text: list[int], row: list[int], otherwise: int, min_n: int, max_n: int) -> tuple[int, int]:
    """The definition of `follow`: place of the next token, and tokens that match."""
    anchors = []
    for gap in range(1, min(GAP + 1, len(row))):
        for place in range(1, len(text) - gap):
            run = common(text[:place], row[: len(row) - gap], 99)
            if run >= max(3, min_n):
                anchors.append((min(run, 16), -gap, -abs(place + gap - otherwise), -place, place + gap))
    expected = max(anchors)[-1] if anchors else otherwise
    anchored = bool(anchors) or (otherwise <= GAP and otherwise < len(text))
    found = []
    for place in range(1, len(text)):
        run, distance = common(text[:place], row, max_n), abs(place - expected)
        if run >= min_n or (anchored and run >= 1 and distance <= GAP):
            found.append((run, -distance, -place))
    if found:
        return -max(found)[2], max(found)[0]
    return (expected, 1) if anchored else (0, 0)
