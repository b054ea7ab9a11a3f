"""Compiles some launches of every kernel: a quick look at whether a Triton takes them. Prints a JSON line each.

`make newest` runs it with the newest Triton, whose Gluon has other names now and then. What the machine code is like,
and every launch that there is, tests/kernels looks at with the Triton of the environment.

Usage: python -m tests.helpers.compile_some
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
import triton

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


def main() -> None:
    for arch in ARCHITECTURES:
        recorder.use(recorder.cuda(arch))
        for launch in first_of_each(some(arch), kind):
            recorder.compiled(launch)
            print(json.dumps({"triton": triton.__version__, "kernel": launch.name, "arch": arch}), flush=True)


if __name__ == "__main__":
    main()
