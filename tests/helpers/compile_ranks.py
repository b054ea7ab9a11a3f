"""Two ranks that compile the same kernels at once, into one cache. Prints JSON lines.

Usage: python -m tests.helpers.compile_ranks 1     with one process each; 0: in their own threads
       python -m tests.helpers.compile_ranks rank 0 1 DIRECTORY     one of them
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from fastspec.kernels import select
from fastspec.kernels.common.compilers import Compilers
from fastspec.kernels.common.launch import compiling, launch
from tests.helpers import recorder
from tests.helpers.compile_jobs import launches

KERNELS = 4  # of the quick ones


def of_rank(rank: int, processes: int, where: Path) -> None:
    """Compiles when it is told to."""
    triton.knobs.cache.dir = str(where / "cache")
    recorder.use(recorder.cuda(90))
    found = list(launches(90, ["steps"]))[:KERNELS]
    with Compilers(processes, kernels=select.KERNELS, now=bool(processes), rank=rank, ranks=2) as executor:
        if processes:
            executor._places.put(executor._places.get())  # when it is ready
        print("ready", flush=True)
        sys.stdin.readline()
        with compiling(executor):
            for _ in range(2):
                for each in found:
                    launch(each.kernel, each.grid, *each.given, **each.options)
    print(json.dumps({"rank": rank, "kernels": len(found)}), flush=True)


def counted(where: Path) -> dict[str, str]:
    """An assembler that notes each kernel that it is given, in the environment of who compiles."""
    wrapper = where / "ptxas"
    noted = f'case "$*" in *--version*) ;; *) echo one >>{where}/compiled ;; esac'
    wrapper.write_text(f'#!/bin/sh\n{noted}\nexec {triton.knobs.nvidia.ptxas.path} "$@"\n')
    wrapper.chmod(0o755)
    return {**os.environ, "TRITON_PTXAS_PATH": str(wrapper)}


def main(processes: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        command, environment = [sys.executable, "-m", "tests.helpers.compile_ranks", "rank"], counted(where)
        ranks = [
            subprocess.Popen(
                [*command, str(rank), processes, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        for each in ranks:
            assert each.stdout is not None
            each.stdout.readline()
        for each in ranks:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        for each in ranks:
            print(each.communicate()[0], end="", flush=True)
            assert each.returncode == 0
        compiled = (where / "compiled").read_text().splitlines()
        left = [each.name for each in (where / "cache").glob("*.compiling")]
        print(json.dumps({"compiled": len(compiled), "left": left}))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        of_rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1])
