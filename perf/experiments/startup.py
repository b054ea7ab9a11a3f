"""From the start of a process to the first token, checkpoints on the local disk, kernel caches empty and full.

    python -m perf.experiments.startup [--workload 8b+1b] [--pair DIRECTORY]

Writes the planted pair to disk first, unless it lies there already (`python -m perf pair --to DIRECTORY`): files just
written may come from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perf import records
from perf.cases import ACCEPTED

COLUMNS = ("workload", "kernels", "status", "first_token_s", "import_s", "make_s", "generate_s", "gib_on_disk")
CHILD = """
import json, sys, time
begun = time.time()
from fastspec import FastSpecGenerator
imported = time.time()
sizes = {"num_speculative_tokens": 5, "max_length": 512, "device": sys.argv[3], "progress": False}
generator = FastSpecGenerator(sys.argv[1], sys.argv[2], **sizes)
made = time.time()
next(iter(generator.stream([list(range(100, 228))], max_new_tokens=64, eos_token_id=None, pad_token_id=0)))
first = time.time()
print(json.dumps({"first": first, "import_s": imported - begun, "make_s": made - imported, "generate_s": first - made}))
"""


def started(pair: Path, caches: Path, device: str) -> records.Row:
    """Seconds of one fresh process, whose kernel caches lie in `caches`."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(caches / "triton"), "CUDA_CACHE_PATH": str(caches / "cuda")}
    begun = time.time()
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(pair / "target"), str(pair / "draft"), device],
        env=env,
        cwd=records.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"a fresh process failed:\n{run.stderr[-2000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    return {"first_token_s": round(found.pop("first") - begun, 2)} | {key: round(s, 2) for key, s in found.items()}


def measured(pair: Path, workload: str, device: str) -> list[records.Row]:
    """A row with empty caches, then one with what that left in them."""
    size = sum(file.stat().st_size for file in pair.rglob("*.safetensors"))
    fixed = {"bench": "startup", "workload": workload, "status": "ok", "gib_on_disk": round(size / 2**30, 2)}
    with tempfile.TemporaryDirectory() as caches:
        return [{**fixed, "kernels": kernels, **started(pair, Path(caches), device)} for kernels in ("cold", "warm")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="8b+1b")
    parser.add_argument("--pair", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out")
    parser.add_argument("--commit")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pair = given.pair or Path(scratch)
        if not (pair / "target").is_dir():
            make = [sys.executable, "-m", "perf", "pair", "--workload", given.workload, "--device", given.device]
            subprocess.run([*make, "--acceptance", str(ACCEPTED), "--to", str(pair)], check=True, cwd=records.ROOT)
        rows = measured(pair, given.workload, given.device)
    print(records.table(rows, COLUMNS))
    if given.out:
        records.append(given.out, [records.environment(given.device, given.commit) | row for row in rows])


if __name__ == "__main__":
    main()
