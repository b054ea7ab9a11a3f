"""Launching kernels: what a device can do, and compiling ahead of the first launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from fastspec.kernels.common.carveout import LEAST, divide
from fastspec.kernels.common.compile_jobs import hash_in_order
from fastspec.kernels.common.compilers import Compilers

# what has been compiled, within `compiling()`; None: outside of it
_compiling: ContextVar[set[Hashable] | None] = ContextVar("compiling", default=None)
_brief: ContextVar[bool] = ContextVar("brief", default=False)


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may start before their predecessor ends (programmatic dependent launch, sm_90 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Keywords of a launch: the kernel's constant PDL, and whether it may start before its predecessor ends.

    `launch_pdl` is given only where it is wanted, because Triton's interpreter does not know it.
    """
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@cache
def has_warp_groups(device: torch.device) -> bool:
    """Whether kernels on `device` multiply by warp groups (wgmma), which sm_90 alone does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many `device` has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; 0 off CUDA, where nothing limits it."""
    if device.type != "cuda":
        return 0
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def new_ids(count: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[count] for a kernel to write ids to.

    Zeros within `compiling()`, where no kernel does: a later op may look something up by them.
    """
    return (torch.empty if _compiling.get() is None else torch.zeros)(count, dtype=dtype, device=device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, least_shared: int = LEAST, **options: Any) -> None:
    """kernel[grid](*args, **options), or no more than its compilation within `compiling()`.

    A kernel's first launch on a device also says how much shared memory it is to have, in percent `least_shared` at
    least: see carveout.py. Unless `options` forbid it, a product and a sum may be rounded together: said at every
    launch, for what Triton takes for granted changes between its versions, and bits with it.
    """
    options = {"enable_fp_fusion": True, **options}
    begun = _compiling.get()
    hash_in_order(kernel)
    if begun is None:
        divide(kernel[grid](*args, **options), least_shared)
        return
    kind = id(kernel), _kind(args), _kind(tuple(options.items()))
    if kind not in begun:  # Triton would look for it anew in all layers, at a cost, until the first is compiled
        begun.add(kind)
        for each in options.values():
            hash_in_order(each)
        kernel.warmup(*args, grid=grid, **options)


def is_brief() -> bool:
    """Whether a pass may leave out what launches nothing new: within `compiling()` or `brief()`."""
    # a pass that torch.compile traces is none of those, and asking a ContextVar breaks its graph
    return not torch.compiler.is_dynamo_compiling() and (_compiling.get() is not None or _brief.get())


@contextmanager
def brief() -> Iterator[None]:
    """Within it a model's pass has one layer of each kind: it loads all kernels, and what it computes is of no use."""
    token = _brief.set(True)
    try:
        yield
    finally:
        _brief.reset(token)


def _kind(value: Any) -> Hashable:
    """What a kernel is compiled by, of an argument, and more: arguments of one kind give one machine code."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    base = getattr(value, "base", None)  # of a descriptor, its tensor
    described = str(getattr(value, "block_shape", "")), str(getattr(value, "layout", ""))
    return (_kind(base), *described) if base is not None else (id(value),)


@contextmanager
def compiling(executor: Executor | None = None) -> Iterator[None]:
    """Within it `launch` launches nothing: it compiles, in parallel; leaving it waits for all that was begun.

    Args:
        executor: runs Triton's compiler, see `Compilers`; None: threads do.

    What wrappers of kernels return is uninitialised meanwhile (but for ids, which are 0), so what runs within must not
    act on values.
    """
    import triton

    token = _compiling.set(set())
    own = ThreadPoolExecutor() if executor is None else nullcontext(executor)
    try:
        with own as pool, triton.AsyncCompileMode(pool):
            if isinstance(pool, Compilers):
                pool.prepared()
            try:
                yield
            finally:  # also after an error, for all that was begun is waited for
                if isinstance(pool, Compilers):
                    pool.all_told()
    finally:
        _compiling.reset(token)


def described(tensor: torch.Tensor, block: list[int]) -> Any:
    """A tensor, contiguous and at a multiple of 16 bytes, as the copy engine of sm_90 takes it: block by block.

    A block's last axis has 128 bytes, or 64, whose pieces of 16 come to lie in shared memory as warp groups read them.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(block[-1] * tensor.element_size(), 8 * tensor.element_size(), tensor.dim())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
