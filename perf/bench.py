"""Finds and runs the benches of single operations under perf/kernels.

A bench is a module perf/kernels/<name>.py whose `rows(*, device, quick)` yields JSON-ready rows; `quick` asks for the
smallest sizes, to show that it runs. One with GPU_ONLY set is only imported where there is no GPU. One without `rows`
is a script that prints, and needs a GPU too.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from perf.records import ROOT, Row

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
        bench = getattr(found, "rows", None)
        if device.type != "cuda" and (bench is None or getattr(found, "GPU_ONLY", False)):
            yield {"bench": name, "status": "imported; it needs a GPU to run"}
        elif bench is None:
            done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=False)
            yield {"bench": name, "status": "printed" if done.returncode == 0 else f"failed: exit {done.returncode}"}
        else:
            yield from ({"bench": name, "status": "ok", **row} for row in bench(device=device, quick=quick))
