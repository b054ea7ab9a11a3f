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
    """Sizes of a model, known before its weights are loaded. `ModelSpec` implements it for native models."""

    @property
    def family(self) -> str:
        """Name of its architecture, for messages."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which its weights are stored."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_length(self) -> int:
        """Its context in tokens."""

    @property
    def num_layers(self) -> int:
        """Number of layers, each with K and V in the cache, or with a recurrent state."""

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, KV heads, head_dim) of every layer with K and V in the cache."""

    @property
    def hosting(self) -> str:
        """Description of the replaced modules, if transformers' own module runs. Else empty."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the number of newest keys that a query sees. None: all."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""

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
        """Temporary elements per token for experts, in addition to the MLP's.

        0 if there are none, or if it is unknown.
        """

    def rotary_bytes(self, positions: int) -> int:
        """Returns the bytes of its rotary tables for `positions` positions."""

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Returns the bytes of the recurrent states of one row, for steps of up to `max_drafts` drafts. 0: none."""

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of all weights as loaded in `dtype`. A matrix that is used twice counts once."""


class ModelSource(Protocol):
    """Source of a model's weights, as settings and `explain` need it.

    Implemented by `Checkpoint` and `HeadCheckpoint`.
    """

    @property
    def name(self) -> str:
        """Short description, for messages and `explain()`."""

    @property
    def spec(self) -> ModelInfo:
        """Sizes of the model."""

    @property
    def stored(self) -> str:
        """Description of the quantised format of its matrices. Empty: not quantised."""

    @property
    def mtp(self) -> bool:
        """True if it also has MTP layers, which may draft for it."""

    @property
    def ranks(self) -> int:
        """Number of processes that share it, each with its slices."""

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Returns the bytes of its weights on a device, in the formats of `ops`, with activations of `dtype`."""

    @property
    def module(self) -> nn.Module | None:
        """The user's live module, whose device is then the default. Else None."""


class CausalModel(Protocol):
    """Model as a step uses it. Tests implement it with tables of logits."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Feeds rows and writes their K/V. Returns hidden states [B, Q, hidden] for `logits` and `argmax`."""

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the result of `hidden`, and the residual stream after each of `layers`, [B, Q, len(layers), hidden].

        Layer -1 is the embedding. Layer `num_layers` is the output of the final norm. Called only if the proposer has
        `features`.
        """

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., V] for hidden states [..., hidden]."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes to `out` int64 [R] the id below `limit` with the largest logit of hidden [R, hidden].

        Of equal logits the lowest id is taken.
        """


def states_of(model: object) -> StateCache | None:
    """Returns a model's recurrent states. None: it has none."""
    found: StateCache | None = getattr(getattr(model, "cache", None), "states", None)
    return found


@runtime_checkable
class VocabParallel(Protocol):
    """Model whose vocabulary is split over ranks. A greedy step needs only the largest logit of each rank."""

    def best_keys(self, hidden: Tensor, tiling: Tiling) -> PartKeys | None:
        """Returns the argmax keys of each rank for the result of `hidden`.

        None if a step needs the logits themselves.
        """


def is_recurrent(model: object) -> bool:
    """True if a model has recurrent states. Unlike K/V, they cannot be masked by a row's length after a pass."""
    return states_of(model) is not None


class Pending(Protocol):
    """Weights that are allocated but not filled yet. `PendingWeights` are those of a model."""

    @property
    def fill(self) -> Callable[[], None]:
        """Reads the files. May run in another thread."""

    @property
    def cancel(self) -> Callable[[], None]:
        """Makes `fill` end soon. The weights must not be used then."""
