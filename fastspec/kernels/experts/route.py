"""Routing of an MoE layer: chooses the experts of each row (token), and computes their factors. One CTA per row.

| argument   | shape, dtype   | notes                                                      |
|------------|----------------|------------------------------------------------------------|
| logits     | [R, N] fp32    | contiguous; E experts, then the shared expert's gate if any |
| correction | [E] fp32, None | added to the scores, but only to choose experts            |

E is at most `MAX_EXPERTS`. The order of a sum over all experts depends only on E. Scores of chosen experts are added in
the order in which they are chosen. `route_normed` also computes an RMSNorm of each row, in one more CTA per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import launch, new_ids
from fastspec.kernels.norm import normed_row, weight_of
from fastspec.shapes import RoutingRule

MAX_EXPERTS = 4096  # largest number of logits of one CTA
SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}
# for at most this many experts, or elements of a norm, a CTA has one warp, so that no sum needs a barrier
ONE_WARP = 2048
LEAST = tl.constexpr(-(2**31))  # less than the results of `_ordered` for all scores


class RowNorm(NamedTuple):
    """RMSNorm of the rows that are the experts' input, as kernel arguments.

    Attributes:
        x: [R, K], rows to norm. None: no norm.
        weight: [K]. None without a norm.
        normed: [R, K], receives the normed rows. None without a norm.
        eps: epsilon.
    """

    x: Any
    weight: Any
    normed: Any
    eps: Any


@triton.jit
def _ordered(x):
    """Converts fp32 x to int32 keys that have the same order as the values of x. 0 and -0 have the same key.

    A warp finds the largest int32 in one instruction.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _largest(keys, at, none):
    """Returns the largest of int32 `keys`, and its index. Of equal keys it returns the lowest index.

    at: indices of the keys. none: a number that is larger than all indices.
    """
    best = tl.max(keys, axis=0)
    return best, tl.min(tl.where(keys == best, at, none), axis=0)


