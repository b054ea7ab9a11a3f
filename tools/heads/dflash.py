"""A DFlash head in torch, its parameters named as published heads name them (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .head import DraftHead, HeadShape, Mlp, Norm, Past, rotate


@dataclass(frozen=True, slots=True)
class Block:
    """What a DFlash head has beside its `HeadShape`.

    Attributes:
        layers: Its layers.
        size: Tokens of the largest block: the last token of the text, and masks.
        mask_id: The token whose embedding stands for a mask.
    """

    layers: int
    size: int
    mask_id: int


class BlockAttention(nn.Module):
    """Attention of the tokens of a block to the text before it and to the whole block, in both directions."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (Norm(shape.head_dim, eps=shape.rms_eps) for _ in "qk")

    def forward(self, context: Tensor, block: Tensor) -> Tensor:
        """Mixes a block for each start.

        Args:
            context: Condensed features [rows, starts, hidden]; start i sees those up to position i.
            block: Normed tokens [places, rows, starts, hidden]; place j of start i lies at position i + 1 + j.

        Returns:
            What is added to the tokens, the shape of `block`.
        """
        group, past = self.shape.heads // self.shape.kv_heads, Past()
        for first, x in enumerate((context, *block)):
            key = rotate(self.k_norm(self._heads(self.k_proj(x))), first, self.shape)
            past.keys.append(key.to(x.dtype).repeat_interleave(group, 1))
            past.values.append(self._heads(self.v_proj(x)).to(x.dtype).repeat_interleave(group, 1))
        mixed = []
        for first, x in enumerate(block, 1):
            query = rotate(self.q_norm(self._heads(self.q_proj(x))), first, self.shape)
            mixed.append(past.attend(query.to(x.dtype)).transpose(1, 2).flatten(2))
        added: Tensor = self.o_proj(torch.stack(mixed))
        return added

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


class BlockLayer(nn.Module):
    """A decoder layer over blocks: norm, attention, norm, MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(shape), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, eps=shape.rms_eps)
        self.post_attention_layernorm = Norm(shape.hidden, eps=shape.rms_eps)

    def forward(self, context: Tensor, x: Tensor) -> Tensor:
        """Maps blocks x [places, rows, starts, hidden] to the same shape, with context [rows, starts, hidden]."""
        x = x + self.self_attn(context, self.input_layernorm(x))
        mapped: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mapped


class DFlashHead(DraftHead):
    """A head that drafts a block at once: the last token and masks go through its layers in one pass.

    Args:
        shape: Its sizes.
        block: Its layers and its block.
        drafted: The target's ids of the tokens it can draft, int64 [draft_vocab], ascending.
    """

    def __init__(self, shape: HeadShape, block: Block, drafted: Tensor) -> None:
        super().__init__(shape, drafted)
        self.block = block
        self.hidden_norm = Norm(shape.hidden, eps=shape.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(block.layers))

    def unroll(self, features: Tensor, ids: Tensor, embedding: Tensor, passes: int) -> list[Tensor]:
        """Drafts a block from every position of known text; see `DraftHead.unroll`.

        The block of start i is token i + 1 and `passes` masks. Mask j speaks about the token at its own position,
        i + 2 + j. Drafts of a block do not depend on each other, so the text's own tokens are not read.

        Raises:
            ValueError: The block has fewer masks than `passes`.
        """
        if passes >= self.block.size:
            raise ValueError(f"{passes} drafts of a block of {self.block.size} tokens: it has {self.block.size - 1}.")
        starts = ids.shape[1] - passes
        context = self.hidden_norm(self.fc(features[:, :starts]))
        anchors, mask = ids[:, 1 : 1 + starts], ids.new_full((passes, len(ids), starts), self.block.mask_id)
        x = F.embedding(torch.cat((anchors[None], mask)), embedding).float()
        for layer in self.layers:
            x = layer(context, x)
        return list(self.lm_head(self.norm(x[1:])))
