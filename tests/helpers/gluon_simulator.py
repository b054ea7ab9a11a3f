"""Runs Gluon kernels on a CPU that Triton has no interpreter for: packed products, attention over long caches.

Their sources are executed with stand-ins for Gluon's language, in numpy. A tensor is an array; layouts say where its
elements lie and are not modelled. Loads and stores outside of an array raise, shared memory begins as NaN, and an
asynchronous copy lands as late as a wait allows, or at once: both must give the same. The tensor core's sums are
modelled as rounded to fp32 once for every 16 values of K, so that an order of summation shows in the bits. Warps that
do different things are threads, of which one runs until it waits.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastspec.kernels.gpu import Gpu
from fastspec.kernels.product import plan
from tests.helpers.gluon_language import group_mma, language_module, mma
from tests.helpers.gluon_machine import MACHINE, Barrier, BarrierLayout, Described, engine_copy, pointer_to
from tests.helpers.gluon_values import Number

KERNELS = Path(__file__).parents[2] / "fastspec" / "kernels"
ATTENTION = ["query_rows", "mma_tiles", "kv_loads", "tma_parts", "tma_sm90", "combine"]
MODULES = [
    "k_steps",
    "epilogue",
    "quantised/conversion",
    "reader",
    "few_rows",
    "many_rows",
    "tma_sm90",
    "quantised/wide_sm90",
    "norm",
    "split_k",
    "launch",
    "layer_tail",
    "dispatch",
]


def _stand_ins() -> dict[str, ModuleType]:
    def decorate(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda real: real

    gluon, language = ModuleType("gluon"), language_module()
    gluon.jit = gluon.constexpr_function = decorate  # type: ignore[attr-defined]
    gluon.language = language  # type: ignore[attr-defined]
    experimental, ampere, cuda = ModuleType("experimental"), ModuleType("ampere"), ModuleType("cuda")
    hopper = ModuleType("hopper")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    ampere.mma_v2 = mma  # type: ignore[attr-defined]
    ampere.async_copy = SimpleNamespace(  # type: ignore[attr-defined]
        commit_group=MACHINE.commit, wait_group=MACHINE.wait
    )
    hopper.warpgroup_mma = group_mma  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait = lambda pending, deps: deps if len(deps) > 1 else deps[0]  # type: ignore[attr-defined]
    hopper.fence_async_shared = lambda: None  # type: ignore[attr-defined]
    hopper.mbarrier = SimpleNamespace(  # type: ignore[attr-defined]
        MBarrierLayout=BarrierLayout,
        init=lambda barrier, count: setattr(barrier, "needed", int(count)),
        expect=Barrier.expect,
        arrive=lambda barrier, count: barrier.arrive(),
        wait=Barrier.wait,
    )
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # type: ignore[attr-defined]
    names = ModuleType("names")
    names.load_block, names.copy_to_shared, names.thread_barrier = engine_copy, MACHINE.copy, lambda: None  # type: ignore[attr-defined]
    names.REINTERPRETS = False  # type: ignore[attr-defined]
    triton = ModuleType("triton")
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()  # type: ignore[attr-defined]
    return {
        "triton": triton,
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.language.extra.cuda": cuda,
        "fastspec.kernels.common.gluon_compat": names,
    }


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Every program in turn, the last one first: they may not depend on an order."""
    for name in ("num_warps", "num_ctas", "launch_pdl", "enable_fp_fusion", "maxnreg", "least_shared"):
        options.pop(name, None)
    if "PDL" in inspect.signature(kernel).parameters:
        options.setdefault("PDL", False)
    arguments = [_argument(each) for each in given]
    MACHINE.counts = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):  # numbers that are none are made on purpose
        for ids in reversed(list(np.ndindex(*MACHINE.counts))):
            MACHINE.ids, MACHINE.open, MACHINE.groups = ids, [], deque()
            kernel(*arguments, **options)


def _argument(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return pointer_to(given)
    if hasattr(given, "_fields"):
        return type(given)(*map(_argument, given))
    return Number(given) if type(given) is int else given


@contextmanager
def _loaded(stems: list[str]) -> Iterator[list[Any]]:
    """These files of fastspec/kernels, each of which may import from those before it, run by stand-ins."""
    names = [f"fastspec.kernels.{stem.replace('/', '.')}" for stem in stems]
    kept = {name: sys.modules.get(name) for name in (*_stand_ins(), *names)}
    sys.modules.update(_stand_ins())
    loaded = []
    try:
        for stem, name in zip(stems, names, strict=True):
            spec = importlib.util.spec_from_file_location(name, KERNELS / f"{stem}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            for replaced, by in (("launch", launch), ("described", Described)):
                if hasattr(module, replaced):
                    setattr(module, replaced, by)
            loaded.append(module)
        yield loaded
    finally:
        for name, module in kept.items():  # type: ignore[assignment]
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextmanager
def simulated(capability: tuple[int, int] = (9, 0), late: bool = True) -> Iterator[SimpleNamespace]:
    """The modules of kernels/product by name, run by stand-ins, as on a GPU of `capability`."""
    with _loaded([f"product/{name}" for name in MODULES]) as modules:
        loaded = dict(zip([name.replace("/", "_") for name in MODULES], modules, strict=True))
        loaded["launch"].gpu_of = lambda device: Gpu(capability, 132)
        MACHINE.late = late
        yield SimpleNamespace(**loaded, plan=plan)


def experts_in_codes() -> Any:
    """The kernel of experts/codes.py, for `launch`."""
    products = ["k_steps", "epilogue", "quantised/conversion", "reader"]
    with _loaded([*(f"product/{name}" for name in products), "experts/codes"]) as modules:
        return modules[-1].codes_kernel


def attention_by_tma() -> dict[str, Any]:
    """The kernels of decode/tma_sm90.py and combine.py, for `launch`; `MACHINE.late` says how copies land."""
    with _loaded([f"attention/decode/{name}" for name in ATTENTION]) as modules:
        return {"shares_kernel": modules[-2].shares_kernel, "gather_kernel": modules[-1].gather_kernel}


def prompts_by_tma() -> Any:
    """The module prefill_sm90.py; `MACHINE.late` says how copies land."""
    with _loaded([*(f"attention/decode/{name}" for name in ATTENTION[:4]), "attention/prefill_sm90"]) as modules:
        return modules[-1]
