"""`Gpu`: properties of a device by which kernels and their launch parameters are chosen.

Only this file compares compute capabilities.

Importing this module needs neither Triton nor CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

FP8_FROM: Final = (8, 9)  # first compute capability whose kernels read e4m3
MEASURED: Final = frozenset({(9, 0)})  # compute capabilities on which the tables of launch parameters were measured
# compute capabilities with more than 99 KiB of shared memory for one CTA (CUDA programming guide)
ROOMY: Final = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
# by compute capability: smallest prefill pass, in tokens, from which on one kernel multiplies packed 16-bit weights
SAME_BITS_FROM: Final = {(9, 0): 64}
SAME_BITS_ELSEWHERE: Final = 256  # the same for other GPUs, on which smaller passes were not compared


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a device by which the `plan.py` of each kernel family chooses kernels and launch parameters.

    Attributes:
        capability: CUDA compute capability; (0, 0) for other devices.
        sms: number of streaming multiprocessors.
    """

    capability: tuple[int, int]
    sms: int

    @property
    def usable(self) -> bool:
        """True if the kernels that torch ships run: from sm_70 on."""
        return self.capability >= (7, 0)

    @property
    def supported(self) -> bool:
        """True if the kernels for packed weights run. They need asynchronous copies: from sm_80 on."""
        return self.capability >= (8, 0)

    @property
    def measured(self) -> bool:
        """True if the launch parameters of the kernels were measured on a GPU with this capability."""
        return self.capability in MEASURED

    @property
    def reads_fp8(self) -> bool:
        """True if Triton kernels can load e4m3 values: from sm_89 on."""
        return self.capability >= FP8_FROM

    @property
    def pdl(self) -> bool:
        """True if a kernel may start before the previous one ends (programmatic dependent launch): from sm_90 on."""
        return self.capability >= (9, 0)

    @property
    def hopper(self) -> bool:
        """True for sm_90: kernels may use wgmma and TMA."""
        return self.capability == (9, 0)

    @property
    def roomy(self) -> bool:
        """True if one CTA may have more than 99 KiB of shared memory."""
        return self.capability in ROOMY

    @property
    def same_bits_from(self) -> int:
        """Smallest number of tokens of a prefill pass in which a token's bits do not depend on the pass's size.

        In all prefill passes of at least this size, products with packed 16-bit weights add in the same order.
        """
        return SAME_BITS_FROM.get(self.capability, SAME_BITS_ELSEWHERE)


def gpu_of(device: torch.device) -> Gpu:
    """Returns the properties of a device: Gpu((0, 0), 1) for a device other than CUDA."""
    if device.type != "cuda":
        return Gpu((0, 0), 1)
    return Gpu(torch.cuda.get_device_capability(device), multiprocessors(device))


def generation_of(device: torch.device) -> Gpu:
    """Returns a `Gpu` with the compute capability of a device and sms = 0, for callers that do not need the SMs."""
    return Gpu(torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0), 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Returns the largest number of bytes of shared memory of one CTA. Returns 0 for devices other than CUDA."""
    if device.type != "cuda":
        return 0
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def has_pdl(device: torch.device) -> bool:
    """True if kernels of a device support programmatic dependent launch: `Gpu.pdl`, cached for every launch."""
    return generation_of(device).pdl


@cache
def has_warp_groups(device: torch.device) -> bool:
    """True if kernels of a device may use wgmma and TMA: `Gpu.hopper`, cached for every launch."""
    return generation_of(device).hopper
