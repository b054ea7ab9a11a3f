"""Finds and checks a generator's target and draft, and notes the formats to which they are quantised on loading."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.rounding import FORMATS
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.generation import CONFIG
from fastspec.models.checkpoints.quantised.small import cost_of_int4
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.safetensors_files import read_json
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.mtp_spec import MTP
from fastspec.models.heads.resolve import draft_files, resolve_head, resolve_mtp
from fastspec.models.hosted.info import HostedInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fastspec.kernels.common.codes import CodeFormat

Source = TypeVar("Source", bound=Checkpoint | HeadCheckpoint)
_SAMPLE, _SAMPLES = 4096, 256  # for fingerprints: bytes per sample, and samples per file
PARD: Final = "pard_token"  # field of a config
AS_STORED: Final = "as it is stored"  # `Checkpoint.stored` begins with this if "auto" does not round


def resolve_pair(
    target: str | os.PathLike[str] | PreTrainedModel,
    draft: str | os.PathLike[str] | PreTrainedModel | None,
    revisions: tuple[str | None, str | None],
    quantization: tuple[str | None, str | None],
    feature_layers: Sequence[int] | None = None,
    draft_vocab: Sequence[int] | None = None,
) -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None]:
    """Finds and checks target and draft, and notes the formats to which they will be quantised. Loads no weights.

    The draft is a draft model, or a learned drafter (head).

    Args:
        target: the user's target; see `resolve`.
        draft: the user's draft; see `resolve`. "mtp" is the target's own MTP layers, not a directory of that name.
            None: there is no draft.
        revisions: revisions on the Hub of (target, draft). None: the default branch.
        quantization: formats to which (target, draft) are quantised while they are loaded. None: loaded as stored.
        feature_layers: boundaries of the target whose hidden states a head reads, if the user chose them. Boundary b
            is the hidden state after b layers. None: those in the head's config.
        draft_vocab: ids that a head may draft, if the user chose them. None: all ids in its vocabulary.

    Returns:
        (target, draft). The draft is None if there is none.

    Raises:
        UnsupportedOption: an unknown format, a format for a model that is stored quantised, or an option that the draft
            does not use. Also the errors of `resolve`, `resolve_head` and `resolve_mtp`.
    """
    if draft is None and revisions[1] is not None:
        raise UnsupportedOption(f"draft_revision={revisions[1]!r}, and there is no draft; leave it out")
    found = _rounded(resolve(target, role="target", revision=revisions[0]), quantization[0])
    if isinstance(draft, str) and draft == MTP:
        return found, _rounded_head(resolve_mtp(found, revisions[1], feature_layers, draft_vocab), quantization[1])
    files = draft_files(draft, revisions[1])
    if (head := files.head) is not None:
        resolved = resolve_head(head, str(draft), found, feature_layers, draft_vocab)
        return found, _rounded_head(resolved, quantization[1])
    if draft_vocab is not None:
        raise UnsupportedOption(
            f"draft_vocab is for learned drafters and draft='{MTP}', got draft={draft!r}; leave it out"
        )
    if feature_layers is not None:
        raise UnsupportedOption(
            f"feature_layers={tuple(feature_layers)!r} is for learned drafters only, and draft={draft!r} is not a "
            "learned drafter; leave feature_layers out"
        )
    other = None if draft is None else resolve(draft, role="draft", revision=revisions[1], fetched=files.fetched)
    return found, None if other is None else _rounded(_with_mask(other), quantization[1])


def _with_mask(draft: Checkpoint) -> Checkpoint:
    """Returns a draft model with `mask_id` from its config if it is a PARD model, else the same draft model.

    Raises:
        CheckpointError: the id is not in the model's vocabulary.
    """
    if draft.directory is not None:
        mask = read_json(draft.directory / CONFIG).get(PARD)
    else:
        mask = getattr(getattr(draft.module, "config", None), PARD, None)
    if mask is None:
        return draft
    if type(mask) is not int or not 0 <= mask < draft.spec.vocab_size:
        raise CheckpointError(
            f"draft: {draft.name}: {PARD}={mask!r} in its config, wanted an id below vocab_size="
            f"{draft.spec.vocab_size}; correct it, or delete it to draft token by token"
        )
    return replace(draft, mask_id=mask)


def _rounded(checkpoint: Checkpoint, form: str | None) -> Checkpoint:
    if form is None:
        return checkpoint
    name, wanted = f"{checkpoint.role}_quantization", _known(checkpoint.role, form)
    if checkpoint.quantisation is not None:
        raise UnsupportedOption(
            f"{name}={form!r} cannot be applied, because {checkpoint.name} is stored quantised ({checkpoint.stored}); "
            f"leave {name} out, or load the original weights"
        )
    spec = checkpoint.spec
    if spec.experts if isinstance(spec, HostedInfo) else spec.routed_elements:
        raise UnsupportedOption(
            f"{name}={form!r} does not go with {checkpoint.name}: experts are not rounded while loading; leave it out"
        )
    return rounded_to(checkpoint, wanted)


def _known(role: str, form: str) -> CodeFormat:
    found = [each for each in FORMATS if each == form]
    if not found:
        name, more = f"{role}_quantization", ", 'auto'" if role == "draft" else ""
        raise UnsupportedOption(f"{name}={form!r} is not supported, wanted one of {', '.join(FORMATS)}{more} or None")
    return found[0]


def _rounded_head(head: HeadCheckpoint, form: str | None) -> HeadCheckpoint:
    if form is None:
        return head
    wanted = _known("draft", form)
    if head.spec.decoder.routed_elements:
        raise UnsupportedOption(
            f"draft_quantization={form!r} does not go with {head.name}: experts are not rounded while loading; leave "
            "it out"
        )
    return rounded_to(head, wanted)


def rounded_to(checkpoint: Source, form: CodeFormat) -> Source:
    """Returns a copy of a checkpoint whose matrices will be quantised to the format `form` while they are loaded.

    The given checkpoint must not be stored quantised.
    """
    draft = isinstance(checkpoint, HeadCheckpoint) or checkpoint.role == "draft"
    effect = "which never changes the text" if draft else "another model than the one that is stored"
    return replace(checkpoint, rounded=form, stored=f"matrices rounded to {form} while loading, {effect}")


def warn_of_small(target: Checkpoint) -> None:
    """Warns if a small target is rounded to int4 while it is loaded, because its text becomes much worse."""
    parameters = target.whole.weight_bytes(torch.float32) // torch.float32.itemsize
    if target.rounded == "int4" and (cost := cost_of_int4(parameters)):
        warnings.warn(
            f"target_quantization='int4': {cost}. Give target_quantization='int8', or a copy that "
            "`fastspec quantize --calibrate FILE` wrote",
            stacklevel=4,
        )


def fingerprint(checkpoint: Checkpoint | HeadCheckpoint) -> str:
    """Returns 16 hexadecimal digits of a hash. Different checkpoints have different ones.

    The hash covers the spec, the format to which matrices are quantised on loading, and the sizes and some bytes of the
    files. For a live module it covers names, shapes and the first values of parameters.
    """
    whole = checkpoint.whole if isinstance(checkpoint, Checkpoint) else checkpoint.spec
    found = hashlib.sha256(repr((whole, checkpoint.stored, checkpoint.rounded)).encode())
    if checkpoint.directory is not None:
        for file in sorted(checkpoint.directory.glob("*.safetensors")):
            _add_file(found, file)
    elif isinstance(checkpoint, Checkpoint) and checkpoint.gguf is not None:
        _add_file(found, checkpoint.gguf)
    elif checkpoint.module is not None:
        for name, tensor in checkpoint.module.named_parameters():
            found.update(repr((name, tuple(tensor.shape), tensor.detach().flatten()[:8].tolist())).encode())
    return found.hexdigest()[:16]


def _add_file(found: hashlib._Hash, file: Path) -> None:
    """Adds a file's name and size, and samples of its bytes, to a hash."""
    size = file.stat().st_size
    found.update(f"{file.name} {size}".encode())
    with file.open("rb") as opened:
        for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
            opened.seek(start)
            found.update(opened.read(_SAMPLE))
