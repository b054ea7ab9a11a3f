"""A peer in the manner of gpt-fast: torch.compile, a static K/V cache, and one CUDA graph for a pass of one token.

The code is our own, over the weights of a transformers model. It compiles one layer, which serves all layers of the
model. On a CPU nothing is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}  # what gpt-fast sets for products with one row
WARM_UPS = 3
CHECKED = 8  # tokens between two looks at the end of the text, which wait for the device


class Layer(NamedTuple):
    """Weights of a layer of a Llama."""

    norms: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor, Tensor]
    o: Tensor
    mlp: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, layer: Any) -> Layer:
        """Takes the weights of a layer of transformers."""
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
            (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            attention.o_proj.weight,
            (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
        )


def layer_pass(
    x: Tensor, layer: Layer, cache: tuple[Tensor, Tensor], place: tuple[Tensor, ...], dim: int, eps: float
) -> Tensor:
    """One layer over x [1, Q, hidden]; writes K and V [1, heads, length, dim] at the positions, then attends.

    Args:
        x: hidden states.
        layer: its weights.
        cache: K and V.
        place: positions [Q], cos and sin of their rotation [Q, dim], and the mask [Q, length].
        dim: elements of a head.
        eps: of the norms.
    """
    positions, cos, sin, mask = place
    y = F.rms_norm(x, x.shape[-1:], layer.norms[0], eps)
    q, k, v = (F.linear(y, weight).view(*x.shape[:2], -1, dim).transpose(1, 2) for weight in layer.qkv)
    for kept, new in zip(cache, (_rotated(k, cos, sin), v), strict=True):
        kept[:, :, positions] = new
    group = q.shape[1] // k.shape[1]
    keys, values = (kept.repeat_interleave(group, dim=1) for kept in cache)  # with a mask no fused kernel groups heads
    mixed = F.scaled_dot_product_attention(_rotated(q, cos, sin), keys, values, attn_mask=mask)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.o)
    y = F.rms_norm(x, x.shape[-1:], layer.norms[1], eps)
    gate, up, down = layer.mlp
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def head_pass(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 logits of x [1, Q, hidden]."""
    return F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), weight).float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class StaticDecoder:
    """Greedy decoding of one prompt at a time with caches of a fixed size.

    Args:
        model: a Llama of transformers without biases.
        length: positions of the caches.
    """

    def __init__(self, model: Any, length: int) -> None:
        body, config = model.model, model.config
        weight: Tensor = body.embed_tokens.weight
        self._embed, self._norm, self._eps = weight, body.norm.weight, config.rms_norm_eps
        self._head: Tensor = model.get_output_embeddings().weight
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = [Layer.of(layer) for layer in body.layers]
        shape = (1, config.num_key_value_heads, length, self._dim)
        self._caches = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self._layers]
        places = torch.arange(length, device=weight.device)
        cos, sin = body.rotary_emb(weight.new_zeros(1, 1, 1), places[None])
        self._tables = cos[0], sin[0], places[None] <= places[:, None]
        self._layer, self._last = layer_pass, head_pass
        self._ids, self._at = places.new_zeros(1, 1), places.new_zeros(1)
        self._graph: torch.cuda.CUDAGraph | None = None
        if weight.is_cuda:
            self._layer = torch.compile(layer_pass, fullgraph=True, dynamic=False, options=OPTIONS)
            self._last = torch.compile(head_pass, fullgraph=True, dynamic=False, options=OPTIONS)
            self._capture()

    def generate(self, prompt: list[int], new: int, end: int | None) -> list[int]:
        """Continues a prompt by `new` tokens at most, up to the token `end`."""
        ids = torch.tensor([prompt], device=self._ids.device)
        places = torch.arange(len(prompt), device=ids.device)
        self._ids.copy_(self._logits(ids, places, layer_pass, head_pass)[:, -1:].argmax(-1))
        self._at.fill_(len(prompt))
        text = torch.empty(new, dtype=torch.int64, device=ids.device)
        text[:1] = self._ids[0]
        for place in range(1, new):
            self._step() if self._graph is None else self._graph.replay()
            text[place : place + 1] = self._ids[0]
            if place % CHECKED == 0 and end in (known := text[: place + 1].tolist()):
                return known[: known.index(end) + 1]
        found = text.tolist()
        return found[: found.index(end) + 1] if end in found else found

    def _logits(self, ids: Tensor, positions: Tensor, layer: Any, last: Any) -> Tensor:
        place = (positions, *(table[positions] for table in self._tables))
        x = F.embedding(ids, self._embed)
        for weights, cache in zip(self._layers, self._caches, strict=True):
            x = layer(x, weights, cache, place, self._dim, self._eps)
        logits: Tensor = last(x, self._norm, self._head, self._eps)
        return logits

    def _step(self) -> None:
        """Feeds the last token, and leaves the next one and its position in its place."""
        self._ids.copy_(self._logits(self._ids, self._at, self._layer, self._last).argmax(-1))
        self._at.add_(1)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # where cuBLAS has its work area already
            self._step()
        self._graph = graph
