"""Which hidden states of the target a head reads.

A boundary b is the residual stream after b layers, `hidden_states[b]` of transformers: 0 is the embedding, and the
number of layers is the last one, before the final norm. Configs name layers in two ways, and the numbers
do not say which: as boundaries (vLLM, speculators), or as the layers whose output is read, one less (SGLang,
SpecForge). So a config may have more than one reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastspec.errors import CheckpointError

NORMED: Final = -1
"""In place of a boundary: the hidden state after all layers and the final norm."""

Reading = tuple[int, ...]


def default_boundaries(layers: int) -> Reading:
    """What EAGLE-3 reads of a target where nothing is said: low, middle, high."""
    return (2, layers // 2, layers - 3)


def asked_boundaries(asked: Sequence[int], layers: int, count: int | None) -> Reading:
    """The caller's own choice, checked.

    Args:
        asked: boundaries.
        layers: of the target.
        count: how many the head's tensors are made for; None: any number.

    Raises:
        ValueError: one is not there, or there are too few or too many.
    """
    reading = tuple(asked)
    for boundary in reading:
        if isinstance(boundary, bool) or not isinstance(boundary, int) or not 0 <= boundary <= layers:
            raise ValueError(
                f"feature_layers={reading}: {boundary!r} is none of the target's boundaries 0 to {layers}; boundary b "
                "is the hidden state after b layers"
            )
    if count is not None and len(reading) != count:
        raise ValueError(f"feature_layers={reading} has {len(reading)} entries, and the head reads {count}")
    return reading


def readings_of(ids: Sequence[int], layers: int, first: int, others: Sequence[int] = ()) -> tuple[Reading, ...]:
    """All readings of a config's ids that the target has layers for.

    Args:
        ids: as the config names them.
        layers: of the target.
        first: what the engine of this layout adds to an id to get a boundary.
        others: what other engines add.

    Raises:
        CheckpointError: there is none.
    """
    found = [tuple(each + shift for each in ids) for shift in (first, *others)]
    possible = [reading for reading in found if all(0 <= boundary <= layers for boundary in reading)]
    if not possible:
        raise CheckpointError(
            f"the head reads layers {list(ids)}, and the target has {layers} layers: it was made for another target"
        )
    return tuple(dict.fromkeys(possible))


def as_layers(reading: Reading, layers: int) -> tuple[int, ...]:
    """A reading as `Proposer.features` names hidden states: layers from 0, -1 and `layers` for the ends."""
    return tuple(layers if boundary == NORMED else boundary - 1 for boundary in reading)


def described(reading: Reading) -> str:
    """A short description, for messages and `explain()`."""
    return ", ".join("final norm" if boundary == NORMED else str(boundary) for boundary in reading)
