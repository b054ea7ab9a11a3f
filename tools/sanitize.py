"""Runs a short generate under compute-sanitizer, which must find nothing.

    python tools/sanitize.py

Needs a CUDA GPU and the CUDA toolkit's compute-sanitizer. Reads and writes out of bounds (memcheck) are looked for in
steps launched one by one, with every tensor an allocation of its own, and in captured steps; races in shared memory
(racecheck) in captured steps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

RUNS = {"memcheck, step by step": ("memcheck", False), "memcheck": ("memcheck", True), "racecheck": ("racecheck", True)}
CODE = """
import sys
from fastspec import FastSpecGenerator, demo_pair
sizes = {"num_speculative_tokens": 3, "max_batch_size": 2, "max_length": 200}
with FastSpecGenerator(*demo_pair(), **sizes, graphs=sys.argv[1] == "True", progress=False) as gen:
    prompts = [list(range(1, 40)), [5, 6, 7]]
    gen.generate(prompts, max_new_tokens=6)
    gen.generate(prompts, max_new_tokens=6, do_sample=True, temperature=0.9, top_k=20, top_p=0.9, seed=0)
print("generated")
"""


def clean(tool: str, graphs: bool) -> bool:
    """Whether the tool finds nothing; prints the first that it found."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    if not graphs:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", "--print-limit=5"]
    run = subprocess.run(
        [*command, sys.executable, "-c", CODE, str(graphs)], env=env, capture_output=True, text=True, check=False
    )
    said = (run.stdout + run.stderr).splitlines()
    found = [line for line in said if line.startswith("=========")]
    print("\n".join(found[:40] or said[-20:]))
    return run.returncode == 0 and "generated" in run.stdout


def main() -> int:
    found = {name: clean(*given) for name, given in RUNS.items()}
    print({name: "clean" if is_clean else "NOT CLEAN" for name, is_clean in found.items()})
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
