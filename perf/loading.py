"""Loading a model from 16-bit files that lie in memory, as they are and rounded: `python -m perf loading`.

A row for each format and load. Processes are fresh and load twice; the first of a format finds an empty cache of
Triton's, the second a filled one. `over_plain` is to the fastest of the loads of 16 bits with the same place in their
process. `cpu_s` are the seconds of all threads. `peak_over_held_layers` is the memory that is used meanwhile and not
kept, in layers of 16 bits. Weights alone are loaded: no model is made, and nothing else is compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastspec.kernels.common.rounding import FORMATS
from fastspec.kernels.ops import Ops
from fastspec.kernels.select import ops_for
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights, planned_bytes
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.layer_table import DecoderWeights
from perf.pairs import unplanted
from perf.records import Row
from perf.startup import said_by
from perf.workloads import SHAPED, WORKLOADS

STORED = "bf16"
LOADS = ("first", "again")
CACHES = ("empty", "filled")
COLUMNS = ("target", "load", "kernels", "seconds", "cpu_s", "over_plain", "held_over_plan", "peak_over_held_layers")
CHILD = """
import json, sys
from pathlib import Path
import torch
from perf.loading import LOADS, loaded
device = torch.device(sys.argv[3])
torch.zeros(1, device=device).cpu()
print(json.dumps([loaded(Path(sys.argv[1]), sys.argv[2], device) for _ in LOADS]))
"""


def write(workload: str, directory: Path, device: torch.device) -> None:
    """Writes the workload's target with random weights in bf16, in files of some gigabytes."""
    model = unplanted(WORKLOADS[workload].config("target"), torch.bfloat16, device)
    model.save_pretrained(directory, max_shard_size="2GB")


def loaded(directory: Path, form: str, device: torch.device) -> Row:
    """Loads a checkpoint once in this process; the row has seconds, and on CUDA bytes."""
    chosen = resolve_pair(directory, None, (None, None), (None if form == STORED else form, None))[0]
    assert isinstance(chosen, Checkpoint), "a native family"
    ops: Ops = ops_for(device)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "ops": ops}
    planned = planned_bytes(chosen, **how)
    before = _memory(device, begin=True)[0]
    start, start_cpu = time.perf_counter(), time.process_time()
    weights = load_weights(chosen, progress=False, **how)
    held, peak = (each - before for each in _memory(device))  # waits for the device
    row: Row = {"target": form, "seconds": round(time.perf_counter() - start, 3)}
    row["cpu_s"] = round(time.process_time() - start_cpu, 2)
    if device.type == "cuda":
        row |= {
            "held_over_plan": round(held / planned, 4),
            "peak_over_held_layers": round((peak - held) / _layer(weights), 2),
        }
    return row


def _memory(device: torch.device, begin: bool = False) -> tuple[int, int]:
    """(bytes that are allocated, the most that were since `begin`) once all work is done."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    if begin:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def _layer(weights: DecoderWeights) -> int:
    """Bytes of a layer's matrices in 16 bits."""
    first = weights.layers[0]
    return 2 * sum(math.prod(each.shape) for each in (*first.mixer, *first.mlp))


def processes(directory: Path, device: str) -> list[Row]:
    """Rows of fresh processes, two for each format."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for kernels in CACHES:
            for form in (STORED, *FORMATS):
                command = [sys.executable, "-c", CHILD, str(directory), form, device]
                told = json.loads(said_by(command, {**os.environ, "TRITON_CACHE_DIR": cache}).splitlines()[-1])
                rows += [{"kernels": kernels, "load": load} | row for load, row in zip(LOADS, told, strict=True)]
    return rows


def compared(rows: list[Row]) -> list[Row]:
    """Adds `over_plain` to the rows."""
    plain = {load: min(_seconds(rows, load)) for load in LOADS}
    return [row | {"over_plain": round(row["seconds"] / plain[row["load"]], 2)} for row in rows]


def _seconds(rows: list[Row], load: str) -> list[float]:
    return [row["seconds"] for row in rows if row["target"] == STORED and row["load"] == load]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf loading`."""
    made.set_defaults(out="formats", columns=COLUMNS)
    made.add_argument("--workload", choices=SHAPED, default="8b+1b")
    made.add_argument("--target", type=Path, help="a checkpoint of your own, in place of the workload's shape")


def command_loading(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Loading a model from 16-bit files in memory, as they are and rounded."""
    shared = Path("/dev/shm")  # files there are in memory, whatever else the machine does
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as scratch:
        if given.target is None:
            write(given.workload, Path(scratch), torch.device(given.device))
        rows = compared(processes(given.target or Path(scratch), given.device))
    what = given.workload if given.target is None else "a checkpoint"
    fixed = {"bench": "formats load", "workload": f"{what}, bf16 files in memory", "status": "ok"}
    yield [fixed | row for row in rows]
