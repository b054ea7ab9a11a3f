"""Torch definition of a linear attention layer: a causal convolution, the gated delta rule, a gated norm.

Batch invariance. Everything is computed token by token, and a sum over an axis is a binary tree (`sum_last`). A token's
bits depend only on its row and the tokens before it. Sigmoid, silu and softplus are computed from exp, because on a CPU
the bits of torch.exp do not depend on an element's index in the tensor.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.shapes import DeltaRule

L2_EPS = 1e-6  # in the norms of queries and keys; configs have no field for it, transformers has this constant


class DeltaParts(Protocol):
    """Weights of a layer with the gated delta rule; `models.layer_table.StateWeights` has their shapes."""

    @property
    def conv(self) -> Tensor:
        """Weights of the causal convolution."""

    @property
    def decay(self) -> Tensor:
        """Logarithm of the decay rate of each value head (A_log)."""

    @property
    def step(self) -> Tensor:
        """Bias of the step size (dt_bias) of each value head, or of each element of each head's key if `by_channel`."""

    @property
    def norm(self) -> Tensor:
        """Weight of the gated norm."""


class KeptState(NamedTuple):
    """Output buffers for the recurrent state after one token of a prompt. Later prompts with this prefix start from it.

    Attributes:
        at: int64 [1], number of the prompt's tokens up to and including this token, a multiple of DELTA_CHUNK. Nothing
            is written if it is 0, or if the pass does not contain this token.
        state: fp32 [value_heads, value_dim, key_dim].
        inputs: [width, channels], inputs of the convolution at the last `width` positions. The input of position p is
            at index p % width.
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
    """Applies the gated delta rule (arXiv 2412.06464, equation 10) to the new tokens of each row, one after the other.

        q, k, v = silu(conv(q, k, v))                    over the newest `width` positions, for each channel
        q = q / |q| / sqrt(key_dim), k = k / |k|         for each head
        S = exp(-exp(decay) softplus(a + step)) S        for each value head; S is its state
            [`by_channel`: a factor for each column of S; `floor`: exp(floor sigmoid(exp(decay) (a + step))) S]
        S = S + sigmoid(b) (v - S k) k^T
        out = S q

    Masked tokens change no state. The unmasked tokens of a row are consecutive. A row starts from the state after the
    position before its first unmasked token. The state before position 0 is zero.

    Args:
        product: [B, Q, rule.rows], result of the layer's input projection: q, k, v, z, b and a.
        layer: weights.
        states: fp32 [rows, slots, value_heads, value_dim, key_dim], a ring buffer in each row. The state after position
            p is written to slot p % slots. With Q > slots only the state after a row's last unmasked token is written.
        inputs: [rows, places, channels] with places = slots + width - 1, a ring buffer of the convolution's inputs. The
            input of position p is written to index p % places.
        state_rows: int64 [B], the row of `states` and `inputs` for each row of the batch; all different.
        positions: int64 [B, Q], position of each token.
        write_mask: bool [B, Q], False for masked tokens.
        rule: sizes of the layer, and the form of its decay.
        kept: with B = 1 and Q > slots, receives the state after one of the tokens. None: no such state is stored.

    Returns:
        [B, Q, rule.values] in product's dtype. States and sums are in fp32.
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
    b, a = product[..., -rule.value_heads - rule.decays :].split([rule.value_heads, rule.decays], dim=-1)
    beta = sigmoid(b).float()
    decay = _decays(a, layer, rule)

    first = positions.gather(1, counts.to(torch.int64).argmax(dim=1, keepdim=True))[:, 0]
    state = states[state_rows, (first - 1) % slots]
    state = torch.where((first > 0)[:, None, None, None], state, torch.zeros_like(state))
    outs = []
    for t in range(product.shape[1]):
        new = state * decay[:, t]
        delta = (v[:, t] - sum_last(new * k[:, t, :, None])) * beta[:, t, :, None]
        new = new + delta[..., None] * k[:, t, :, None]
        outs.append(sum_last(new * q[:, t, :, None]))
        state = torch.where(counts[:, t, None, None, None], new, state)
        if product.shape[1] <= slots:
            store(states, state_rows, positions[:, t] % slots, state, counts[:, t])
        if kept is not None:
            here = counts[0, t] & (positions[0, t] + 1 == kept.at)
            kept.state.copy_(torch.where(here[:, None, None], state[0], kept.state))
    if product.shape[1] > slots:
        newest = torch.where(counts, positions, 0).amax(dim=1)
        store(states, state_rows, newest % slots, state, counts.any(dim=1))
    if kept is not None:
        keep_inputs(product[0, :, : rule.channels], kept, positions[0], counts[0])
    return torch.stack(outs, dim=1).flatten(2).to(product.dtype)


def _decays(a: Tensor, layer: DeltaParts, rule: DeltaRule) -> Tensor:
    """Returns the factors by which the states decay at each token, fp32 [B, Q, value_heads, 1, key_dim or 1].

    a: [B, Q, rule.decays], the last values of the layer's input projection.
    """
    opened = (a.float() + layer.step).unflatten(-1, (rule.value_heads, 1, -1))
    rate = torch.exp(layer.decay)[:, None, None]
    return torch.exp(rule.floor * sigmoid(rate * opened) if rule.floor else -rate * softplus(opened))


