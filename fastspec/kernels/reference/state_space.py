"""Torch definitions of Mamba-1, Mamba-2 and the gated short convolution, with the ring buffers of recurrent.py.

Batch invariance. Everything is computed token by token, and a sum over an axis is a binary tree (`sum_last`). A token's
bits depend only on its row and the tokens before it, in decoding and in prefill.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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
from fastspec.shapes import ConvRule, MambaRule, SelectiveRule

_BLOCK = 8  # number of tokens whose states are in memory at a time, to be multiplied by C together


class StateParts(Protocol):
    """Weights of a recurrent layer; `models.layer_table.StateWeights` has their shapes."""

    @property
    def conv(self) -> Tensor:
        """Weights of the causal convolution."""

    @property
    def conv_bias(self) -> Tensor | None:
        """Bias of the convolution. None: no bias."""

    @property
    def decay(self) -> Tensor | None:
        """Logarithm of the decay rate (A_log) of each head; of each element of the state in Mamba-1."""

    @property
    def step(self) -> Tensor | None:
        """Bias of the step size (dt_bias) of each head; of each channel in Mamba-1."""

    @property
    def skip(self) -> Tensor | None:
        """Factor of x in the result (D), for each head; for each channel in Mamba-1."""


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
    """Computes a gated short convolution (LFM2), c * conv(b * x), for the new tokens of each row.

    conv is `recurrent.convolve`.

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
    given = mamba_inputs(product, layer, inputs, state_rows, positions, write_mask, rule, kept)
    served, where = rule.heads // rule.groups, (states, state_rows, positions, write_mask)
    b, c = (each.repeat_interleave(served, dim=2) for each in (given.b, given.c))
    outs = _scanned(given.x, b, c, given.step[..., None, None], given.rate[:, None, None], given.skip, *where, kept)
    return outs.flatten(2).to(product.dtype)


class MambaInputs(NamedTuple):
    """Inputs of the scan of `mamba`, in fp32, with the letters of its formulas.

    Attributes:
        x: [B, Q, heads, head_dim].
        b, c: [B, Q, groups, state_dim].
        step: t, [B, Q, heads].
        rate: exp(decay), [heads].
        skip: [heads, 1].
    """

    x: Tensor
    b: Tensor
    c: Tensor
    step: Tensor
    rate: Tensor
    skip: Tensor


def mamba_inputs(
    product: Tensor,
    layer: StateParts,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: MambaRule,
    kept: KeptState | None,
) -> MambaInputs:
    """Computes the parts of `mamba` before its scan: convolution and time steps. For the arguments see there.

    The inputs of the convolution are stored in `inputs` and `kept`.
    """
    decay, more, skip = _scan_weights(layer)
    given = product[..., rule.values : rule.values + rule.channels]
    mixed = silu(convolve(given, layer.conv, layer.conv_bias, inputs, state_rows, positions, write_mask)).float()
    if kept is not None:
        keep_inputs(given[0], kept, positions[0], write_mask[0])
    x, b, c = mixed.split([rule.values, rule.shared, rule.shared], dim=-1)
    step = softplus(product[..., -rule.heads :].float() + more).clamp(rule.least_step, rule.most_step)
    b, c = (each.unflatten(-1, (rule.groups, -1)) for each in (b, c))
    return MambaInputs(x.unflatten(-1, (rule.heads, -1)), b, c, step, torch.exp(decay), skip[:, None])


