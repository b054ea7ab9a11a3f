"""Lookup of draft tokens on the CPU: `reference.look_up` without the columns behind the longest row.

The tokens of the rows lie in a buffer as wide as `max_length`. The time of a search grows with the width that it gets.
On a CPU steps are not captured, so the lengths can be read here.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.reference.lookup import LookUp


def look_up(call: LookUp, k: int) -> tuple[Tensor, Tensor]:
    """Proposes up to k draft tokens for each row; see `reference.look_up`, which gives the same."""
    longest = int(call.lengths.max())
    prediction = call.prediction
    if prediction is not None:
        # a place in a prediction is compared with the row's own place, which may lie behind the prediction
        width = max(longest, int(prediction.lengths.max()))
        prediction = replace(prediction, tokens=prediction.tokens[:, :width])
    return reference.look_up(replace(call, tokens=call.tokens[:, :longest], prediction=prediction), k)
