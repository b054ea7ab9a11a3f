"""On GPUs: exchanges are right, launched and replayed, and texts are the same on all ranks and without drafts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import models_on_devices, on_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]


def sizes_of(check: str) -> tuple[int, ...]:
    """Numbers of ranks that can divide the heads of the shipped pair: its target's four, its draft's two."""
    if "texts" not in check:
        return 2, 4, 8
    return (2,) if "cut draft" in check else (2, 4)


RANKS = [(check, ranks) for check in on_devices.CHECKS for ranks in sizes_of(check)]


@pytest.mark.parametrize(("check", "ranks"), RANKS)
def test_ranks_on_gpus(check: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run(check, ranks)


def test_the_text_is_that_of_one_gpu() -> None:
    """To the bit, with `tensor_parallel=1` and on as many as there are."""
    sizes = [ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()]
    assert len({run(on_devices.TEXT, ranks).partition("text ")[2] for ranks in sizes}) == 1


@pytest.mark.slow
def test_exchanges_touch_no_memory_but_their_own() -> None:
    """By compute-sanitizer, whose checks make every start much longer."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    # no errors of calls: torch asks the driver for what it may not have
    tool = "compute-sanitizer --tool memcheck --report-api-errors no --kernel-name kns=_kernel --error-exitcode 9"
    run("few sums", 2, before=("--no-python", *tool.split(), sys.executable))


def test_models_of_many_kinds() -> None:
    """A head, mixtures, recurrent layers, a quantised target, and requests one by one: one launch checks them all."""
    kinds = ["EAGLE-3", "norms over all heads", "experts in mxfp4", "recurrent layers and experts", "target in int4"]
    rows = {row["kind"]: row for row in rows_of([*kinds, models_on_devices.REQUESTS], 2)}
    assert list(rows) == [*kinds, models_on_devices.REQUESTS]
    alone = kinds[:2]  # whose text is that of one GPU
    assert all(rows[kind]["same_text_on"] == [1, 2, 4] for kind in alone)
    for row in rows_of(alone, 1):
        assert row["text"] == rows[row["kind"]]["text"], row["kind"]


def test_hosted_models() -> None:
    """Plain and with drafts; in fp32, where the order of sums changes no token, the text is that of one GPU."""
    rows = rows_of(["hosted", "hosted experts", "hosted in fp32"], 2)
    assert [row["kind"] for row in rows] == ["hosted", "hosted experts", "hosted in fp32"]
    (alone,) = rows_of(["hosted in fp32"], 1)
    assert alone["text"] == rows[2]["text"]


def rows_of(kinds: list[str], ranks: int) -> list[dict[str, Any]]:
    """What is said of each kind of model on so many ranks."""
    said = run(kinds, ranks, "models_on_devices.py").splitlines()
    return [json.loads(line) for line in said if line.startswith('{"kind"')]


def run(checks: str | list[str], ranks: int, script: str = "on_devices.py", before: tuple[str, ...] = ()) -> str:
    """What checks on so many ranks write.

    Args:
        before: what starts the script.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NCCL_NVLS_ENABLE": "0",
    }
    done = subprocess.run(
        [
            *command,
            *before,
            str(Path(__file__).parent / script),
            *([checks] if isinstance(checks, str) else checks),
        ],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
