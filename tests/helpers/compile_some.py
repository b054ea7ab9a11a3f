"""Compiles some launches of every kernel: a quick look at whether a Triton takes them. Prints a JSON line each.

One process for each core compiles. The exit status is 1 if a launch does not compile.

`make newest` runs it with the newest Triton, whose Gluon has other names now and then. What the machine code is like,
and every launch that there is, tests/kernels looks at with the Triton of the environment.

Usage: python -m tests.helpers.compile_some
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton

from fastspec.kernels.common.compilers import of_this_machine
from tests.helpers import recorder
from tests.helpers.launches import GROUPS
from tests.helpers.recorder import Launch, first_of_each

ARCHITECTURES = (90, 100, 80)  # by warp groups, by neither
ROWS_OF_PRODUCTS = (8, 16, 40)  # a norm on the way, a kernel of its own, and kernels for many rows


def some(arch: int) -> Iterator[Launch]:
    """All launches, but of products only those of some numbers of rows."""
    for name, calls in GROUPS.items():
        launches = recorder.record(arch, lambda calls=calls: calls(arch))  # type: ignore[misc]
        if name.startswith(("products", "tails")):
            launches = [each for each in launches if int(each.call.split()[-1]) in ROWS_OF_PRODUCTS]
        yield from launches


def kind(launch: Launch) -> tuple[object, ...]:
    """By kernel, type of its first floats, and apart those that are gated or record log-probabilities."""
    given = launch.arguments
    floats = (value.dtype for value in given.values() if isinstance(value, torch.Tensor) and value.is_floating_point())
    return launch.name, next(floats, None), bool(given.get("GATED")), bool(given.get("TOP"))


def compile_next(found: list[tuple[int, Launch]], begun: Any) -> None:
    """Compiles launches that no other process has begun, until none is left.

    found: (architecture, launch) of each. begun: number of launches that processes have begun, shared by them.
    """
    while True:
        with begun.get_lock():
            number = begun.value
            begun.value += 1
        if number >= len(found):
            return
        arch, launch = found[number]
        recorder.use(recorder.cuda(arch))
        recorder.compiled(launch)
        print(json.dumps({"triton": triton.__version__, "kernel": launch.name, "arch": arch}), flush=True)


def main() -> None:
    found = list[tuple[int, Launch]]()
    for arch in ARCHITECTURES:
        recorder.use(recorder.cuda(arch))
        found += [(arch, launch) for launch in first_of_each(some(arch), kind)]
    forked = multiprocessing.get_context("fork")  # its processes have the launches, which cannot be sent to others
    begun = forked.Value("l", 0)
    processes = [forked.Process(target=compile_next, args=(found, begun)) for _ in range(of_this_machine())]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    sys.exit(any(each.exitcode for each in processes))


if __name__ == "__main__":
    main()
