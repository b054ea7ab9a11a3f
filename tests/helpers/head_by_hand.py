"""A published EAGLE-3 head drafted from by hand: straight lines over its tensors, one row at a time, in float64.

Written from the formulas of the EAGLE-3 paper (arXiv 2503.01840) and the published layout; it shares no code with what
it checks. Llama variant, one layer, no norm flags.
"""

from __future__ import annotations

import cmath
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Seen = list[tuple[Tensor, Tensor]]
Seen = list[tuple[Tensor, Tensor]]


def drafts_by_hand(
    tensors: Tensors, config: dict[str, Any], embedding: Tensor, features: Tensor, tokens: list[int], places: int
) -> list[int]:
    """Drafts greedily after known tokens.

    Args:
        tensors: The file's, by their published names.
        config: The folder's config.json.
        embedding: The target's, [vocabulary, hidden].
        features: The target's hidden states of the positions 0 .. n - 2, [n - 1, boundaries * hidden].
        tokens: The n known ones; the target has not read the last yet.
        places: How many to draft.
    """
    rows = laws_by_hand(tensors, config, embedding, features, tokens, places)
    return [row.argmax().item() for row in rows]  # type: ignore[misc]


def laws_by_hand(
    tensors: Tensors,
    config: dict[str, Any],
    embedding: Tensor,
    features: Tensor,
    tokens: list[int],
    places: int,
    fed: list[int] | None = None,
) -> list[Tensor]:
    """Logits [vocabulary] of each drafted token, -inf where it cannot be drafted. As `drafts_by_hand`, but the chain
    goes on with `fed` tokens if given, else with its own most likely ones."""
    t = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    table, known, found = embedding.double(), list(tokens), []
    seen: Seen = []
    feature = None
    for position in range(len(tokens) - 1 + places - 1):
        if position < len(tokens) - 1:
            feature = t["fc.weight"] @ features[position].double()
        assert feature is not None
        feature = _layer(t, config, table[known[position + 1]], feature, position, seen)
        if position >= len(tokens) - 2:
            said = t["lm_head.weight"] @ _norm(feature, t["norm.weight"], config)
            whole = torch.full((config["vocab_size"],), -torch.inf, dtype=torch.float64)
            for draft_id, logit in enumerate(said.tolist()):
                whole[draft_id + int(t["d2t"][draft_id])] = logit
            found.append(whole)
            known.append(int(whole.argmax()) if fed is None else fed[len(found) - 1])
    return found


def _layer(
    t: Tensors,
    config: dict[str, Any],
    embedded: Tensor,
    feature: Tensor,
    position: int,
    seen: Seen,
) -> Tensor:
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    e = _norm(embedded, t["midlayer.input_layernorm.weight"], config)
    h = _norm(feature, t["midlayer.hidden_norm.weight"], config)
    x = torch.cat((e, h))
    query = _turn((t["midlayer.self_attn.q_proj.weight"] @ x).view(heads, dim), position, config["rope_theta"])
    key = _turn((t["midlayer.self_attn.k_proj.weight"] @ x).view(kv_heads, dim), position, config["rope_theta"])
    seen.append((key, (t["midlayer.self_attn.v_proj.weight"] @ x).view(kv_heads, dim)))
    mixed = []
    for head in range(heads):
        of = head // (heads // kv_heads)
        scores = torch.stack([query[head] @ keys[of] for keys, _ in seen]) / dim**0.5
        mixed.append(sum(share * values[of] for share, (_, values) in zip(scores.softmax(0), seen, strict=True)))
    x = feature + t["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
    inner = _norm(x, t["midlayer.post_attention_layernorm.weight"], config)
    gate = t["midlayer.mlp.gate_proj.weight"] @ inner
    return x + t["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (t["midlayer.mlp.up_proj.weight"] @ inner))


def _norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return weight * x / (x.square().mean() + config["rms_norm_eps"]) ** 0.5


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotates pairs (i, i + dim / 2) of each head [heads, dim]."""
    half = x.shape[1] // 2
    turned = torch.empty_like(x)
    for i in range(half):
        by = cmath.exp(1j * position * theta ** (-i / half))
        turned[:, i] = x[:, i] * by.real - x[:, i + half] * by.imag
        turned[:, i + half] = x[:, i + half] * by.real + x[:, i] * by.imag
    return turned
