"""Torch definition of a recurrent layer: a causal convolution, the gated delta rule, a gated norm.

Row invariance: everything is computed token by token, and sums are pairwise by halves, so a token's bits depend only on
its row and the tokens before it. Sigmoid, silu and softplus are written with exp, whose bits on a CPU do not depend on
where in a tensor an element lies.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.shapes import DeltaRule

L2_EPS = 1e-6  # in the norms of queries and keys; configs have no field for it, transformers has this constant


class DeltaParts(Protocol):
    """Weights of a recurrent layer, as `models.layer_table.DeltaWeights` describes them."""

    @property
    def conv(self) -> Tensor:
        """Taps of the convolution."""

    @property
    def decay(self) -> Tensor:
        """Logarithm of the decay of each value head."""

    @property
    def step(self) -> Tensor:
        """Bias of the step of each value head."""

    @property
    def norm(self) -> Tensor:
        """Weight of the gated norm."""


class KeptState(NamedTuple):
    """Where a pass over a prompt leaves the state after one of its tokens, for prompts that begin with the same ones.

    Attributes:
        at: int64 [1], positions before that state; a multiple of DELTA_CHUNK. 0, or one that the pass does not come to:
            nothing is written.
        state: fp32 [value_heads, value_dim, key_dim].
        inputs: [width, channels], the input of position p at place p % width.
    """

    at: Tensor
    state: Tensor
    inputs: Tensor


def delta_rule(
    product: Tensor,
    layer: DeltaParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: DeltaRule,
    kept: KeptState | None = None,
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464, equation 10) over the new tokens of each row, one after the other.

        q, k, v = silu(conv(q, k, v))                    over the newest `width` positions, each channel by itself
        q = q / |q| / sqrt(key_dim), k = k / |k|         of each head
        S = exp(-exp(decay) softplus(a + step)) S        of each value head
        S = S + sigmoid(b) (v - S k) k^T
        out = S q

    Masked tokens change nothing; the unmasked ones of a row are consecutive. A row starts from the state after the
    position before its first unmasked token; before position 0 the state is zero.

    Args:
        product: [B, Q, rule.rows]: q, k, v, z, b and a.
        layer: its weights.
        states: fp32 [rows, slots, value_heads, value_dim, key_dim], a ring buffer: the state after position p is
            written to slot p % slots. With Q > slots only the state after a row's last token is written.
        inputs: [rows, places, channels] with places = slots + width - 1, a ring buffer: the input of position p is
            written to place p % places, so those of the last tokens stay.
        state_rows: int64 [B], the row of `states` and `inputs` that each row of the batch has, all different.
        positions: int64 [B, Q].
        write_mask: bool [B, Q], False for masked tokens.
        rule: sizes.
        kept: with B = 1 and Q > slots, the state after one of the tokens is written there as well.

    Returns:
        [B, Q, rule.values] in product's dtype; states and sums are in fp32.
    """
    counts, slots = write_mask, states.shape[1]
    mixed = causal_conv(product[..., : rule.channels], layer.conv, inputs, state_rows, positions, write_mask)
    q, k, v = (
        part.unflatten(-1, (heads, -1)).float()
        for part, heads in zip(
            mixed.split([rule.keys, rule.keys, rule.values], dim=-1),
            (rule.key_heads, rule.key_heads, rule.value_heads),
            strict=True,
        )
    )
    served = rule.value_heads // rule.key_heads
    q = (_unit(q) * rule.key_dim**-0.5).repeat_interleave(served, dim=2)
    k = _unit(k).repeat_interleave(served, dim=2)
    b, a = product[..., -2 * rule.value_heads :].chunk(2, dim=-1)
    beta = sigmoid(b).float()
    decay = torch.exp(-torch.exp(layer.decay) * _softplus(a.float() + layer.step))

    first = positions.gather(1, counts.to(torch.int64).argmax(dim=1, keepdim=True))[:, 0]
    state = states[state_rows, (first - 1) % slots]
    state = torch.where((first > 0)[:, None, None, None], state, torch.zeros_like(state))
    outs = []
    for t in range(product.shape[1]):
        new = state * decay[:, t, :, None, None]
        delta = (v[:, t] - _sum(new * k[:, t, :, None])) * beta[:, t, :, None]
        new = new + delta[..., None] * k[:, t, :, None]
        outs.append(_sum(new * q[:, t, :, None]))
        state = torch.where(counts[:, t, None, None, None], new, state)
        if product.shape[1] <= slots:
            _store(states, state_rows, positions[:, t] % slots, state, counts[:, t])
        if kept is not None:
            here = counts[0, t] & (positions[0, t] + 1 == kept.at)
            kept.state.copy_(torch.where(here[:, None, None], state[0], kept.state))
    if product.shape[1] > slots:
        newest = torch.where(counts, positions, 0).amax(dim=1)
        _store(states, state_rows, newest % slots, state, counts.any(dim=1))
    if kept is not None:
        _keep_inputs(product[0, :, : rule.channels], kept, positions[0], counts[0])
    return torch.stack(outs, dim=1).flatten(2).to(product.dtype)


