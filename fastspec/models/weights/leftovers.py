"""Warnings of tensors in a checkpoint that its model does not use."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

from fastspec.models.families import FAMILIES
from fastspec.models.heads.mtp_names import find_mtp
from fastspec.models.weights.names import PREFIX, NamedTensors
from fastspec.models.weights.shapes import listing

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec

OTHER_PARTS: Final = ("vision_tower.", "multi_modal_projector.", "visual.")  # of models with a text part


def name_others(tensors: NamedTensors, spec: ModelSpec, name: str) -> bool:
    """Warns of tensors that are not used, but for MTP layers, which `draft="mtp"` may use.

    Args:
        tensors: the model's tensors by their names here.
        spec: of the model.
        name: of the checkpoint, for messages.

    Returns:
        Whether there are MTP layers among them.
    """
    others = tensors.others()
    mtp = find_mtp(others, spec.num_layers)
    if mtp is not None:
        others = [other for other in others if other not in mtp.stored]
    if FAMILIES[spec.family].text_part:
        parts = [other for other in others if other.removeprefix(PREFIX).startswith(OTHER_PARTS)]
        others = [other for other in others if other not in set(parts)]
        if parts:
            warnings.warn(
                f"{name}: {listing(parts)} not used: they are for images; here the model reads and writes text alone",
                stacklevel=2,
            )
    if others:
        warnings.warn(
            f"{name}: {listing(others)} not used: the config of this {spec.family} model with {spec.num_layers} layers "
            "has no place for them. transformers leaves them out too; is it the config of these weights?",
            stacklevel=2,
        )
    return mtp is not None
