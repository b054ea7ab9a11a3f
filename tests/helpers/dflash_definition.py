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

from tests.helpers.dflash import GROUP, TAPS, Head, dflash2_fields

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
    """Logits [n, ids of the head] of every row of a block; for arguments see `hidden_rows`.

    Args:
        lm_head: [ids, hidden], the head's own or the target's.
    """
    out = hidden_rows(head, rules, tensors, features, block) @ lm_head.T * rules.logits_scale
    return out if rules.softcap is None else torch.tanh(out / rules.softcap) * rules.softcap


def after(tensors: dict[str, Tensor], row: Tensor, unary: Tensor, before: int, head: Head) -> Tensor:
    """Logits [ids of the head] of one draft of a DSpark or DFlash2 head behind the token before it.

    Args:
        row: [hidden], its row of `hidden_rows`.
        unary: [ids of the head], its row of `logits`.
    """
    if head.markov:
        w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
        return unary + w2 @ w1[before]
    if head.selector is None:
        return unary
    ids = unary.topk(head.selector[1]).indices
    projected = tensors["candidate_selector.hidden_projection.weight"] @ row
    context = tensors["candidate_selector.predecessor_codebook"][before] * projected
    named = target_ids(tensors, ids)
    scores = unary[ids] + tensors["candidate_selector.successor_codebook"][named] @ context
    return torch.full_like(unary, -torch.inf).index_copy(0, ids, scores)


def convolved(tensors: dict[str, Tensor], name: str, x: Tensor, kernels: Tensor, side: int) -> Tensor:
    """One convolution of a DFlash2 layer over the rows of a block, element by element of the definition."""
    base = tensors[f"{name}.base_kernel"][side]
    delta = (kernels @ tensors[f"{name}.kernel_projection.weight"].T).view(len(x), 2, TAPS, -1)[:, side]
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(TAPS, i + 1)):
            out[i] += (base[tap] + delta[i, tap].repeat_interleave(GROUP)) * x[i - tap]
    return out


def hidden_rows(head: Head, rules: Rules, tensors: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """What the output matrix reads, [n, hidden], of every row of a block.

    Args:
        features: [context, boundaries, hidden] of the tokens at positions 0, 1, ...
        block: [n, hidden], embeddings of the last token and of the masks, at the positions behind the context.
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

        convs = "attention_conv.base_kernel" in weights
        h = before = rms(x, weights["input_layernorm.weight"])
        h = convolved(weights, "attention_conv", h, before, 0) if convs else h
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
        made = product("o_proj", torch.einsum("hqk,khd->qhd", probs, v).flatten(1))
        x = x + (convolved(weights, "attention_conv", made, before, 1) if convs else made)
        h = before = rms(x, weights["post_attention_layernorm.weight"])
        h = convolved(weights, "mlp_conv", h, before, 0) if convs else h
        gate, up = h @ weights["mlp.gate_proj.weight"].T, h @ weights["mlp.up_proj.weight"].T
        made = (gate * torch.sigmoid(gate) * up) @ weights["mlp.down_proj.weight"].T
        x = x + (convolved(weights, "mlp_conv", made, before, 1) if convs else made)
    return rms(x, tensors["norm.weight"])


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

MARKOV = {"markov": 8, "block_size": 7}
SPARK = {"speculators_model_type": "dspark", "markov_rank": 8, "architectures": ["DSparkSpeculator"]}
TWO = {"selector": (8, 5)}
OF_TWO = dflash2_fields(Head(1, 1, **TWO))  # type: ignore[arg-type]
# the same of relatives of DFlash
RELATIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DSpark": ("deepspec", MARKOV, {}),
    "DSpark of speculators": (
        "speculators",
        MARKOV | {"draft_vocab": 6, "block_size": 8, "more": {"sample_from_anchor": False}, "top": SPARK},
        {},
    ),
    "DFlash2": (
        "z-lab",
        TWO
        | {
            "layer_types": ("sliding_attention",) * 2,
            "sliding_window": 9,
            "more": OF_TWO | {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
            "top": {"architectures": ["DFlash2DraftModel"], "is_causal": False},
        },
        {"windows": (9, 9), "logits_scale": 0.5, "softcap": 2.0},
    ),
    "DFlash2 of speculators": (
        "speculators",
        TWO | {"top": OF_TWO | {"speculators_model_type": "dflash2", "sliding_window_non_causal": True}},
        {},
    ),
}
