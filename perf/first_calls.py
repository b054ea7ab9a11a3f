"""First calls of fresh processes, kernel caches empty and full: `python -m perf first_calls`.

A process makes a generator, and calls it once greedily or sampled, and then again. The generator compiles the kernels
of sampled steps in the background, so the first sampled call may wait for them. A row has the seconds of each part, the
kernels for which the call waited, when the slowest kernels began and ended, and when each compilation of the engine
did. These times count from the end of the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastspec import demo_pair
from perf.records import Row
from perf.startup import said_by
from perf.workloads import OWN, SHIPPED

# name of a call -> options of `generate`
CALLS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1},
        "top_p": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 1},
        "top_k": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 1.0, "seed": 1},
        "min_p": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.05, "seed": 1},
    }
)
SHOWN = 6  # slowest kernels of a row
COLUMNS = ("kernels", "k", "first call", "make", "call", "again", "others", "waited", "slowest")
CHILD = """
import json, sys, time
given = json.loads(sys.argv[1])
import torch
from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.kernels.common import compilers
began, jobs, waited, compiled = time.perf_counter(), [], [], []
def now():
    return time.perf_counter() - began
asked, result, compile = compilers._asked, compilers.KernelBehind.result, Engine.compile
def timed(process, job, launcher):
    start = now()
    try:
        return asked(process, job, launcher)
    finally:
        jobs.append([json.loads(job)[1]["kernel"][1], round(start, 2), round(now(), 2)])
def waiting(self, timeout=None):
    start = now()
    try:
        return result(self, timeout)
    finally:
        if now() - start > 0.02:
            waited.append([self.name, round(start, 2), round(now(), 2)])
def compiling(self, *args, **options):
    start = now()
    compile(self, *args, **options)
    compiled.append([round(start, 2), round(now(), 2)])
Engine.compile = compiling
compilers._asked, compilers.KernelBehind.result = timed, waiting
sizes = {"max_length": 512, "max_batch_size": given["rows"], "device": given["device"], "progress": False}
if given["k"]:
    sizes |= {"num_speculative_tokens": given["k"], "draft_quantization": None}
generator = FastSpecGenerator(given["target"], given["draft"] if given["k"] else None, **sizes)
made = now()
def call(options):
    start = time.perf_counter()
    generator.generate([list(range(100, 164))], max_new_tokens=16, eos_token_id=None, pad_token_id=0, **options)
    return round(time.perf_counter() - start, 3)
first = call(given["first"])
told = {"make": round(made, 2), "call": first, "jobs": list(jobs), "waited": list(waited), "compile": list(compiled)}
told["again"] = call(given["first"])
told["others"] = {name: call(options) for name, options in given["others"].items()}
sys.stdout.write(json.dumps(told) + "\\n")
"""


def started(pair: tuple[Path, Path], caches: Path, given: argparse.Namespace, k: int, first: str) -> Row:
    """The row of one fresh process, with kernel caches in `caches`."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(caches / "triton"), "CUDA_CACHE_PATH": str(caches / "cuda")}
    others = {name: dict(options) for name, options in CALLS.items() if name != first}
    sizes = {"target": str(pair[0]), "draft": str(pair[1]), "device": given.device, "rows": given.rows, "k": k}
    asked = json.dumps({**sizes, "first": dict(CALLS[first]), "others": others})
    told = json.loads(said_by([sys.executable, "-c", CHILD, asked], env).splitlines()[-1])
    jobs = sorted(told.pop("jobs"), key=lambda each: each[1] - each[2])
    row: Row = {"first call": first, "k": k, "status": "ok", **told, "compiled": len(jobs)}
    return row | {"slowest": jobs[:SHOWN]}


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf first_calls`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--target", type=Path, help="a checkpoint of your own, in place of the shipped pair")
    made.add_argument("--draft", type=Path, help="its draft")
    made.add_argument("--ks", type=int, nargs="+", default=[4, 0], help="drafts a step; 0 is plain")
    made.add_argument("--first", nargs="+", choices=CALLS, default=["greedy", "sampled"], help="first calls")
    made.add_argument("--rows", type=int, default=8, help="batch slots of the generator")
    made.add_argument("--warm", action="store_true", help="also with the caches that the first process left")


def command_first_calls(given: argparse.Namespace) -> Iterator[list[Row]]:
    """First greedy and first sampled call of fresh processes, with the kernels for which they waited."""
    target, draft = demo_pair() if given.target is None else (given.target, given.draft)
    if given.target is not None and draft is None and any(given.ks):
        raise SystemExit("--target needs --draft, or --ks 0")
    about = {"bench": "first call", "workload": SHIPPED if given.target is None else OWN, "rows": given.rows}
    for k in given.ks:
        for first in given.first:
            with tempfile.TemporaryDirectory() as caches:
                for kernels in ("cold", "warm") if given.warm else ("cold",):
                    yield [{**about, "kernels": kernels, **started((target, draft), Path(caches), given, k, first)}]
