"""Whether a draft model is cut among the ranks when `draft_tensor_parallel` is not given."""

from __future__ import annotations

from typing import Protocol

import torch

from fastspec.distributed.slices import Sizes, divides

# seconds by which each of a layer's two sums lengthens a step of one row, by the number of ranks, on GPUs with NVLink:
# the sum itself, and what a layer cannot fuse across it (perf/results/tensor_parallel.jsonl; 4 before sums of few rows
# went as words, 8 by doubling)
SUM_SECONDS = {2: 5.6e-6, 4: 17e-6, 8: 35e-6}
READ_SHARE = 0.9  # share of the rated memory bandwidth that passes over weights reach
USUAL_RATE = 3.35e12  # bytes per second of an H100, where torch does not tell the memory's own


class Model(Sizes, Protocol):
    """Sizes from which the time of a pass is estimated."""

    @property
    def num_layers(self) -> int:
        """Layers. Each adds over ranks twice."""

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a pass reads."""


def splitting_pays(model: Model, dtype: torch.dtype, ranks: int, rate: float) -> bool:
    """True if a pass over one row is estimated to be shorter with the model split among `ranks` ranks.

    Args:
        model, dtype: the draft, as stored on the device.
        ranks: number of ranks.
        rate: bytes per second that a device's memory is rated at.
    """
    if ranks not in SUM_SECONDS or not divides(model, ranks):
        return False
    whole = model.weight_bytes(dtype) / (rate * READ_SHARE)
    return whole / ranks + 2 * model.num_layers * SUM_SECONDS[ranks] < whole


def memory_rate(device: torch.device) -> float:
    """Bytes per second that a CUDA device's memory is rated at."""
    found = torch.cuda.get_device_properties(device)
    khz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * khz * 1e3 * bits / 8 or USUAL_RATE  # two transfers a clock
