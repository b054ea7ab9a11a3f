"""The interface of a model: passes for steps and proposers, sizes for memory and settings."""

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
    """Sizes of a model, known before its weights are loaded. `ModelSpec` has them for the models of this package."""

    @property
    def family(self) -> str:
        """The name of its architecture, for people."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its weights are stored in."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_length(self) -> int:
        """Its context in tokens."""

    @property
    def num_layers(self) -> int:
        """Layers, each with K and V in the cache, or with a recurrent state."""

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Query heads, key heads and head_dim of every pair of K and V in the cache."""

    @property
    def hosting(self) -> str:
        """A description of the swapped parts if transformers' own module runs; else empty."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many of the newest keys a query sees; None: all."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Elements of one head."""

    @property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Elements between the products of the MLP."""

    @property
    def routed_elements(self) -> int:
        """Elements that a token's experts work in beside the MLP; 0 where there are none, or where it is not known."""

    def rotary_bytes(self, positions: int) -> int:
        """Bytes of its rotary tables for that many positions."""

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Bytes of the recurrent states of one row, for steps of up to `max_drafts` drafts; 0: it has none."""

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights as loaded in `dtype`, a matrix that is used twice counted once."""


class ModelSource(Protocol):
    """A source of a model's weights, as settings and `explain` see it. `Checkpoint` is one."""

    @property
    def name(self) -> str:
        """A short description, for messages and `explain()`."""

    @property
    def spec(self) -> ModelInfo:
        """Its sizes."""

    @property
    def stored(self) -> str:
        """A description of how quantised matrices are stored; else empty."""

    @property
    def mtp(self) -> bool:
        """True if MTP layers lie beside it, which may draft for it."""

    @property
    def ranks(self) -> int:
        """Processes that share it, each with its slices."""

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Bytes that its weights take on a device, as `ops` store them, with activations of `dtype`."""

    @property
    def module(self) -> nn.Module | None:
        """The caller's live module, whose device is then the default; else None."""


class CausalModel(Protocol):
    """A model as the step sees it; tests put tables of logits in its place."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Feeds rows, writes their K/V; returns hidden states [B, Q, hidden] for `logits` and `argmax`."""

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The result of `hidden`, and the residual stream after each of `layers`, [B, Q, len(layers), hidden].

        Layer -1 is the embedding; one layer more than there are is the last one's stream after the final norm.
        Called only where a proposer has `features`.
        """

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., hidden]."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes to out int64 [R] the id below `limit` of the largest logit of hidden [R, hidden], lowest on ties."""


def states_of(model: object) -> StateCache | None:
    """A model's recurrent states beside its K/V; None: it has none."""
    found: StateCache | None = getattr(getattr(model, "cache", None), "states", None)
    return found


@runtime_checkable
class VocabParallel(Protocol):
    """A model whose vocabulary is split over ranks: a greedy step needs only the largest logit of each rank."""

    def best_keys(self, hidden: Tensor, tiling: Tiling) -> PartKeys | None:
        """Argmax keys of what `hidden` returned, one for each rank; None where a step needs the logits themselves."""


def is_recurrent(model: object) -> bool:
    """True if a model has recurrent states beside its K/V. A pass changes them, and a length does not mask them."""
    return states_of(model) is not None


class Pending(Protocol):
    """Weights that are allocated, and filled later; `PendingWeights` are those of a model."""

    @property
    def fill(self) -> Callable[[], None]:
        """Reads the files; it may run in another thread."""

    @property
    def cancel(self) -> Callable[[], None]:
        """Makes `fill` end soon; the weights are not to be used then."""
