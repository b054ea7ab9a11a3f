"""Launches of real wrappers, recorded without a GPU and compiled for any architecture.

A wrapper gets tensors of the "meta" device, which have shapes and no memory. Where it would launch a kernel, the kernel
and its arguments are kept instead. What a wrapper asks about the device is answered for the architecture wanted. Triton
compiles a recorded launch by its own reading of the arguments, for a driver of ours that only names the architecture.

Works in a process that has not bound Triton to its interpreter: see `modules.module_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastspec.kernels import gpu
from fastspec.kernels.common import launch as launching
from fastspec.kernels.common.compile_jobs import hash_in_order
from tests.helpers.budgets import SHARED_LIMIT
from tests.helpers.modules import exchange

META = torch.device("meta")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
I64, F32, BF16 = torch.int64, torch.float32, torch.bfloat16
MULTIPROCESSORS = 132  # of an H200; the plans of no launch know another GPU's
T = TypeVar("T")
Calls = Iterable[tuple[str, Callable[[], object]]]  # what a call is named, and what makes it


class _Driver:
    """What Triton asks of a driver before it compiles; nothing can be launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # kernels keep what they compiled by device, so each target is a device of its own

    def get_current_stream(self, device: object = None) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        call: name of the call that made it.
        kernel, grid: as the wrapper gave them.
        given: the kernel's first arguments.
        options: its constants, and options of the compiler.
    """

    call: str
    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments and constants by name; those in a NamedTuple under the names of its fields."""
        names = self.kernel.arg_names
        given = dict(zip(names, self.given, strict=False)) | self.options
        return _flat({name: value for name, value in given.items() if name in names})

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments that are numbers or None and have the names of constants, or are not there."""
        found = self.arguments
        return {name: each for name, each in found.items() if each is None or (name.isupper() and _plain(each))}


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        fields = getattr(value, "_fields", None)
        found |= {name: value} if fields is None else _flat(dict(zip(fields, value, strict=True)))
    return found


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple))


def on_meta(shape: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def record(arch: int, calls: Callable[[], Calls]) -> list[Launch]:
    """Everything that the calls launch on a GPU of this architecture."""
    found: list[Launch] = []
    asked = SimpleNamespace(call="")

    def keep(kernel: Any, grid: tuple[int, ...], *given: Any, least_shared: int = 0, **options: Any) -> None:
        for each in (kernel, *options.values()):
            hash_in_order(each)
        found.append(Launch(asked.call, kernel, grid, given, launching.completed(kernel, given, options)))

    answers = {
        launching.launch: keep,
        gpu.has_pdl: lambda device: arch >= 90,
        gpu.has_warp_groups: lambda device: arch == 90,
        gpu.multiprocessors: lambda device: MULTIPROCESSORS,
        gpu.gpu_of: lambda device: gpu.Gpu(divmod(arch, 10), MULTIPROCESSORS),
        gpu.generation_of: lambda device: gpu.Gpu(divmod(arch, 10), 0),
        gpu.shared_memory: lambda device: SHARED_LIMIT[arch],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(arch, 10))
        exchange(patch, answers)
        for name, call in calls():
            asked.call = name
            call()
    return found


def cuda(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def use(target: GPUTarget) -> None:
    """Compiles for this target from now on."""
    driver.set_active(_Driver(target))


def specialised(launch: Launch) -> tuple[object, ...]:
    """What Triton compiles a launch by: two that are equal in this run the same code."""
    *_, binder = launch.kernel.device_caches[driver.active.get_current_device()]
    _bound, kinds, options = binder(*launch.given, **launch.options)
    return launch.name, str(kinds), str(options)


def first_of_each(launches: Iterable[T], key: Callable[[T], object]) -> Iterator[T]:
    """Those whose key no earlier one has."""
    seen = set()
    for launch in launches:
        if (mark := key(launch)) not in seen:
            seen.add(mark)
            yield launch


def compiled(launch: Launch, leave_out: tuple[str, ...] = ()) -> Any:
    """The machine code, without these options."""
    options = {name: value for name, value in launch.options.items() if name not in leave_out}
    code = launch.kernel.warmup(*launch.given, grid=launch.grid, **options)
    return code.result() if hasattr(code, "result") else code
