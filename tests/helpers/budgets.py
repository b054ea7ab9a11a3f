"""What machine code may take: shared memory by architecture, and bytes of a thread that wait in memory."""

from __future__ import annotations

from typing import Any

import triton

# what one block may use of shared memory, in bytes (CUDA programming guide, compute capabilities table)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
REGISTERS = 65536  # of a multiprocessor, of 32 bits each; same table
# What waits in memory because registers do not hold it, and whether products wait for each other, is one compiler's
# choice: other versions are free to choose anew, and these numbers say nothing about them. CI pins this one.
COMPILER = "3.6."


def fits(report: dict[str, Any], arch: int, spills: int) -> bool:
    """Whether a block finds the shared memory and registers it asks for, and a thread leaves at most `spills` bytes.

    And whether products of a warp group are under way together, where it has any.
    """
    kept = (report["spills"] <= spills and not report["one_by_one"]) or not triton.__version__.startswith(COMPILER)
    registers = (report["registers"] or 0) * report["threads"]  # without a limit of its own it gets what there is
    return kept and report["shared"] <= SHARED_LIMIT[arch] and registers <= REGISTERS
