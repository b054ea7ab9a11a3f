"""The forward of a DFlash head, written from its formulas in straight lines of torch (arXiv 2602.06036).

c_i = rms(fc [f_i of all boundaries], hidden_norm)               one row for each accepted token
x_0 = embed(last token), x_j = embed(mask)                       the block, at the positions behind the context
k, v of every layer: of c_i for the context, of rms(x, input_layernorm) for the block
x = x + o(attention(q, k, v)), x = x + mlp(rms(x, post_attention_layernorm))
logits_j = head(rms(x_j, norm))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.helpers.dflash import Head

EPS = 1e-6
THETA = 1e6


@dataclass(frozen=True)
class Rules:
    """What the flags of a config come to.

    Attributes:
        windows: of each layer; None: all keys.
        causal: of each layer, whether a row of the block sees only the rows before it and itself.
        anchored: a layer with a window that is not causal sees the context from `anchor - window` on; else the
            window's newest key is the block's first row.
    """

    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    anchored: bool = False
    embed_scale: float = 1.0
    value_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float | None = None


def full(head: Head) -> Rules:
    """Every row sees everything, in every layer."""
    return Rules((None,) * head.layers, (False,) * head.layers)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, D] at positions [n]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * THETA ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def logits(
    head: Head,
    rules: Rules,
    tensors: dict[str, Tensor],
    features: Tensor,
    block: Tensor,
    lm_head: Tensor,
) -> Tensor:
    """Logits [n, ids of the head] of every row of a block.

    Args:
        features: [context, boundaries, hidden] of the tokens at positions 0, 1, ...
        block: [n, hidden], embeddings of the last token and of the masks, at the positions behind the context.
        lm_head: [ids, hidden], the head's own or the target's.
    """
    length, n = len(features), len(block)
    context = rms(features.flatten(1) @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    at_context, at_block = torch.arange(length), length + torch.arange(n)
    at = torch.cat([at_context, at_block])
    x = block * rules.embed_scale
    for layer in range(head.layers):
        weights = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{layer}.")
        }

        def product(name: str, y: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            return y @ weights[f"self_attn.{name}.weight"].T + weights.get(f"self_attn.{name}.bias", 0)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, head.dim))

        h = rms(x, weights["input_layernorm.weight"])
        both = torch.cat([context, h])
        q = rotated(rms(heads(product("q_proj", h)), weights["self_attn.q_norm.weight"]), at_block)
        k = rotated(rms(heads(product("k_proj", both)), weights["self_attn.k_norm.weight"]), at)
        v = heads(product("v_proj", both)) * rules.value_scale
        k, v = (each.repeat_interleave(head.heads // head.kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head.dim**0.5
        scores = scores.masked_fill(~_seen(rules, layer, length, at_block, at), -torch.inf)
        if head.sinks:
            sink = weights["self_attn.attention_sink_bias"][:, None, None].expand(-1, n, 1)
            probs = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            probs = scores.softmax(-1)
        x = x + product("o_proj", torch.einsum("hqk,khd->qhd", probs, v).flatten(1))
        h = rms(x, weights["post_attention_layernorm.weight"])
        gate, up = h @ weights["mlp.gate_proj.weight"].T, h @ weights["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights["mlp.down_proj.weight"].T
    out = rms(x, tensors["norm.weight"]) @ lm_head.T * rules.logits_scale
    return out if rules.softcap is None else torch.tanh(out / rules.softcap) * rules.softcap


def _seen(rules: Rules, layer: int, length: int, rows: Tensor, keys: Tensor) -> Tensor:
    """bool [rows, keys]: whether a row of the block sees a key."""
    row, key = rows[:, None], keys[None, :]
    window, causal = rules.windows[layer], rules.causal[layer]
    seen = (key <= row) if causal else torch.ones(len(rows), len(keys), dtype=torch.bool)
    if window is None:
        return seen
    if causal:
        return seen & (key > row - window)
    return seen & ((key >= length - window) if rules.anchored else (key > length - window))


def target_ids(tensors: dict[str, Tensor], drafts: Tensor) -> Tensor:
    """Ids of the target for ids of the head."""
    return drafts + tensors["d2t"][drafts] if "d2t" in tensors else drafts


SLIDES = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
# layout, changes of a head, and what they come to in its rules
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "whole vocabulary": ("z-lab", {}, {}),
    "reduced vocabulary": ("speculators", {"draft_vocab": 6}, {}),
    "an embedding of its own": ("speculators", {"own_embedding": True}, {}),
    "a window": ("z-lab", SLIDES, {"windows": (9, None), "causal": (True, False)}),
    "a window, and no causality": (
        "speculators",
        SLIDES | {"more": {"sliding_window_non_causal": True}},
        {"windows": (9, None), "anchored": True},
    ),
    "windows everywhere": (
        "z-lab",
        {"more": {"use_swa": True, "swa_window_size": 9}},
        {"windows": (9, 9)},
    ),
    "causal": ("z-lab", {"more": {"causal": True}}, {"causal": (True, True)}),
    "from the anchor": ("z-lab", {"more": {"sample_from_anchor": True}}, {}),
    "sinks and scales": (
        "z-lab",
        {
            "sinks": True,
            "bias": True,
            "more": {
                "attention_sink_bias": True,
                "attention_value_scale": 0.5,
                "input_embedding_scale": 2.0,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 2.0,
            },
        },
        {"value_scale": 0.5, "embed_scale": 2.0, "logits_scale": 0.5, "softcap": 2.0},
    ),
}
