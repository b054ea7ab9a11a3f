"""What machine code is made of, by CUDA's own tools."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import get_cache_manager


def _said_of(code: bytes, tool: Any, *options: str) -> str:
    """What one of CUDA's tools prints of a file with this code; kept where Triton keeps what it compiles."""
    asked = repr((os.path.basename(tool.path), tool.version, options)).encode()
    cache, name = get_cache_manager(hashlib.sha256(asked + code).hexdigest()), "said"
    if (kept := cache.get_file(name)) is not None:
        return Path(kept).read_text()
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        run = subprocess.run([tool.path, *options, file.name], capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    cache.put(said, name, binary=False)
    return said


def spilled_bytes(cubin: bytes) -> int:
    """Local memory per thread by the resource report of the machine code."""
    said = _said_of(cubin, knobs.nvidia.cuobjdump, "--dump-resource-usage")
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]) + int(found[2])


def assembled(compiled: Callable[[], Any]) -> tuple[Any, str]:
    """What is compiled, and what the assembler said of it: nothing if the code was in Triton's cache."""
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        return compiled(), said.getvalue()


def one_by_one(ptx: str, arch: int, said: str = "") -> bool:
    """Whether each product of a warp group waits for the one before it, as the assembler says that it has to.

    It does where a register that products under way read is written before they are awaited.

    said: what it said when it made the machine code; if nothing, it is asked again.
    """
    if "wgmma" not in ptx:
        return False
    options = ("-v", f"--gpu-name=sm_{arch}a", "-o", os.devnull)
    said = said or _said_of(ptx.encode(), knobs.nvidia.ptxas, *options)
    assert "registers" in said, said  # it does say what it finds
    return "wgmma.mma_async instructions are serialized" in said
