"""Torch definitions of Mamba-2 and of the gated short convolution, with state buffers as in `reference.recurrent`.

Batch invariance: everything is computed token by token, and sums are pairwise. A token's bits depend only on its row
and the tokens before it, in decoding and in prefill.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastspec.kernels.reference.recurrent import (
    KeptState,
    convolve,
    keep_inputs,
    silu,
    softplus,
    store,
    sum_last,
)
from fastspec.shapes import ConvRule, MambaRule

_BLOCK = 8  # number of tokens whose states are in memory at a time, for the products with C


class StateParts(Protocol):
    """Weights of a recurrent layer; `models.layer_table.StateWeights` has their shapes."""

    @property
    def conv(self) -> Tensor:
        """Weights of the causal convolution."""

    @property
    def conv_bias(self) -> Tensor | None:
        """Bias of the convolution."""

    @property
    def decay(self) -> Tensor | None:
        """Logarithm of the decay rate of each head (A_log)."""

    @property
    def step(self) -> Tensor | None:
        """Bias of the step size of each head (dt_bias)."""

    @property
    def skip(self) -> Tensor | None:
        """Factor of x in the result of each head (D)."""


def short_conv(
    product: Tensor,
    layer: StateParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: ConvRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Computes a gated short convolution (LFM2): c * conv(b * x). conv is `recurrent.convolve`.

    Args:
        product: [B, Q, rule.rows], result of the layer's input projection: b, c and x.
        layer: weights; conv and conv_bias are read.
        states: not read. The layer's only state is the ring buffer `inputs`, with values of b * x.
        inputs, state_rows, positions, write_mask, kept: see `delta_rule`.
        rule: sizes of the layer.

    Returns:
        [B, Q, channels] in product's dtype. b * x and the convolution are rounded to it.
    """
    b, c, x = product.chunk(3, dim=-1)
    x = b * x
    out = c * convolve(x, layer.conv, layer.conv_bias, inputs, state_rows, positions, write_mask)
    if kept is not None:
        keep_inputs(x[0], kept, positions[0], write_mask[0])
    return out


def mamba(
    product: Tensor,
    layer: StateParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: MambaRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Applies Mamba-2 (arXiv 2405.21060, section 6) to the new tokens of each row, one after the other.

        x, B, C = silu(conv(x, B, C))                        over the newest `width` positions, for each channel
        t = clamp(softplus(t + step), least_step, most_step) for each head
        S = exp(-exp(decay) t) S + (t x) B^T                 for each head, with B and C of its group
        out = S C + skip x

    Args:
        product: [B, Q, rule.rows], result of the layer's input projection: z, x, B, C and t. z, the gate, is not read;
            see `mamba_norm`.
        layer: weights; the norm is not read.
        states: fp32 [rows, slots, heads, head_dim, state_dim], a ring buffer as in `delta_rule`.
        inputs, state_rows, positions, write_mask, kept: see `delta_rule`. `inputs` has values of x, B and C.
        rule: sizes of the layer.

    Returns:
        [B, Q, rule.values] in product's dtype. States and sums are in fp32.
    """
    assert layer.decay is not None, "Mamba-2 has these weights"
    assert layer.step is not None, "Mamba-2 has these weights"
    assert layer.skip is not None, "Mamba-2 has these weights"
    count, slots = product.shape[1], states.shape[1]
    given = product[..., rule.values : rule.values + rule.channels]
    mixed = silu(convolve(given, layer.conv, layer.conv_bias, inputs, state_rows, positions, write_mask)).float()
    x, b, c = mixed.split([rule.values, rule.shared, rule.shared], dim=-1)
    served = rule.heads // rule.groups
    x = x.unflatten(-1, (rule.heads, -1))
    b, c = (each.unflatten(-1, (rule.groups, -1)).repeat_interleave(served, dim=2) for each in (b, c))
    step = softplus(product[..., -rule.heads :].float() + layer.step).clamp(rule.least_step, rule.most_step)
    decay = torch.exp(-torch.exp(layer.decay) * step)
    first = positions.gather(1, write_mask.to(torch.int64).argmax(dim=1, keepdim=True))[:, 0]
    state = states[state_rows, (first - 1) % slots]
    state = torch.where((first > 0)[:, None, None, None], state, torch.zeros_like(state))
    outs = []
    for at in range(0, count, _BLOCK):
        here = slice(at, min(at + _BLOCK, count))
        added = (step[:, here, :, None] * x[:, here])[..., None] * b[:, here, :, None]
        news = []
        for t in range(here.start, here.stop):
            new = state * decay[:, t, :, None, None] + added[:, t - at]
            news.append(new)
            state = torch.where(write_mask[:, t, None, None, None], new, state)
            if count <= slots:
                store(states, state_rows, positions[:, t] % slots, state, write_mask[:, t])
            if kept is not None:
                reached = write_mask[0, t] & (positions[0, t] + 1 == kept.at)
                kept.state.copy_(torch.where(reached[:, None, None], state[0], kept.state))
        outs.append(sum_last(torch.stack(news, dim=1) * c[:, here, :, None]) + layer.skip[:, None] * x[:, here])
    if count > slots:
        newest = torch.where(write_mask, positions, 0).amax(dim=1)
        store(states, state_rows, newest % slots, state, write_mask.any(dim=1))
    if kept is not None:
        keep_inputs(given[0], kept, positions[0], write_mask[0])
    return torch.cat(outs, dim=1).flatten(2).to(product.dtype)


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, rule: MambaRule) -> Tensor:
    """Applies the gate, and an RMSNorm over the elements of each group of heads, to the result of `mamba`.

        rule.norm is "gate_first": norm(x * silu(gate));   "norm_first": norm(x) * silu(gate);   None: x * silu(gate)

    Args:
        x, gate: [B, Q, rule.values], of one dtype.
        weight: [rule.values], of that dtype. None if there is no norm.
        eps: epsilon of the norm.
        rule: sizes of the layer, and the order of norm and gate.

    Returns:
        Shape and dtype of x. Computed in fp32, rounded once.
    """
    wide_gate = gate.float()
    wide, opened = x.float(), wide_gate / (1 + torch.exp(-wide_gate))
    if weight is None:
        return (wide * opened).to(x.dtype)
    if rule.norm == "gate_first":
        wide = wide * opened
    groups = wide.unflatten(-1, (rule.groups, -1))
    mean = sum_last(groups * groups)[..., None] / groups.shape[-1]
    normed = (groups * torch.rsqrt(mean + eps)).flatten(-2) * weight.float()
    out: Tensor = normed if rule.norm == "gate_first" else normed * opened
    return out.to(x.dtype)
