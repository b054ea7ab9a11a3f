"""Warnings of tensors in a checkpoint that its model does not use."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastspec.models.checkpoints.parameter_names import NamedTensors
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.heads.mtp_names import find_mtp
from fastspec.models.text_parts import text_name

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec


def warn_of_other_parts(stored: Iterable[str], name: str) -> list[str]:
    """Warns of tensors of other parts than the text model of a checkpoint; returns the stored names of the others."""
    stored = sorted(stored)
    parts = [each for each in stored if text_name(each) is None]
    if parts:
        warnings.warn(
            f"{name}: {listing(parts)} not used: they are for images or sound; here the model reads and writes text "
            "alone",
            stacklevel=2,
        )
    return [each for each in stored if each not in set(parts)]


def name_others(tensors: NamedTensors, spec: ModelSpec, name: str, *, is_part: bool) -> bool:
    """Warns of tensors that are not used, but for MTP layers, which `draft="mtp"` may use.

    Args:
        tensors: the model's tensors by their names here.
        spec: of the model.
        name: of the checkpoint, for messages.
        is_part: the model is the text part of another.

    Returns:
        Whether there are MTP layers among them.
    """
    others = tensors.others()
    mtp = find_mtp(others, spec.num_layers)
    if mtp is not None:
        others = [other for other in others if other not in mtp.stored]
    if is_part:
        others = warn_of_other_parts(others, name)
    if others:
        warnings.warn(
            f"{name}: {listing(others)} not used: the config of this {spec.family} model with {spec.num_layers} layers "
            "has no place for them. transformers leaves them out too; is it the config of these weights?",
            stacklevel=2,
        )
    return mtp is not None
