"""A Llama decoder with the parameter names of transformers, for training and for writing text quickly."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 10000.0
RMS_EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one decoder; a head has hidden / heads dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden // self.heads


class KvCache:
    """Keys and values of rows of equal length, for `Llama.forward` to extend.

    Attributes:
        keys: [layers, rows, kv_heads, capacity, head_dim]; so are the values.
        length: Tokens stored so far.
    """

    def __init__(self, model: Llama, rows: int, capacity: int) -> None:
        shape, weight = model.shape, model.model.embed_tokens.weight
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.empty(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values [rows, kv_heads, tokens, head_dim]; returns all stored so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal attention with grouped keys and values and rotary positions."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        kv_width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KvCache | None) -> Tensor:
        """Mixes x [rows, tokens, hidden] over the positions up to its own."""
        query = rotate(self._heads(self.q_proj(x)), rope)
        key, value = rotate(self._heads(self.k_proj(x)), rope), self._heads(self.v_proj(x))
        if cache is not None:
            key, value = cache.extend(self.index, key, value)
        group = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        # More than one token enters only at position 0, where the square causal mask is the right one.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        added: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return added

    def _heads(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        return x.view(rows, tokens, -1, self.shape.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., hidden] to the same shape."""
        mapped: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mapped


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each normed before and dropped out after."""

    def __init__(self, shape: Shape, index: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn, self.mlp = Attention(shape, index), Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=RMS_EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=RMS_EPS)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KvCache | None) -> Tensor:
        """Maps x [rows, tokens, hidden] to the same shape."""
        mixed = self.self_attn(self.input_layernorm(x), rope, cache)
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Stack(nn.Module):
    """Embedding, layers and last norm, under the name `model` as in transformers."""

    def __init__(self, shape: Shape, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index, dropout) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=RMS_EPS)


class Llama(nn.Module):
    """A decoder whose head is its embedding.

    Args:
        shape: Its sizes.
        vocab_size: Rows of the embedding.
        context: The most positions it can be given.
        dropout: Share dropped after the embedding and after each block, in training.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape, vocab_size: int, context: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.context, self.dropout = shape, context, dropout
        self.model = Stack(shape, vocab_size, dropout)
        cosine, sine = rope_table(shape.head_dim, context)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._initialise()

    def forward(self, ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """Returns logits [rows, tokens, vocab] of ids [rows, tokens] that follow what the cache holds."""
        start = cache.length if cache is not None else 0
        end = start + ids.shape[1]
        rope = (self.cosine[start:end], self.sine[start:end])
        x = F.dropout(self.model.embed_tokens(ids), self.dropout, self.training)
        for layer in self.model.layers:
            x = layer(x, rope, cache)
        if cache is not None:
            cache.length = end
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def size(self) -> int:
        """Returns the number of parameters; the shared head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialise(self) -> None:
        block_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, 0.0, block_std if ends_block else INIT_STD)


def rope_table(head_dim: int, context: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [context, head_dim] of the rotary angles, each half of the head alike."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(context).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turns x [rows, heads, tokens, head_dim] by its positions' angles."""
    cosine, sine = rope[0].to(x.dtype), rope[1].to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * cosine + torch.cat((-high, low), -1) * sine


def frozen_copy(model: Llama, dtype: torch.dtype) -> Llama:
    """Returns a copy for inference in `dtype`, its weights first rounded to bfloat16 as they are saved."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return copied


@torch.no_grad()
def write(model: Llama, prompts: Tensor, new_tokens: int, temperatures: Tensor) -> Tensor:
    """Continues prompts of equal length.

    Args:
        model: The model that writes.
        prompts: int64 [rows, length].
        new_tokens: Tokens to add to each row; the end of text does not stop a row.
        temperatures: [rows]; 0 is greedy.

    Returns:
        int64 [rows, length + new_tokens], prompts included.
    """
    cache = KvCache(model, len(prompts), prompts.shape[1] + new_tokens)
    rows, token = [prompts], prompts
    for _ in range(new_tokens):
        logits = model(token, cache)[:, -1].float()
        law = F.softmax(logits / temperatures.clamp_min(0.05)[:, None], -1)
        drawn = torch.multinomial(law, 1)
        token = torch.where(temperatures[:, None] > 0, drawn, logits.argmax(-1, keepdim=True))
        rows.append(token)
    return torch.cat(rows, 1)
