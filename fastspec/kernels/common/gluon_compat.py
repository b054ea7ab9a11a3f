"""Functions of Gluon that have other names in Triton 3.6 than in 3.9."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# (descriptor, coordinates of a block, barrier, shared memory): TMA loads a block
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (shared memory, pointers, mask): threads start an asynchronous copy and do not wait
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (): waits for all threads of a CTA
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# True: the method of shared memory is called `reinterpret`, not `_reinterpret`
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
