"""Checks new weights for a model in use: a native model, a hosted model or a learned drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from fastspec.models.checkpoints.decoder_weights import PendingWeights
from fastspec.models.checkpoints.updates import NewWeights, checked_update, own_update
from fastspec.models.heads.updates import checked_head_update
from fastspec.models.heads.weights import PendingHead
from fastspec.models.hosted.updates import HostedWeights, checked_hosted_update, own_hosted_update
from fastspec.models.interface import Pending

ModelWeights: TypeAlias = PendingWeights | HostedWeights


class Update(Protocol):
    """Checked new values for the weights of a model."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors with new values."""

    @property
    def whole(self) -> bool:
        """True if every tensor of the model has a new value."""

    def copy(self) -> None:
        """Copies the new values to the weights, on the current CUDA stream."""


def by_role(pending: Sequence[Pending]) -> dict[str, ModelWeights]:
    """Returns the weights of the target and of the draft model, with the keys "target" and "draft".

    Args:
        pending: weights of all models of a generator. Those of a draft head are left out.
    """
    return {each.checkpoint.role: each for each in pending if isinstance(each, PendingWeights | HostedWeights)}


def checked(values: NewWeights, weights: ModelWeights | PendingHead) -> Update:
    """Checks new values, and returns an update that can copy them. Copies nothing yet.

    For arguments and errors see `checked_update`, `checked_hosted_update` and `checked_head_update`.
    """
    if isinstance(weights, PendingHead):
        return checked_head_update(values, weights)
    if isinstance(weights, HostedWeights):
        return checked_hosted_update(values, weights)
    return checked_update(values, weights)


def restored(weights: ModelWeights) -> Update:
    """Returns an update that restores the values of the model's own checkpoint.

    Raises:
        ValueError: the weights came from a loaded model, which has no files.
    """
    checkpoint = weights.checkpoint
    if checkpoint.module is not None:
        raise ValueError(
            f"the {checkpoint.role} {checkpoint.name} was a loaded model, and has no file to read again; give its "
            "weights to wake(weights)"
        )
    return own_hosted_update(weights) if isinstance(weights, HostedWeights) else own_update(weights)
