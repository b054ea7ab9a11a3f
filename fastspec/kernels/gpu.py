"""`Gpu`: the facts about a device that launches and plans depend on. All tests of a compute capability are here.

Importing this module needs neither Triton nor CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

FP8_FROM: Final = (8, 9)  # the first compute capability whose kernels read e4m3
MEASURED: Final = frozenset({(9, 0)})  # compute capabilities on which plans were measured
# compute capabilities with more than 99 KiB of shared memory for one CTA (CUDA programming guide)
ROOMY: Final = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
# tokens of a pass over a prompt, by compute capability, from which one kernel multiplies packed weights of 16 bits
SAME_BITS_FROM: Final = {(9, 0): 64}
SAME_BITS_ELSEWHERE: Final = 256  # smaller passes were not compared on other GPUs


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as plans see it.

    Attributes:
        capability: compute capability of CUDA; (0, 0) of other devices.
        sms: streaming multiprocessors.
    """

    capability: tuple[int, int]
    sms: int

    @property
    def usable(self) -> bool:
        """True if torch's kernels run: sm_70 on."""
        return self.capability >= (7, 0)

    @property
    def supported(self) -> bool:
        """True if the packed products run, which copy asynchronously: sm_80 on."""
        return self.capability >= (8, 0)

    @property
    def measured(self) -> bool:
        """True if plans were measured on a GPU of this capability."""
        return self.capability in MEASURED

    @property
    def reads_fp8(self) -> bool:
        """True if kernels read e4m3."""
        return self.capability >= FP8_FROM

    @property
    def pdl(self) -> bool:
        """True if a kernel may start before its predecessor ends (programmatic dependent launch): sm_90 on."""
        return self.capability >= (9, 0)

    @property
    def hopper(self) -> bool:
        """True if kernels multiply by warp groups (wgmma) and copy by TMA as on sm_90, which alone has both."""
        return self.capability == (9, 0)

    @property
    def roomy(self) -> bool:
        """True if one CTA may have more than 99 KiB of shared memory."""
        return self.capability in ROOMY

    @property
    def same_bits_from(self) -> int:
        """Tokens from which passes over prompts sum products with packed weights of 16 bits in one order."""
        return SAME_BITS_FROM.get(self.capability, SAME_BITS_ELSEWHERE)


def gpu_of(device: torch.device) -> Gpu:
    """The record of a device; ((0, 0), 1) off CUDA."""
    if device.type != "cuda":
        return Gpu((0, 0), 1)
    return Gpu(torch.cuda.get_device_capability(device), multiprocessors(device))


def generation_of(device: torch.device) -> Gpu:
    """The record of a device without its number of SMs, for questions about its capability alone."""
    return Gpu(torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0), 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; 0 off CUDA, where nothing limits it."""
    if device.type != "cuda":
        return 0
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def has_pdl(device: torch.device) -> bool:
    """`Gpu.pdl` of a device, for every launch."""
    return generation_of(device).pdl


@cache
def has_warp_groups(device: torch.device) -> bool:
    """`Gpu.hopper` of a device, for every launch."""
    return generation_of(device).hopper
