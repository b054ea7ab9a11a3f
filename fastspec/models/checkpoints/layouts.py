"""The order of stored rows in fused matrices: entry i is the stored row that becomes row i."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec
    from fastspec.models.families.plan import LayerPlan
    from fastspec.shapes import DeltaRule


def rotary_order(spec: ModelSpec, heads: int) -> list[int] | None:
    """The order of the rows of `heads` heads that rope needs; None: as they are stored."""
    if spec.head_order is None:
        return None
    return [head * spec.head_dim + at for head in range(heads) for at in spec.head_order]


def qkv_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """The order of the rows of q, k and v, which are stored one after the other; None: as they are stored.

    With an output gate the stored q rows are, head by head, query and gate; the fused matrix has all gates last.
    """
    dim, heads, kv_rows = spec.head_dim, spec.num_heads, spec.num_kv_heads * spec.head_dim
    in_head = spec.head_order or list(range(dim))
    if spec.head_order is None and not plan.output_gate:
        return None
    each = (2 if plan.output_gate else 1) * dim
    queries = [head * each + at for head in range(heads) for at in in_head]
    keys = [heads * each + head * dim + at for head in range(spec.num_kv_heads) for at in in_head]
    first = heads * each + kv_rows
    gates = [head * each + dim + at for head in range(heads) for at in range(dim)] if plan.output_gate else []
    return [*queries, *keys, *range(first, first + kv_rows), *gates]


def delta_order(rule: DeltaRule) -> list[int]:
    """The order q, k, v, z, b, a of the rows of a recurrent layer's projections that are stored grouped by key head."""
    served = rule.value_heads // rule.key_heads
    own = served * rule.value_dim
    each = 2 * rule.key_dim + 2 * own

    def of_heads(start: int, size: int) -> list[int]:
        """Rows start..start+size-1 of every key head."""
        return [head * each + at for head in range(rule.key_heads) for at in range(start, start + size)]

    def gates(start: int) -> list[int]:
        """b or a of every value head."""
        first = rule.key_heads * each
        return [first + head * 2 * served + at for head in range(rule.key_heads) for at in range(start, start + served)]

    q, k = of_heads(0, rule.key_dim), of_heads(rule.key_dim, rule.key_dim)
    v, z = of_heads(2 * rule.key_dim, own), of_heads(2 * rule.key_dim + own, own)
    return [*q, *k, *v, *z, *gates(0), *gates(served)]
