"""Finds and runs the benches of single operations under perf/kernels.

A bench is a module perf/kernels/<name>.py whose `rows(*, device, quick)` yields JSON-ready rows; `quick` asks for the
smallest sizes, to show that it runs. One with GPU_ONLY set is only imported where there is no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from perf.records import Row

FOLDER = Path(__file__).parent / "kernels"


def names() -> list[str]:
    """Benches found, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def run_benches(
    wanted: list[str], *, device: torch.device, quick: bool, say: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Rows of the benches named, or of all, each with its bench's name.

    Raises:
        ValueError: a name that is not there.
    """
    there = names()
    if missing := [name for name in wanted if name not in there]:
        raise ValueError(f"no bench {', '.join(missing)}; there are: {', '.join(there) or 'none'}")
    for name in wanted or there:
        say(name)
        module = f"perf.kernels.{name}"
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            yield {"bench": name, "status": f"cannot be imported here: {error.name or error}"}
            continue
        if device.type != "cuda" and getattr(found, "GPU_ONLY", False):
            yield {"bench": name, "status": "imported; it needs a GPU to run"}
            continue
        yield from ({"bench": name, "status": "ok", **row} for row in found.rows(device=device, quick=quick))
