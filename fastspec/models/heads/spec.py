"""What a learned drafter is, before its weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fastspec.models.config import ModelSpec
from fastspec.models.heads.recognise import Recognised

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a head must know of its target.

    Attributes:
        name: for messages.
        embed_scale: factor on its embedding.
    """

    name: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: torch.dtype
    embed_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes of a head; a `ModelInfo`.

    A head runs in its target's dtype, for it reads that model's hidden states, and may share its embedding.

    Attributes:
        found: what it is.
        decoder: its layers, as those of a model; vocab_size is that of its own logits.
        target: the model that it drafts for.
        readings: which hidden states of the target it reads, as boundaries: b is the residual stream after b layers,
            0 the embedding, and `NORMED` the stream after all layers and the final norm. One entry for each way of
            understanding its config, the one of the engine that wrote the layout first.
        tensors: every tensor that is loaded, by its name here (`plain_name`), with its shape.
        own_embed, own_head: whether it has an embedding and a head of its own; else they are the target's.
    """

    found: Recognised
    decoder: ModelSpec
    target: TargetSizes
    readings: tuple[tuple[int, ...], ...]
    tensors: Mapping[str, tuple[int, ...]]
    own_embed: bool
    own_head: bool

    def for_length(self, max_length: int) -> Self:
        """The spec for rows of up to `max_length` tokens, as `ModelSpec.for_length`."""
        return replace(self, decoder=self.decoder.for_length(max_length))

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of what is kept of a row between steps, see `Proposer.kept`; (): nothing."""
        return ()

    @property
    def attention_inputs(self) -> int:
        """Elements that the last layer reads of a position from its attention on: the stream, and q, k and v."""
        gates = self.num_heads if self.decoder.plans[-1].output_gate else 0
        return self.hidden_size + (self.num_heads + gates + 2 * self.num_kv_heads) * self.head_dim

    @property
    def max_drafts(self) -> int | None:
        """Drafts of a step at most; None: any number."""
        return None

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that are loaded joined, under a new name: the names of the tensors side by side in each."""
        return {}

    @property
    def feature_layers(self) -> int:
        """Hidden states of the target that are read at each position."""
        return len(self.readings[0])

    @property
    def family(self) -> str:
        """A short description, for messages and `explain()`."""
        return str(self.found)

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int:
        """The target's context: what a head's config says about positions is about its training texts."""
        return self.target.max_length

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.decoder.num_layers

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """As in `ModelInfo`."""
        return self.decoder.attention_shapes

    @property
    def hosting(self) -> str:
        """Empty: our code runs it."""
        return ""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.decoder.windows

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.decoder.head_dim

    @property
    def hidden_size(self) -> int:
        """Elements of its residual stream."""
        return self.decoder.hidden_size

    @property
    def routed_elements(self) -> int:
        """0: heads have no experts."""
        return 0

    @property
    def intermediate_size(self) -> int:
        """Elements between the products of an MLP."""
        return self.decoder.intermediate_size

    def rotary_bytes(self, positions: int) -> int:
        """As in `ModelInfo`."""
        return self.decoder.rotary_bytes(positions)

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """None: a head attends."""
        return 0

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its own weights in `dtype`; what it shares with the target is not counted."""
        return dtype.itemsize * sum(math.prod(shape) for shape in self.tensors.values())
