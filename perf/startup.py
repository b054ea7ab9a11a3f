"""From the start of a process to the first token, checkpoints on the local disk, kernel caches empty and full.

The first run finds empty kernel caches ("cold"), the second what the first left in them ("warm"). Every part of a start
is a row of its own; of several ranks, which torch's launcher starts, that of the slowest. Then `fastspec generate` as a
whole, from the start of its process to the end, with full caches ("command"). A pair that was just written may be read
from memory and not from disk, and has the shipped pair's tokenizer, for the command takes text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastspec import demo_pair
from perf import records
from perf.models import add_pair_options
from perf.pairs import plant
from perf.records import Row
from perf.workloads import OWN, WORKLOADS

# "make" begins with "build", in which ranks meet and make their exchange, and has "read" beside "compile"; "wait" is
# for other ranks; "first token" is all from the start of the process
PARTS = (
    "start", "import torch", "import", "build", "meet", "exchange", "read", "compile", "wait", "capture", "make",
    "generate", "first token",
)  # fmt: skip
Pair = tuple[Path, Path]  # directories of target and draft
CHILD = """
import json, sys, time
times = {"begun": time.time()}
import torch
times["torch"] = time.time()
from fastspec import FastSpecGenerator
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.distributed.ranks import Ranks
from fastspec.distributed.world import World
from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPasses
times["imported"] = time.time()
took = dict.fromkeys(("meet", "exchange", "read", "compile", "wait", "capture"), 0.0)
def timed(owner, name, part, builds=False):
    inner = getattr(owner, name)
    def outer(*args, **options):
        start = time.time()
        if not builds:
            times.setdefault("built", start)
        made = inner(*args, **options)
        took[part] += time.time() - start
        return made
    setattr(owner, name, outer)
timed(Ranks, "of", "meet", builds=True)
timed(Ranks, "exchange", "exchange", builds=True)
timed(Loader, "fill", "read")
timed(Engine, "compile", "compile")
timed(World, "wait_for_all", "wait")
timed(Engine, "capture", "capture")
timed(PromptPasses, "capture", "capture")
sizes = {"num_speculative_tokens": 5, "max_length": 512, "device": sys.argv[3], "progress": False}
sizes |= {"draft_quantization": None}
if sys.argv[4] != "1":
    sizes["tensor_parallel"] = int(sys.argv[4])
generator = FastSpecGenerator(sys.argv[1], sys.argv[2], **sizes)
times["made"] = time.time()
next(iter(generator.stream([list(range(100, 228))], max_new_tokens=64, eos_token_id=None, pad_token_id=0)))
times["first"] = time.time()
sys.stdout.write(json.dumps([times, took]) + "\\n")
"""


def started(pair: Pair, caches: Path, device: str, ranks: int = 1) -> dict[str, float]:
    """Starts a fresh process, or `ranks` of them, with kernel caches in `caches`; seconds of each part.

    Raises:
        RuntimeError: the process failed.
    """
    env = _environment(caches)
    launched, command = time.time(), [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
        command.append(sys.executable)
    said = said_by([*command, "-c", CHILD, str(pair[0]), str(pair[1]), device, str(ranks)], env)
    told = [json.loads(line) for line in said.splitlines() if line.startswith("[{")]
    at, took = ({name: max(each[part][name] for each in told) for name in told[0][part]} for part in range(2))
    taken = {
        "start": at["begun"] - launched,
        "import torch": at["torch"] - at["begun"],
        "import": at["imported"] - at["torch"],
        "build": at["built"] - at["imported"],
        **took,
        "make": at["made"] - at["imported"],
        "generate": at["first"] - at["made"],
        "first token": at["first"] - launched,
    }
    return {part: round(taken[part], 3) for part in PARTS}


def commanded(pair: Pair, caches: Path, device: str, ranks: int = 1) -> float:
    """Runs `fastspec generate` with a few tokens; seconds from the start of its process to its end.

    Raises:
        RuntimeError: the process failed.
    """
    env = _environment(caches)
    command = [sys.executable, "-m", "fastspec.cli", "generate", str(pair[0]), "--prompt", "def main():"]
    command += ["--max-new-tokens", "8", "--draft", str(pair[1]), "--draft-quantization", "none"]
    command += ["--max-length", "512", "--device", device]
    if ranks > 1:
        command += ["--tensor-parallel", str(ranks)]
    begun = time.time()
    said_by(command, env)
    return time.time() - begun


def _environment(caches: Path) -> dict[str, str]:
    return {**os.environ, "TRITON_CACHE_DIR": str(caches / "triton"), "CUDA_CACHE_PATH": str(caches / "cuda")}


def said_by(command: list[str], env: Mapping[str, str]) -> str:
    """Runs a fresh process; returns its stdout.

    Raises:
        RuntimeError: the process failed.
    """
    run = subprocess.run(command, env=env, cwd=records.ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"a fresh process failed:\n{run.stderr[-2000:]}")
    return run.stdout


def pair_of(given: argparse.Namespace, scratch: Path) -> Pair:
    """Target and draft on disk: checkpoints of your own, those of `--pair`, or a planted pair that is written there."""
    if given.target:
        if given.draft is None:
            raise SystemExit("--target needs --draft: a start is that of a pair")
        return given.target, given.draft
    place = given.pair or scratch
    if not (place / "target").is_dir():
        plant(WORKLOADS[given.workload], acceptance=given.acceptance, seed=given.seed, device=given.device).save(place)
        for role, shipped in zip(("target", "draft"), demo_pair(), strict=True):
            for file in shipped.glob("tokenizer*"):
                shutil.copy(file, place / role)
    return place / "target", place / "draft"


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf startup`."""
    add_pair_options(made, "8b+1b")
    made.add_argument("--pair", type=Path, help="directory with target/ and draft/; written first if it has none")
    made.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share the target, a GPU each")


def command_startup(given: argparse.Namespace) -> Iterator[list[Row]]:
    """The parts of a start, from the start of a process until its first token."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as caches:
        pair = pair_of(given, Path(scratch))
        size = sum(file.stat().st_size for place in pair for file in place.rglob("*.safetensors"))
        fixed: Row = {"bench": "startup", "workload": OWN if given.target else given.workload, "status": "ok"}
        fixed["gib_on_disk"] = round(size / 2**30, 3)
        if (ranks := given.tensor_parallel) > 1:
            fixed["ranks"] = ranks
        for kernels in ("cold", "warm"):
            taken = started(pair, Path(caches), given.device, ranks)
            yield [{**fixed, "kernels": kernels, "part": part, "seconds": took} for part, took in taken.items()]
        took = round(commanded(pair, Path(caches), given.device, ranks), 3)
        yield [{**fixed, "kernels": "warm", "part": "command", "seconds": took}]