def _keep_inputs(x: Tensor, kept: KeptState, positions: Tensor, counts: Tensor) -> None:
    """Writes the inputs x [Q, channels] of the last positions before `kept.at`, if the pass comes to that."""
    reached = (counts & (positions + 1 == kept.at)).any()
    places = kept.inputs.shape[0]
    for place, line in enumerate(kept.inputs):
        here = (
            counts & (positions < kept.at) & (positions >= kept.at - places) & (positions % places == place) & reached
        )
        line.copy_(torch.where(here.any(), x[here.to(torch.int64).argmax()], line))


def causal_conv(
    x: Tensor, weight: Tensor, inputs: Tensor, state_rows: Tensor, positions: Tensor, write_mask: Tensor
) -> Tensor:
    """silu of a causal convolution of each channel, over the new tokens of each row and the positions before them.

        y_p = silu(sum over j < width of weight[j] x_(p - width + 1 + j)), x before position 0 being zero

    Args:
        x: [B, Q, channels].
        weight: [channels, 1, width].
        inputs, state_rows, positions, write_mask: as in `delta_rule`. x is written to `inputs`.

    Returns:
        [B, Q, channels] in x's dtype. The sum is in fp32, rounded before silu as well as after it.
    """
    places, width, count = inputs.shape[1], weight.shape[-1], x.shape[1]
    taps, at = weight[:, 0].float(), torch.arange(count, device=x.device)
    first = write_mask.to(torch.int64).argmax(dim=1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for back in range(width - 1, -1, -1):
        new = F.pad(x, (0, 0, back, 0))[:, :count]
        old = inputs[state_rows[:, None], (positions - back) % places]
        old = torch.where((positions >= back)[..., None], old, torch.zeros_like(old))
        here = at - back >= first[:, None]
        total = total + torch.where(here[..., None], new, old).float() * taps[:, width - 1 - back]
    for t in range(count):
        _store(inputs, state_rows, positions[:, t] % places, x[:, t], write_mask[:, t])
    rounded = total.to(x.dtype)
    return silu(rounded)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), over each head's elements.

    Args:
        x, gate: [B, Q, heads * D], of one dtype.
        weight: [D], of that dtype. The norm is rounded to it before the weight is multiplied, and so is that product.
        eps: of the norm.
    """
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    wide = heads.float()
    normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    wide_gate = gate.float()
    gated: Tensor = normed.flatten(-2).float() * (wide_gate / (1 + torch.exp(-wide_gate)))
    return gated.to(x.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), [B, Q, heads * D] of one dtype, to which the sigmoid is rounded first."""
    return x * sigmoid(gate)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed in fp32."""
    if x.is_cuda:
        return torch.sigmoid(x)
    wide: Tensor = 1 / (1 + torch.exp(-x.float()))
    return wide.to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), computed in fp32."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); of large x that is x."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis."""
    return x * torch.rsqrt(_sum(x * x)[..., None] + L2_EPS)


def _sum(x: Tensor) -> Tensor:
    """The sum over the last axis, by halves: in one order, whatever lies beside it."""
    while (count := x.shape[-1]) > 1:
        half = (count + 1) // 2
        upper = F.pad(x[..., half:], (0, 2 * half - count))
        x = x[..., :half] + upper
    return x[..., 0]


def _store(ring: Tensor, rows: Tensor, slots: Tensor, new: Tensor, when: Tensor) -> None:
    """ring[rows, slots] = new, where `when` [B] says so."""
    shape = (-1, *([1] * (new.dim() - 1)))
    ring[rows, slots] = torch.where(when.view(shape), new.to(ring.dtype), ring[rows, slots])
