"""Every kernel at every launch entry compiles to machine code for the GPUs named here, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton ships for Linux only")
ARCHITECTURES = [80, 86, 89, 90, 100]
# what one block may use of shared memory, in bytes (CUDA programming guide, compute capabilities table)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}

# bytes of a thread that may wait in memory, by (kernel, registers): measured faster than fewer programs on a
# multiprocessor, or, for what runs once and waits for its instructions, than fewer threads
SPILLS = {
    ("fragment_kernel", 168): 16,
    ("fragment_kernel", 255): 24,
    ("batch_kernel", 168): 56,
    ("batch_kernel", 255): 96,
    ("stream_kernel", 255): 32,
    ("shares_kernel", 128): 96,
    ("_groups_kernel", 80): 16,
    ("_laws_kernel", None): 96,
    ("_laws_kernel", 64): 512,
}

ATTENTION = ("_decode_kernel", "fragment_kernel", "batch_kernel", "_flash_kernel")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: int) -> None:
    """In a process of its own: the tests' process may have bound triton to the interpreter."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", str(arch)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(reports) >= 20
    for report in reports:
        assert report["spills"] <= SPILLS.get((report["kernel"], report["registers"]), 0), report
        assert report["shared"] <= SHARED_LIMIT[arch], report
        if report["kernel"] in ("_decode_kernel", "_flash_kernel", "tile_kernel", "_prefill_kernel"):
            assert report["mma"] or report["element"] == 4, report  # the tensor cores are used
        if report["kernel"] == "_embed_kernel" and arch >= 90:
            assert report["waits_first"], report  # attention reads what was fed before it waits
        if report["kernel"] in ("tile_kernel", "_prefill_kernel"):
            assert report["vector"], report  # 16 bytes at a time