def selective_conv(
    product: Tensor,
    layer: StateParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: SelectiveRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Computes silu(conv(x)), the first part of Mamba-1, over the newest `width` positions, for each channel.

    Args:
        product: [B, Q, rule.rows], result of the layer's input projection: x and z. z, the gate, is not read.
        layer: weights; conv and conv_bias are read.
        states: not read.
        inputs, state_rows, positions, write_mask, kept: see `delta_rule`. `inputs` has values of x. The state of `kept`
            is not written.
        rule: sizes of the layer.

    Returns:
        [B, Q, channels] in product's dtype.
    """
    given = product[..., : rule.channels]
    mixed = silu(convolve(given, layer.conv, layer.conv_bias, inputs, state_rows, positions, write_mask))
    if kept is not None:
        keep_inputs(given[0], kept, positions[0], write_mask[0])
    return mixed


def selective_scan(
    mixed: Tensor,
    steps: Tensor,
    layer: StateParts,
    states: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: SelectiveRule,
    kept: KeptState | None = None,
) -> Tensor:
    """Applies Mamba-1 (arXiv 2312.00752, algorithm 2) to the new tokens of each row, one after the other.

        t = softplus(t + step)                               for each channel
        S = exp(-exp(decay) t) S + (t x) B^T
        out = S C + skip x

    Args:
        mixed: [B, Q, channels + 2 * state_dim]: x (the result of `selective_conv`), B and C.
        steps: [B, Q, channels]: t, before softplus.
        layer: weights; decay, step and skip are read.
        states: fp32 [rows, slots, channels, state_dim], a ring buffer as in `delta_rule`.
        state_rows, positions, write_mask: see `delta_rule`.
        rule: sizes of the layer.
        kept: see `delta_rule`; only its state is written.

    Returns:
        [B, Q, channels] in mixed's dtype. States and sums are in fp32.
    """
    decay, more, skip = _scan_weights(layer)
    x, b, c = mixed.float()[:, :, None].split([rule.channels, rule.state_dim, rule.state_dim], dim=-1)
    step = softplus(steps.float() + more)[:, :, None, :, None]
    where = states[:, :, None], state_rows, positions, write_mask
    inner = None if kept is None else kept._replace(state=kept.state[None])
    outs = _scanned(x, b, c, step, torch.exp(decay), skip, *where, inner)
    return outs.flatten(2).to(mixed.dtype)


def _scan_weights(layer: StateParts) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (decay, step, skip) of a layer with Mamba-1 or Mamba-2."""
    assert layer.decay is not None, "Mamba has these weights"
    assert layer.step is not None, "Mamba has these weights"
    assert layer.skip is not None, "Mamba has these weights"
    return layer.decay, layer.step, layer.skip


def _scanned(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    states: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    kept: KeptState | None,
) -> Tensor:
    """Computes S = e^(-rate step) S + (step x) B^T and out = S C + skip x, token by token.

    Returns `out`, fp32 [B, Q, heads, head_dim]. States S are stored in `states` and `kept`.

    Args:
        x: fp32 [B, Q, heads, head_dim].
        b, c: fp32 [B, Q, heads, state_dim].
        step: fp32 [B, Q, heads, head_dim or 1, 1].
        rate: fp32, as a state or with axes of one element.
        skip: fp32, as x or with axes of one element.
        states: fp32 [rows, slots, heads, head_dim, state_dim].
        state_rows, positions, write_mask: see `delta_rule`.
        kept: see `delta_rule`; only its state is written.
    """
    count, slots = x.shape[1], states.shape[1]
    first = positions.gather(1, write_mask.to(torch.int64).argmax(dim=1, keepdim=True))[:, 0]
    state = states[state_rows, (first - 1) % slots]
    state = torch.where((first > 0)[:, None, None, None], state, torch.zeros_like(state))
    outs = []
    for at in range(0, count, _BLOCK):
        here = slice(at, min(at + _BLOCK, count))
        added = (step[:, here, ..., 0] * x[:, here])[..., None] * b[:, here, :, None]
        news = []
        for t in range(here.start, here.stop):
            new = state * torch.exp(-rate * step[:, t]) + added[:, t - at]
            news.append(new)
            state = torch.where(write_mask[:, t, None, None, None], new, state)
            if count <= slots:
                store(states, state_rows, positions[:, t] % slots, state, write_mask[:, t])
            if kept is not None:
                reached = write_mask[0, t] & (positions[0, t] + 1 == kept.at)
                kept.state.copy_(torch.where(reached[:, None, None], state[0], kept.state))
        outs.append(sum_last(torch.stack(news, dim=1) * c[:, here, :, None]) + skip * x[:, here])
    if count > slots:
        newest = torch.where(write_mask, positions, 0).amax(dim=1)
        store(states, state_rows, newest % slots, state, write_mask.any(dim=1))
    return torch.cat(outs, dim=1)


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, rule: MambaRule | SelectiveRule) -> Tensor:
    """Applies the gate, and an RMSNorm over each group of heads, to the result of `mamba` or `selective_scan`.

        rule.norm is "gate_first": norm(x * silu(gate));   "norm_first": norm(x) * silu(gate);   None: x * silu(gate)

    Mamba-1 has no norm.

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
    if weight is None or isinstance(rule, SelectiveRule):
        return (wide * opened).to(x.dtype)
    if rule.norm == "gate_first":
        wide = wide * opened
    groups = wide.unflatten(-1, (rule.groups, -1))
    mean = sum_last(groups * groups)[..., None] / groups.shape[-1]
    normed = (groups * torch.rsqrt(mean + eps)).flatten(-2) * weight.float()
    out: Tensor = normed if rule.norm == "gate_first" else normed * opened
    return out.to(x.dtype)
