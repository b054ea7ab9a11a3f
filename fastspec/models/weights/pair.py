"""Target and draft of a generator, as they are stored or rounded to fewer bits while they are loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.rounding import FORMATS
from fastspec.models.weights.sources import Checkpoint, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resolve_pair(
    target: str | os.PathLike[str] | PreTrainedModel,
    draft: str | os.PathLike[str] | PreTrainedModel | None,
    revisions: tuple[str | None, str | None],
    quantization: tuple[str | None, str | None],
) -> tuple[Checkpoint, Checkpoint | None]:
    """Target and draft by `resolve`, to be rounded while they are loaded.

    Args:
        revisions, quantization: of target and draft.

    Raises:
        As `resolve`; UnsupportedOption: quantization that is not a format, or of what is stored quantised.
    """
    found = resolve(target, role="target", revision=revisions[0])
    other = None if draft is None else resolve(draft, role="draft", revision=revisions[1])
    return _rounded(found, quantization[0]), None if other is None else _rounded(other, quantization[1])


def _rounded(checkpoint: Checkpoint, form: str | None) -> Checkpoint:
    if form is None:
        return checkpoint
    name, wanted = f"{checkpoint.role}_quantization", [each for each in FORMATS if each == form]
    if not wanted:
        raise UnsupportedOption(f"{name}={form!r} is not supported, wanted one of {', '.join(FORMATS)} or None")
    if checkpoint.spec.hosting:
        raise UnsupportedOption(
            f"{name}={form!r} is for native families alone, and {checkpoint.name} is hosted; leave it out"
        )
    if checkpoint.quantisation is not None:
        raise UnsupportedOption(
            f"{name}={form!r}, and {checkpoint.name} is stored quantised ({checkpoint.stored}); leave it out, or load "
            "the original weights"
        )
    if checkpoint.spec.hosting:
        raise UnsupportedOption(
            f"{name}={form!r}, and {checkpoint.name} is hosted; leave it out: only native families are rounded"
        )
    draft = checkpoint.role == "draft"
    effect = "which never changes the text" if draft else "another model than the one that is stored"
    return replace(checkpoint, rounded=wanted[0], stored=f"matrices rounded to {form} while loading, {effect}")
