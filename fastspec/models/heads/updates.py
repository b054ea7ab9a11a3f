"""Updates the weights of a learned drafter (head) that is in use. New values replace the old ones in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.models.checkpoints.parameter_names import RenamedTensors
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.checkpoints.updates import GivenTensors, NewWeights, WeightUpdate, check_format
from fastspec.models.heads.checkpoint import OFFSETS, HeadCheckpoint, HeadTensors, check_head_tensors, target_ids
from fastspec.models.heads.mtp_spec import MtpSpec, mtp_of, mtp_tensors
from fastspec.models.heads.spec import plain_name
from fastspec.models.heads.weights import PendingHead


def checked_head_update(values: NewWeights, weights: PendingHead) -> WeightUpdate:
    """Checks new values for all weights of a head, and returns an update that can copy them. Copies nothing yet.

    Args:
        values: a directory, a module, a state_dict, or pairs of a name and a tensor. Names are those of the head's
            checkpoint. For MTP layers, names are those of the target's checkpoint, and its other tensors are
            ignored.
        weights: weights of the head.

    Raises:
        CheckpointError: a tensor is missing or unknown, has another shape or quantised format than the loaded one, or
            the id table `d2t` differs.
        UnsupportedOption: the head was made with `draft_vocab`.
    """
    checkpoint, loader = weights.checkpoint, weights.loader
    spec = checkpoint.spec
    if checkpoint.rows_of is not None or (checkpoint.source is not None and checkpoint.vocab_map is not None):
        raise UnsupportedOption(
            f"the draft {checkpoint.name} was made with draft_vocab, and is not updated in place; make a new generator"
        )
    if isinstance(values, str | os.PathLike):
        source = _of_directory(Path(values), checkpoint)
    else:
        if isinstance(values, nn.Module):
            values = values.state_dict()
        given = GivenTensors(values.items() if isinstance(values, Mapping) else values)
        source = RenamedTensors(given, _names(given, checkpoint))
    check_head_tensors(source, spec)
    if OFFSETS in source.infos():
        ids = target_ids(source, spec)
        old = checkpoint.vocab_map
        if (ids is None) != (old is None) or (ids is not None and old is not None and not torch.equal(ids, old)):
            raise CheckpointError(f"the update has another {OFFSETS} than {checkpoint.name}; make a new generator")
    names = frozenset(name for part in loader.parts for name in part.names)
    for name in sorted(names):
        check_format(name, source, loader)
    return WeightUpdate(source, names, True, loader)


def _of_directory(directory: Path, checkpoint: HeadCheckpoint) -> TensorSource:
    """Returns the tensors of a head that a local directory contains.

    Args:
        directory: for MTP layers, a checkpoint of the target. For other heads, a checkpoint of the head.
        checkpoint: the head in use.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; give a local one with the head's new weights")
    if checkpoint.source is None:
        return HeadTensors(directory)
    assert isinstance(checkpoint.spec, MtpSpec), "layers in a target's checkpoint"
    return mtp_tensors(replace(checkpoint.source, directory=directory), checkpoint.spec)


def _names(given: GivenTensors, checkpoint: HeadCheckpoint) -> dict[str, str]:
    """Maps the names of the draft head's tensors in this package to the names of the given tensors."""
    if checkpoint.source is None:
        return {plain_name(name): name for name in given.infos()}
    found = mtp_of(checkpoint.source.native, given.infos().keys())
    if found is None:
        raise CheckpointError("the update has no MTP layers; give them by the names of the target's checkpoint")
    return dict(found.names)