def keep_inputs(x: Tensor, kept: KeptState, positions: Tensor, counts: Tensor) -> None:
    """Writes the convolution's inputs at the last positions before `kept.at` to `kept.inputs`.

    Nothing is written if the unmasked tokens of the pass do not contain position kept.at - 1.

    Args:
        x: [Q, channels], inputs of the pass's tokens.
        kept: memory to write to.
        positions: int64 [Q], position of each token.
        counts: bool [Q], False for masked tokens.
    """
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
    """Computes silu of a causal convolution of each channel, at the new tokens of each row.

        y_p = silu(sum over j < width of weight[j] x_(p - width + 1 + j)), with x = 0 before position 0

    Args:
        x: [B, Q, channels], inputs of the new tokens.
        weight: [channels, 1, width].
        inputs, state_rows, positions, write_mask: see `delta_rule`. Inputs of older positions are read from the ring
            buffer `inputs`; x is then written to it.

    Returns:
        [B, Q, channels] in x's dtype. The sum is in fp32, and is rounded to x's dtype before silu.
    """
    return silu(convolve(x, weight, None, inputs, state_rows, positions, write_mask))


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
) -> Tensor:
    """Computes the causal convolution of `causal_conv` without silu: [B, Q, channels] in x's dtype.

    Args:
        x, weight, inputs, state_rows, positions, write_mask: see `causal_conv`.
        bias: [channels], added to the sum. None: no bias.
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
    _store_inputs(inputs, state_rows, x, positions, write_mask, first)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def _store_inputs(
    inputs: Tensor, state_rows: Tensor, x: Tensor, positions: Tensor, write_mask: Tensor, first: Tensor
) -> None:
    """Writes the newest inputs x [B, Q, channels] of each row to the ring buffer `inputs`.

    Args:
        inputs, state_rows, positions, write_mask: see `delta_rule`.
        x: inputs of the pass's tokens.
        first: int64 [B], index of each row's first unmasked token.
    """
    places = inputs.shape[1]
    start = positions.gather(1, first[:, None])
    end = start + write_mask.sum(dim=1, keepdim=True)
    newest = end - 1 - (end - 1 - torch.arange(places, device=x.device)) % places  # position of each place
    token = (first[:, None] + newest - start).clamp(min=0)
    new = x.gather(1, token[..., None].expand(-1, -1, x.shape[-1]))
    inputs[state_rows] = torch.where((newest >= start)[..., None], new, inputs[state_rows])


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Literal["silu", "sigmoid"] = "silu"
) -> Tensor:
    """Computes rms_norm(x) * activation(gate), with a norm over each head's elements.

    Args:
        x, gate: [B, Q, heads * D], of one dtype.
        weight: [D], of that dtype. With silu, x / sqrt(mean(x^2) + eps) is rounded to the dtype before it is multiplied
            by the weight, and so is the product of both. With sigmoid only the result is rounded.
        eps: epsilon of the norm.
        activation: function of the gate.

    Returns:
        Shape and dtype of x.
    """
    heads = x.unflatten(-1, (-1, weight.shape[0]))
    wide = heads.float()
    scaled, wide_gate = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), gate.float()
    if activation == "sigmoid":
        opened: Tensor = (weight.float() * scaled).flatten(-2) * sigmoid(wide_gate)
        return opened.to(x.dtype)
    normed = weight * scaled.to(x.dtype)
    gated: Tensor = normed.flatten(-2).float() * (wide_gate / (1 + torch.exp(-wide_gate)))
    return gated.to(x.dtype)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Computes x * sigmoid(gate), both [B, Q, heads * D] of one dtype. The sigmoid is first rounded to this dtype."""
    return x * sigmoid(gate)


def sigmoid(x: Tensor) -> Tensor:
    """Computes 1 / (1 + exp(-x)) in fp32. Returns shape and dtype of x."""
    if x.is_cuda:
        return torch.sigmoid(x)
    wide: Tensor = 1 / (1 + torch.exp(-x.float()))
    return wide.to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Computes x / (1 + exp(-x)) in fp32. Returns shape and dtype of x."""
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x)); for x > 20 the result is x."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def _unit(x: Tensor) -> Tensor:
    """Computes x / |x| over the last axis, with L2_EPS added to the squared length."""
    return x * torch.rsqrt(sum_last(x * x)[..., None] + L2_EPS)


def sum_last(x: Tensor) -> Tensor:
    """Sums over the last axis as a binary tree. The order of additions depends only on the length of that axis."""
    while (count := x.shape[-1]) > 1:
        half = (count + 1) // 2
        upper = x[..., half:] if 2 * half == count else F.pad(x[..., half:], (0, 1))
        x = x[..., :half] + upper
    return x[..., 0]


def store(ring: Tensor, rows: Tensor, slots: Tensor, new: Tensor, when: Tensor) -> None:
    """Sets ring[rows[b], slots[b]] = new[b] for every b for which when[b] is True. rows, slots and when are [B]."""
    shape = (-1, *([1] * (new.dim() - 1)))
    ring[rows, slots] = torch.where(when.view(shape), new.to(ring.dtype), ring[rows, slots])
