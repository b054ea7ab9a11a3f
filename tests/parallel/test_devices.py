"""On GPUs: exchanges are right, launched and replayed, and texts are the same on all ranks and without drafts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel import on_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check", on_devices.CHECKS)
def test_ranks_on_gpus(check: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run(check, ranks)


def test_the_text_is_that_of_one_gpu() -> None:
    """To the bit, with `tensor_parallel=1` and on as many as there are."""
    sizes = [ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()]
    assert len({run(on_devices.TEXT, ranks).partition("text ")[2] for ranks in sizes}) == 1


def run(check: str, ranks: int) -> str:
    """What a check on so many ranks writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    surroundings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    done = subprocess.run(
        [*command, str(ROOT / "tests/parallel/on_devices.py"), check],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
