"""Mamba-2 on the CPU: decode steps token by token, prompts in chunks of positions by matrix products.

The formulas of a chunk are those of Mamba-2 (arXiv 2405.21060, section 6). S is the state before a chunk. Token t has
x_t, B_t, C_t and the time step d_t, and a_t = -rate d_t is the logarithm of its decay. For i <= t:

    g_ti  = sum of a_j over i < j <= t;   g_t = sum of a_j over j <= t
    out_t = e^g_t S C_t + sum over i <= t of (C_t . B_i) e^g_ti d_i x_i + skip x_t
    S'    = e^g_last S + sum over i of e^g_last,i d_i x_i B_i^T

Chunks begin at multiples of DELTA_CHUNK, and all products have the shapes of a whole chunk. A token that is missing or
masked has step 0, so it changes nothing. If each pass begins at the start of a chunk, a token's bits do not depend on
how a prompt is cut into passes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.reference.recurrent import KeptState, store
from fastspec.kernels.reference.state_space import MambaInputs, StateParts, mamba_inputs
from fastspec.shapes import DELTA_CHUNK, MambaRule


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
    """Applies Mamba-2 to the new tokens of each row, as `reference.mamba`. For the arguments see there.

    A pass with more tokens than `states` has slots is a part of a prompt, and is computed in chunks.
    """
    if product.shape[1] <= states.shape[1]:
        return reference.mamba(product, layer, states, inputs, state_rows, positions, write_mask, rule, kept)
    given = mamba_inputs(product, layer, inputs, state_rows, positions, write_mask, rule, kept)
    outs = torch.zeros_like(given.x)
    for row in range(len(product)):
        fed = write_mask[row].nonzero().flatten().tolist()
        if not fed:
            continue
        first, slots = int(positions[row, fed[0]]), states.shape[1]
        # a copy: a library may add up in another order where an operand is at another address
        before = states[int(state_rows[row]), (first - 1) % slots].clone() if first else torch.zeros_like(states[0, 0])
        state = _row(given, row, slice(fed[0], fed[-1] + 1), first, before, kept, outs[row])
        last = fed[-1:]
        store(states, state_rows[row : row + 1], positions[row, last] % slots, state[None], write_mask[row, last])
    return outs.flatten(2).to(product.dtype)


def _row(
    given: MambaInputs, row: int, tokens: slice, first: int, state: Tensor, kept: KeptState | None, out: Tensor
) -> Tensor:
    """Computes the tokens of one row, chunk after chunk. Returns the state after the last token.

    Args:
        given: inputs of all tokens.
        row: index of the row.
        tokens: range of the row's tokens that are not masked.
        first: position of the first of them.
        state: state before the first token.
        kept: receives the state after position `kept.at - 1`. None: no state is kept.
        out: output fp32 [Q, heads, head_dim], of which these tokens are written.
    """
    shift = first - tokens.start  # position of a token minus its index
    end = tokens.stop + shift
    for start in range(first // DELTA_CHUNK * DELTA_CHUNK, end, DELTA_CHUNK):
        here = slice(max(start, first) - shift, min(start + DELTA_CHUNK, end) - shift)
        out[here], state = _chunk(given, row, here, here.start + shift - start, state)
        if kept is not None and here.stop + shift == int(kept.at):
            kept.state.copy_(state)
    return state


def _chunk(given: MambaInputs, row: int, here: slice, before: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the tokens of one row in one chunk.

    Args:
        given: inputs of all tokens.
        row: index of the row.
        here: indices of the tokens.
        before: number of positions of the chunk before the first token.
        state: fp32 [heads, head_dim, state_dim], state before the first token.

    Returns:
        Result of the tokens, fp32 [tokens, heads, head_dim], and the state after the last one.
    """
    after = DELTA_CHUNK - before - (here.stop - here.start)
    x, b, c = (_padded(each[row, here], before, after) for each in given[:3])
    step = _padded(given.step[row, here, :, None], before, after)
    decay = -given.rate[:, None, None] * step  # a, [heads, C, 1]
    at = torch.arange(DELTA_CHUNK, device=x.device)
    since = torch.where(at[:, None] > at, decay, 0.0).cumsum(dim=1)  # g_ti at [t, i]
    fade = torch.where(at[:, None] >= at, torch.exp(since), 0.0)
    added = x * step
    left = added * torch.exp(since[:, -1, :, None])
    total = torch.exp(decay.cumsum(dim=1))  # e^g_t
    outs, states = [], []
    # products of one group at a time: their shapes do not depend on how many groups a rank has
    served = len(x) // len(b)  # heads of a group
    for group in range(len(b)):
        of_group = slice(group * served, (group + 1) * served)
        scores = c[group].mm(b[group].t()) * fade[of_group]
        old = state[of_group].flatten(0, 1).mm(c[group].t()).unflatten(0, (served, -1)).transpose(1, 2)
        outs.append(torch.bmm(scores, added[of_group]) + total[of_group] * old)
        new = left[of_group].transpose(1, 2).reshape(-1, DELTA_CHUNK).mm(b[group]).view_as(state[of_group])
        states.append(total[of_group, -1:] * state[of_group] + new)
    out = torch.cat(outs) + given.skip[:, None] * x
    return out.transpose(0, 1)[before : DELTA_CHUNK - after], torch.cat(states)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Converts x [tokens, heads, D] to [heads, DELTA_CHUNK, D], with zeros before and after the tokens."""
    return F.pad(x.transpose(0, 1), (0, 0, before, after)).contiguous()
