"""Interface of a model: passes for steps and proposers, and sizes for memory and settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.linear import PartKeys
from fastspec.kv_cache.states import StateCache
from fastspec.shapes import ForwardBatch, Tiling


class ModelInfo(Protocol):
    """Sizes of a model, known before its weights are loaded.

    `ModelSpec` implements it for models that this package's decoder runs, `HostedInfo` for models of transformers.
    """

    @property
    def family(self) -> str:
        """Name of the model's architecture, for messages."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the weights are stored."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_length(self) -> int:
        """Context length in tokens."""

    @property
    def num_layers(self) -> int:
        """Number of layers, each with K and V in the cache, or with a recurrent state."""

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, KV heads, head_dim) of every layer with K and V in the cache."""

    @property
    def hosting(self) -> str:
        """Description of the modules that are replaced in transformers' model. Empty: this package's decoder runs."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer: number of newest keys to which a query attends. None: all keys."""

    @property
    def num_heads(self) -> int:
        """Number of query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""

    @property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Intermediate size of the MLP."""

    @property
    def routed_elements(self) -> int:
        """Elements of temporary tensors that a mixture of experts needs per token, in addition to those of the MLP.

        0 if there are no experts, or if the number is unknown.
        """

    def rotary_bytes(self, positions: int) -> int:
        """Returns the bytes of the model's rotary tables for `positions` positions."""

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Returns the bytes of the recurrent states of one row, for steps of up to `max_drafts` draft tokens.

        0 if the model has no recurrent states.
        """

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of all weights as loaded in `dtype`. A matrix that is used twice counts once."""


class ModelSource(Protocol):
    """Source of a model's weights, with the facts that the generator's settings and `explain` need.

    `Checkpoint` and `HeadCheckpoint` implement it.
    """

    @property
    def name(self) -> str:
        """Short description, for messages and `explain()`."""

    @property
    def spec(self) -> ModelInfo:
        """Sizes of the model."""

    @property
    def stored(self) -> str:
        """Description of the quantised format of the stored matrices. Empty: they are not quantised."""

    @property
    def mtp(self) -> bool:
        """True if the source also has layers for multi-token prediction (MTP), which may draft for the model."""

    @property
    def ranks(self) -> int:
        """Number of tensor-parallel ranks that share the model. Each rank loads its slices of the weights."""

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Returns the bytes of the weights on a device, in the formats of `ops`, with activations of `dtype`."""

    @property
    def module(self) -> nn.Module | None:
        """Loaded torch module from which the weights come. None: they come from files.

        The device of the module is the default device of the generator.
        """


class CausalModel(Protocol):
    """Interface of a model for steps and proposers. Tests implement it with tables of logits."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Runs a forward pass over the tokens of `rows`, and writes their K/V to the cache.

        Returns hidden states [B, Q, hidden], the input of `logits` and `argmax`.
        """

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the result of `hidden`, and the residual stream after each of `layers`, [B, Q, len(layers), hidden].

        Layer -1 is the embedding. Layer `num_layers` is the output of the final norm. Called only for a proposer that
        reads these hidden states.
        """

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., V] for hidden states [..., hidden]."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        """Finds the id below `limit` with the largest logit for each of the hidden states [R, hidden].

        Writes the ids to `out`, int64 [R]. Of equal logits the lowest id is taken.

        Args:
            hidden, tiling: see `hidden` and `logits`.
            limit: only ids below it count.
            out: int64 [R], receives the ids.
            ids: int64 [V], the id of each of the V logits, such as the target's id of each id of a draft. None: the
                model's own ids.
        """


def states_of(model: object) -> StateCache | None:
    """Returns the cache of a model's recurrent states. None if the model has no recurrent states."""
    found: StateCache | None = getattr(getattr(model, "cache", None), "states", None)
    return found


@runtime_checkable
class VocabParallel(Protocol):
    """Model whose vocabulary is split over ranks. A greedy step needs only the largest logit of each rank."""

    def best_keys(self, hidden: Tensor, tiling: Tiling) -> PartKeys | None:
        """Returns the largest logit in each rank's part of the vocabulary, as `PartKeys`.

        `hidden` is the result of `CausalModel.hidden`. Returns None if a greedy step needs all logits of this model.
        """


def is_recurrent(model: object) -> bool:
    """True if a model has recurrent states.

    Attention ignores the K/V of rejected draft tokens because of the row's length. A recurrent state has no such mask.
    """
    return states_of(model) is not None


class Pending(Protocol):
    """Weights whose memory is allocated but not filled yet. `PendingWeights` implements it for a model."""

    @property
    def fill(self) -> Callable[[], None]:
        """Function that reads the weights from their files into this memory. It may run in another thread."""

    @property
    def cancel(self) -> Callable[[], None]:
        """Function that makes `fill` end soon. The weights must not be used after it."""
