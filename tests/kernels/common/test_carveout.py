"""Each kernel prefers as much shared memory as its programs need, set once; the driver holds what was asked for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from fastspec.kernels.common import carveout
from fastspec.kernels.common import launch as device

KIB = 1024
H200 = 228 * KIB


@pytest.mark.parametrize(
    ("programs", "shared", "percent"),
    [
        (1, 131 * KIB, 58),  # one program of 132 KiB with what the system takes
        (2, 18 * KIB, 17),
        (2, 115_000, 100),  # two that fill a multiprocessor
        (12, 2 * KIB, 16),
        (2, 4 * KIB, 14),  # 10 KiB: no new division for so little
        (12, 0, 14),
    ],
)
def test_a_kernel_prefers_what_its_programs_need(programs, shared, percent):
    assert carveout.percent_of(programs, shared, H200, carveout.LEAST) == percent


class Driver:
    """Of libcuda: two programs on a multiprocessor, and what was set."""

    def __init__(self, result=0):
        self.result, self.asked, self.set = result, [], []

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, programs, function, threads, shared):  # noqa: N802
        self.asked.append((function.value, threads, shared.value))
        programs._obj.value = 2
        return self.result

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.set.append((function.value, attribute, value))
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(carveout, "_driver", lambda: found)
    room = SimpleNamespace(shared_memory_per_multiprocessor=H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *of: room)
    carveout._divide.cache_clear()
    yield found
    carveout._divide.cache_clear()


def compiled(function, shared=18 * KIB, backend="cuda"):
    metadata = SimpleNamespace(shared=shared, num_warps=4, target=SimpleNamespace(backend=backend))
    return SimpleNamespace(function=function, metadata=metadata)


class Kernel:
    """Launched, it returns what was compiled."""

    def __init__(self, result):
        self.result, self.options, self.arg_names = result, [], ()

    def __getitem__(self, grid):
        return lambda *args, **options: self.options.append(options) or self.result


def test_a_launch_sets_it_once_for_each_kernel(driver):
    for function in (7, 7, 8, 7):
        device.launch(Kernel(compiled(function)), (1,))
    device.launch(Kernel(compiled(9, shared=0)), (1,))
    device.launch(Kernel(compiled(10, shared=0)), (1,), least_shared=0)
    assert driver.asked == [(7, 128, 18 * KIB), (8, 128, 18 * KIB), (9, 128, 0), (10, 128, 0)]
    assert driver.set == [(7, 9, 17), (8, 9, 17), (9, 9, 14), (10, 9, 1)]


def test_every_launch_says_what_may_be_rounded_together():
    """So that bits do not follow a default of Triton's."""
    kernel = Kernel(None)
    device.launch(kernel, (1,), num_warps=2)
    device.launch(kernel, (1,), enable_fp_fusion=False)
    assert kernel.options == [{"num_warps": 2, "enable_fp_fusion": True}, {"enable_fp_fusion": False}]


def test_what_runs_without_the_cuda_driver_is_left_alone(driver):
    device.launch(Kernel(None), (1,))  # Triton's interpreter
    device.launch(Kernel(compiled(7, backend="hip")), (1,))
    assert driver.asked == []


def test_an_error_of_the_driver_is_one_here(driver):
    driver.result = 700
    with pytest.raises(RuntimeError, match=r"error 700, .* earlier kernel: set CUDA_LAUNCH_BLOCKING=1"):
        device.launch(Kernel(compiled(7)), (1,))
    driver.result = 0
    device.launch(Kernel(compiled(7)), (1,))  # a failure is not remembered
    assert driver.set == [(7, 9, 17)]


@pytest.mark.gpu
def test_the_driver_holds_what_a_launch_asked_for(monkeypatch):
    from fastspec.kernels.common.weights import Weight
    from fastspec.kernels.product.dispatch import packed_linear

    seen = []
    monkeypatch.setattr(device, "divide", lambda *given: (carveout.divide(*given), seen.append(given[0])))
    weight = Weight(torch.randn(4, 8, 16, 32, device="cuda", dtype=torch.bfloat16), "packed")
    packed_linear(torch.randn(1, 256, device="cuda", dtype=torch.bfloat16), weight, pdl=False)
    (kernel,) = seen
    value = ctypes.c_int()
    get = ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute
    assert get(ctypes.byref(value), carveout.PREFERRED_CARVEOUT, ctypes.c_void_p(kernel.function)) == 0
    assert value.value >= carveout.LEAST