@triton.jit
def _in_kept_groups(ranked, e, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the experts' scores `ranked`, with -inf for experts outside of the KEPT best of GROUPS groups.

    Groups are ranked by the sum of their two largest scores. e: indices of the experts.
    """
    SIZE: tl.constexpr = E // GROUPS
    group = tl.arange(0, BLOCK)  # there are at most as many groups as experts
    keys = _ordered(ranked)
    sums = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        _, at = _largest(tl.where(e // SIZE == i, keys, LEAST), e, BLOCK)
        first = tl.max(tl.where(e == at, ranked, float("-inf")), axis=0)
        second = tl.max(tl.where((e // SIZE == i) & (e != at), ranked, float("-inf")), axis=0)
        sums = tl.where(group == i, first + second, sums)
    kept = e < 0
    keys = tl.where(group < GROUPS, _ordered(sums), LEAST)
    for _ in tl.static_range(KEPT):
        _, at = _largest(keys, group, BLOCK)
        kept = kept | (e // SIZE == at)
        keys = tl.where(group == at, LEAST, keys)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def route_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,  # int32 [R, HELD]
    factors_ptr,  # fp32 [R, HELD]
    scale,
    added,  # `eps` of the rule, added to the sum of chosen scores
    beside,  # RowNorm
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    HELD: tl.constexpr,  # CHOSEN, plus the number of parts of the shared expert
    GATED: tl.constexpr,  # the shared expert's gate is the logit after those of the experts
    SCORES: tl.constexpr,  # value of the table SCORES
    NORMED: tl.constexpr,  # factors are divided by the sum of chosen scores
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,  # E, rounded up to a power of two
    PLACES: tl.constexpr,  # HELD, rounded up to a power of two
    K: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WIDE: tl.constexpr,  # K, rounded up to a power of two
    PDL: tl.constexpr,
):
    """Chooses the experts of one row, or computes the row's norm in the second CTA. The grid is (row, 1 or 2)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _choose(
            logits_ptr, correction_ptr, ids_ptr, factors_ptr, scale, added, row,
            E, CHOSEN, HELD, GATED, SCORES, NORMED, GROUPS, KEPT, BLOCK, PLACES,
        )  # fmt: skip
    elif beside.x is not None:
        at = tl.arange(0, WIDE)
        weight = weight_of(beside.weight, at, at < K)
        x = tl.load(beside.x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        kind: tl.constexpr = beside.normed.dtype.element_ty
        normed = normed_row(x, weight, K, beside.eps, ROUND_FIRST, kind)
        tl.store(beside.normed + row * K + at, normed.to(kind), mask=at < K)


@triton.jit
def _choose(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    factors_ptr,
    scale,
    added,
    row,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    HELD: tl.constexpr,
    GATED: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Chooses the experts of a row and computes their factors. For the arguments see `route_kernel`."""
    e = tl.arange(0, BLOCK)
    logits_ptr += row * (E + GATED)
    scores = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"))
    if SCORES == 0:
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    if SCORES == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranked = scores
    if correction_ptr is not None:
        ranked += tl.load(correction_ptr + e, mask=e < E, other=0.0)
    ranked = tl.where(e < E, ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _in_kept_groups(ranked, e, E, GROUPS, KEPT, BLOCK)
    keys = tl.where(e < E, _ordered(ranked), LEAST)  # LEAST is below the keys of all numbers and of NaN
    found = _ordered(scores)
    place = tl.arange(0, PLACES)
    ids = E + place - CHOSEN  # of the shared expert's parts; the others are replaced
    factors = tl.zeros((PLACES,), tl.float32)
    total = 0.0
    top = 0.0
    for i in tl.static_range(CHOSEN):
        best, at = _largest(keys, e, E - 1)
        if correction_ptr is not None or GROUPS > 1:
            best = tl.max(tl.where(e == at, found, LEAST), axis=0)
        keys = tl.where(e == at, LEAST, keys)
        score = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        if SCORES == 2:
            if i == 0:
                top = score
            score = tl.exp(score - top)
        total += score
        ids = tl.where(place == i, at, ids)
        factors = tl.where(place == i, score, factors)
    if NORMED or SCORES == 2:
        factors = factors / (total + added)
    factors *= scale
    if GATED:
        factors = tl.where(place < CHOSEN, factors, 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + E))))
    elif HELD > CHOSEN:
        factors = tl.where(place < CHOSEN, factors, 1.0)
    tl.store(ids_ptr + row * HELD + place, ids, mask=place < HELD)
    tl.store(factors_ptr + row * HELD + place, factors, mask=place < HELD)


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row, and computes their factors, as `Ops.route`.

    Args:
        logits, rule, correction: see `Ops.route`.

    Returns:
        ids int32 [R, held] of the chosen experts, and their factors, fp32 [R, held]. `held` is the number of chosen
        experts, plus that of the shared expert's parts.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    return _launch(logits, rule, correction, None)[:2]


def route_normed(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `route` and an RMSNorm of x in one launch, as `Ops.route_normed`.

    Args:
        logits, rule, correction, x, weight, eps: see `Ops.route_normed`.

    Returns:
        ids and factors of `route`, and the normed x.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above, or x has another number of rows than logits.
    """
    if x.numel() != len(logits) * x.shape[-1] or weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {told(x)} for {len(logits)} rows of logits and a weight {told(weight)}; wanted [R, K]")
    ids, factors, normed = _launch(logits, rule, correction, (x.contiguous(), weight.contiguous(), eps))
    assert normed is not None
    return ids, factors, normed


def _launch(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    beside: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, experts = logits.shape[0], logits.shape[1] - rule.gates
    check("logits", logits, (rows, experts + rule.gates), torch.float32)
    if not rule.chosen <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts; wanted {rule.chosen}, as many as are chosen, to {MAX_EXPERTS}")
    if correction is not None:
        check("correction", correction, (experts,), torch.float32)
    ids = new_ids(rows * rule.held, logits.device, torch.int32).view(rows, rule.held)
    factors = torch.empty(rows, rule.held, dtype=torch.float32, device=logits.device)
    x, weight, eps = (None, None, 0.0) if beside is None else beside
    normed = None if x is None else torch.empty_like(x)
    if rows == 0:
        return ids, factors, normed
    block, width = triton.next_power_of_2(experts), 1 if x is None else x.shape[-1]
    launch(
        route_kernel, (rows, 1 if beside is None else 2), logits, correction, ids, factors, rule.scale, rule.eps,
        RowNorm(x, weight, normed, eps),
        E=experts, CHOSEN=rule.chosen, HELD=rule.held, GATED=rule.gates, SCORES=SCORES[rule.scores],
        NORMED=rule.normed, GROUPS=rule.groups, KEPT=rule.kept_groups, BLOCK=block,
        PLACES=triton.next_power_of_2(rule.held),
        K=width, ROUND_FIRST=x is not None and weight is not None and weight.dtype == x.dtype,
        WIDE=triton.next_power_of_2(width), num_warps=1 if max(block, width) <= ONE_WARP else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return ids, factors, normed
