"""What machine code is made of, by CUDA's own tools."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

from triton import knobs


def _said_of(code: bytes, tool: str, *options: str) -> str:
    """What one of CUDA's tools prints of a file with this code."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        run = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def spilled_bytes(cubin: bytes) -> int:
    """Local memory per thread by the resource report of the machine code."""
    said = _said_of(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]) + int(found[2])


def one_by_one(ptx: str, arch: int) -> bool:
    """Whether each product of a warp group waits for the one before it, as the assembler says that it has to.

    It does where a register that products under way read is written before they are awaited.
    """
    if "wgmma" not in ptx:
        return False
    options = ("-v", f"--gpu-name=sm_{arch}a", "-o", os.devnull)
    said = _said_of(ptx.encode(), knobs.nvidia.ptxas.path, *options)
    assert "registers" in said, said  # it does say what it finds
    return "wgmma.mma_async instructions are serialized" in said
