"""Names of Gluon that differ between Triton 3.6 and 3.9."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# (descriptor, first places of a block, barrier, shared memory): the copy engine brings a block
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (shared memory, pointers, mask): threads bring values and go on
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (): until every thread of a program is here
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# shared memory has a method `reinterpret`, and not `_reinterpret`
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
