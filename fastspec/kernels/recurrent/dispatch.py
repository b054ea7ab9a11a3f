"""Chooses the kernels of the gated delta rule, and checks their arguments.

| argument              | shape, dtype                                       | notes                                 |
|-----------------------|----------------------------------------------------|---------------------------------------|
| product               | [B, Q, rule.rows] bf16, fp16 or fp32               | contiguous                            |
| conv                  | [channels, 1, width], product's dtype              | contiguous                            |
| decay                 | fp32 [value_heads]                                 | contiguous                            |
| step                  | fp32 [rule.decays]                                 | contiguous                            |
| states                | fp32 [rows, slots, value_heads, value_dim, key_dim]| contiguous; written                   |
| inputs                | [rows, slots + width - 1, channels], product's     | contiguous; written                   |
| state_rows            | int64 [B]                                          | contiguous, all different             |
| positions, write_mask | int64 and bool [B, Q]                              | contiguous                            |

`reference.delta_rule` says what the arguments mean. `rows` sequences have a place for their states, and each has
`slots` states: as many as a decode step has tokens of one sequence. Decode steps use the kernel of delta.py. Passes
with more tokens of a sequence are prefill chunks, and use the kernels of prompt.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.recurrent.delta import step_rule
from fastspec.kernels.recurrent.parts import StateSlots, Weights
from fastspec.kernels.recurrent.prompt import prompt_rule
from fastspec.kernels.reference.recurrent import DeltaParts, KeptState
from fastspec.shapes import DeltaRule

MAX_KEY_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    """Applies the gated delta rule to the new tokens of each row, as `Ops.delta_rule` and `reference.delta_rule`.

    The output of masked tokens is zero. For the arguments see the table above, and `reference.delta_rule`.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    _check(product, layer, states, inputs, state_rows, positions, write_mask, rule)
    _check_kept(kept, product, states, rule)
    batch, tokens = positions.shape
    out = product.new_empty(batch, tokens, rule.values)
    weights = Weights(layer.conv, layer.decay, layer.step)
    slots = StateSlots(states, inputs, state_rows, positions, write_mask)
    if tokens <= states.shape[1]:
        step_rule(product, weights, slots, out, rule)
    else:
        prompt_rule(product, weights, slots, out, rule, kept)
    return out


def _check_kept(kept: KeptState | None, product: Tensor, states: Tensor, rule: DeltaRule) -> None:
    if kept is None:
        return
    if product.shape[0] != 1 or product.shape[1] <= states.shape[1]:
        raise ValueError(
            f"a state is kept of a pass over a prompt, one row of more than {states.shape[1]} tokens; product is "
            f"{told(product)}"
        )
    check("kept.at", kept.at, (1,), torch.int64)
    check("kept.state", kept.state, (rule.value_heads, rule.value_dim, rule.key_dim), torch.float32)
    check("kept.inputs", kept.inputs, (rule.width, rule.channels), product.dtype)


def _check(
    product: Tensor,
    layer: DeltaParts,
    states: Tensor,
    inputs: Tensor,
    state_rows: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    rule: DeltaRule,
) -> None:
    if product.dim() != 3 or product.dtype not in _DTYPES or rule.key_dim > MAX_KEY_DIM:
        raise ValueError(
            f"product is {told(product)} with keys of {rule.key_dim}; wanted bf16, fp16 or fp32 [B, Q, {rule.rows}], "
            f"and keys of up to {MAX_KEY_DIM} elements"
        )
    (batch, tokens, _), dtype = product.shape, product.dtype
    rows, slots = states.shape[:2]
    check("product", product, (batch, tokens, rule.rows))
    check("conv", layer.conv, (rule.channels, 1, rule.width), dtype)
    check("decay", layer.decay, (rule.value_heads,), torch.float32)
    check("step", layer.step, (rule.decays,), torch.float32)
    check("states", states, (rows, slots, rule.value_heads, rule.value_dim, rule.key_dim), torch.float32)
    check("inputs", inputs, (rows, slots + rule.tail, rule.channels), dtype)
    check("state_rows", state_rows, (batch,), torch.int64)
    check("positions", positions, (batch, tokens), torch.int64)
    check("write_mask", write_mask, (batch, tokens), torch.bool)
