"""Launches of Triton kernels, and their compilation before the first launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from fastspec.kernels.common.carveout import LEAST, divide
from fastspec.kernels.common.compile_jobs import hash_in_order
from fastspec.kernels.common.compilers import Compilers, KernelBehind, keep
from fastspec.kernels.gpu import has_pdl


@dataclass(slots=True, eq=False)
class _Compiling:
    """State of a `compiling()` context.

    Attributes:
        mode: Triton's AsyncCompileMode.
        waits: True if the end of the context waits for newly launched kernels. False within `compiling_behind()`.
        kinds: keys of the kernels that were launched in this context, with the kinds of their arguments (`_kind`).
        behind: kernels that an earlier `compiling_behind()` began to compile and that were launched in this context.
            The end of this context waits for them.
    """

    mode: Any
    waits: bool = True
    kinds: set[Hashable] = field(default_factory=set)
    behind: list[Any] = field(default_factory=list)


# the current `compiling()` context; None outside of it
_compiling: ContextVar[_Compiling | None] = ContextVar("compiling", default=None)
_brief: ContextVar[bool] = ContextVar("brief", default=False)


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Returns launch options for a kernel: the constexpr PDL, and Triton's option `launch_pdl` if `pdl` is True.

    PDL is programmatic dependent launch. If `pdl` is False, `launch_pdl` is left out, because Triton's interpreter does
    not know it.
    """
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def new_ids(count: int, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Allocates an uninitialised tensor [count] for token ids. Within `compiling()` its elements are zero.

    In that context no kernel writes the ids, but torch may use them as indices.
    """
    return (torch.empty if _compiling.get() is None else torch.zeros)(count, dtype=dtype, device=device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, least_shared: int = LEAST, **options: Any) -> None:
    """Launches kernel[grid](*args, **options). Within `compiling()` this only compiles the kernel.

    Args:
        kernel: a Triton function.
        grid: number of CTAs along each axis.
        *args: arguments of the kernel.
        least_shared: lower limit of the kernel's shared memory carveout, in percent (carveout.py).
        **options: constexpr arguments of the kernel and launch options. `completed` adds `enable_fp_fusion` and
            `launch_pdl` if they are missing.
    """
    options = completed(kernel, args, options)
    begun = _compiling.get()
    hash_in_order(kernel)
    if begun is None:
        divide(kernel[grid](*args, **options), least_shared)
        return
    kind = id(kernel), _kind(args), _kind(tuple(options.items()))
    if kind not in begun.kinds:  # otherwise Triton would look it up again in every layer until it is compiled
        begun.kinds.add(kind)
        for each in options.values():
            hash_in_order(each)
        found = kernel.warmup(*args, grid=grid, **options)
        if isinstance(getattr(found, "future", None), KernelBehind):
            if begun.waits:
                begun.behind.append(found)
            else:
                keep(found)


def completed(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` with `enable_fp_fusion`, `PDL` and `launch_pdl` added, unless the caller gave them.

    `enable_fp_fusion` allows fused multiply-add, which rounds once. Triton's default differs between versions, so
    results would differ, too. A kernel with the constexpr PDL may start before the previous kernel ends, if the device
    has programmatic dependent launch. On other devices `launch_pdl` is left out, because Triton's interpreter does not
    know it.

    Args:
        kernel: a Triton function.
        args: arguments of the kernel. The first tensor among them determines the device.
        options: constexpr arguments of the kernel and launch options.
    """
    options = {"enable_fp_fusion": True, **options}
    if "PDL" not in options and "PDL" in kernel.arg_names:
        options["PDL"] = early = has_pdl(_device_of(args))
        if early:
            options["launch_pdl"] = True
    return options


def _device_of(args: tuple[Any, ...]) -> torch.device:
    """Returns the device of the first tensor among the arguments, also inside tuples and TMA descriptors."""
    found = _first_device(args)
    assert found is not None, "a kernel has tensors"
    return found


def _first_device(args: tuple[Any, ...]) -> torch.device | None:
    for each in args:
        if isinstance(each, torch.Tensor):
            return each.device
        if isinstance(each, tuple):
            if (found := _first_device(each)) is not None:
                return found
        elif isinstance(base := getattr(each, "base", None), torch.Tensor):
            return base.device
    return None


def is_brief() -> bool:
    """True within `compiling()` or `brief()`.

    A forward pass may then skip layers that launch the same kernels as earlier layers.
    """
    # False while torch.compile traces a pass: reading a ContextVar would break its graph
    return not torch.compiler.is_dynamo_compiling() and (_compiling.get() is not None or _brief.get())


@contextmanager
def brief() -> Iterator[None]:
    """Context in which a model's forward pass runs only one layer of each kind, which is enough to load all kernels.

    The results are wrong and must not be used.
    """
    token = _brief.set(True)
    try:
        yield
    finally:
        _brief.reset(token)


def _kind(value: Any) -> Hashable:
    """Returns a key for a kernel argument: its type, and properties of its value on which machine code may depend."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    base = getattr(value, "base", None)  # the tensor of a TMA descriptor
    described = str(getattr(value, "block_shape", "")), str(getattr(value, "layout", ""))
    return (_kind(base), *described) if base is not None else (id(value),)


@contextmanager
def compiling(executor: Executor | None = None) -> Iterator[None]:
    """Context in which `launch` compiles kernels in parallel and runs none. Its end waits for all compilations.

    Outputs of kernels stay uninitialised, except for token ids (`new_ids`), which are 0. Code in the context must not
    depend on values.

    Args:
        executor: executor that runs Triton's compiler, for example `Compilers`. None: threads of this process.
    """
    import triton

    own = ThreadPoolExecutor() if executor is None else nullcontext(executor)
    with own as pool, triton.AsyncCompileMode(pool) as mode:
        begun = _Compiling(mode)
        token = _compiling.set(begun)
        try:
            if isinstance(pool, Compilers):
                pool.prepared()
            try:
                yield
            finally:  # after an error, too, because compilations that have begun use the context
                if isinstance(pool, Compilers):
                    pool.queue_rest()
        finally:
            _compiling.reset(token)
    for each in begun.behind:
        each.future.hurry()
    for each in begun.behind:
        each.result()


@contextmanager
def compiling_behind(*, early: bool = False) -> Iterator[Callable[[], bool] | None]:
    """Context inside `compiling()` whose kernels are compiled in the background.

    The end of `compiling()` does not wait for these kernels. A later launch of such a kernel waits for its compilation.
    If the kernel is launched in a later `compiling()`, the end of that context waits for its compilation.

    This context yields a function, which returns True if any of its kernels was not in the disk cache. It yields None
    if there are no compiling processes. Callers should then launch nothing in it.

    Args:
        early: True to start to compile the kernels at the end of this context, on a part of the processes. False to
            compile them after all kernels of `compiling()`.
    """
    begun = _compiling.get()
    assert begun is not None, "this is within compiling()"
    mode, before = begun.mode, len(begun.mode.raw_futures)
    executor = mode.executor
    behind = executor.behind if isinstance(executor, Compilers) else None
    if behind is None:
        yield None
        return
    if not early:
        executor.queue_rest()
    mode.executor, begun.waits = behind, False
    try:
        yield lambda: behind.uncached > 0
    finally:
        mode.executor, begun.waits = executor, True
        del mode.raw_futures[before:]  # the end of the mode waits for these
        if early:
            behind.begin_early()
        else:
            behind.begin()


def described(tensor: torch.Tensor, block: list[int]) -> Any:
    """Returns the TMA descriptor (sm_90) with which a kernel loads blocks of a tensor into shared memory.

    The 16-byte pieces of a block are swizzled in shared memory, in the pattern that wgmma reads.

    Args:
        tensor: a contiguous tensor, at an address that is a multiple of 16.
        block: shape of a block, in elements. A row (the last axis) must take 64 or 128 bytes.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(block[-1] * tensor.element_size(), 8 * tensor.element_size(), tensor.dim())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
