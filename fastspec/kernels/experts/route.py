"""The router: which experts each row has, and with what factors. One program a row, and one more for its norm.

| argument   | shape, dtype   | notes                                    |
|------------|----------------|------------------------------------------|
| logits     | [R, E] fp32    | contiguous, E up to `MAX_EXPERTS`       |
| correction | [E] fp32       | or None: added to scores to choose alone |

The order of a sum over all experts depends on E alone; scores of chosen experts are added in the order of choice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import launch, new_ids, pdl_options
from fastspec.kernels.norm import normed_row
from fastspec.shapes import RoutingRule

MAX_EXPERTS = 4096  # logits that one program holds
SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}


class Beside(NamedTuple):
    """What is computed beside the choice; None: nothing.

    Attributes:
        x: [R, K], rows whose norm is computed. weight: [K]. normed: [R, K]. eps: epsilon.
    """

    x: Any
    weight: Any
    normed: Any
    eps: Any


@triton.jit
def _largest(x, at, none):
    """The largest element of x, and the lowest index `at` that has it; index `none` where all of x is NaN."""
    best = tl.max(x, axis=0)
    return best, tl.min(tl.where(x == best, at, none), axis=0)


@triton.jit
def _in_kept_groups(ranked, e, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """`ranked`, with -inf in all groups but the KEPT ones. A group ranks by the sum of its two largest scores."""
    SIZE: tl.constexpr = E // GROUPS
    group = tl.arange(0, BLOCK)  # there are at most as many groups as experts
    sums = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        mine = tl.where(e // SIZE == i, ranked, float("-inf"))
        first, at = _largest(mine, e, BLOCK)
        second = tl.max(tl.where(e == at, float("-inf"), mine), axis=0)
        sums = tl.where(group == i, first + second, sums)
    kept = e < 0
    for _ in tl.static_range(KEPT):
        _, at = _largest(sums, group, BLOCK)
        kept = kept | (e // SIZE == at)
        sums = tl.where(group == at, float("-inf"), sums)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def route_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,  # int32 [R, CHOSEN]
    factors_ptr,  # fp32 [R, CHOSEN]
    scale,
    beside,  # Beside
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    K: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    WIDE: tl.constexpr,  # a power of two, for K
    PDL: tl.constexpr,
):
    """One row: its experts, or its norm."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _choose(
            logits_ptr, correction_ptr, ids_ptr, factors_ptr, scale, row,
            E, CHOSEN, SCORES, NORMED, GROUPS, KEPT, BLOCK, PLACES,
        )  # fmt: skip
    elif beside.x is not None:
        at = tl.arange(0, WIDE)
        x = tl.load(beside.x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        kind: tl.constexpr = beside.normed.dtype.element_ty
        normed = normed_row(x, beside.weight, at, at < K, K, beside.eps, ROUND_FIRST, kind)
        tl.store(beside.normed + row * K + at, normed.to(kind), mask=at < K)


@triton.jit
def _choose(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    factors_ptr,
    scale,
    row,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The experts of a row and their factors."""
    e = tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * E + e, mask=e < E, other=float("-inf"))
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
    place = tl.arange(0, PLACES)
    ids = tl.zeros((PLACES,), tl.int32)
    factors = tl.zeros((PLACES,), tl.float32)
    total = 0.0
    top = 0.0
    for i in tl.static_range(CHOSEN):
        _, at = _largest(ranked, e, E - 1)  # NaN rows: the last expert, a valid index
        score = tl.max(tl.where(e == at, scores, float("-inf")), axis=0)
        ranked = tl.where(e == at, float("-inf"), ranked)
        if SCORES == 2:
            if i == 0:
                top = score
            score = tl.exp(score - top)
        total += score
        ids = tl.where(place == i, at, ids)
        factors = tl.where(place == i, score, factors)
    if NORMED or SCORES == 2:
        factors = factors / total
    here = place < CHOSEN
    tl.store(ids_ptr + row * CHOSEN + place, ids, mask=here)
    tl.store(factors_ptr + row * CHOSEN + place, factors * scale, mask=here)


def route(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None = None, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As `reference.route`, which defines it.

    Args:
        logits, rule, correction: as there.
        pdl: launch programmatically dependent (sm_90 on).

    Raises:
        ValueError: a tensor is not as above.
    """
    return _launch(logits, rule, correction, None, pdl)[:2]


def route_normed(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.route_normed`, which defines it.

    Args:
        logits, rule, correction, x, weight, eps: as there.
        pdl: launch programmatically dependent (sm_90 on).

    Raises:
        ValueError: a tensor is not as above, or there are not as many rows of x.
    """
    if x.numel() != len(logits) * x.shape[-1] or weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {told(x)} for {len(logits)} rows of logits and a weight {told(weight)}; wanted [R, K]")
    ids, factors, normed = _launch(logits, rule, correction, (x.contiguous(), weight.contiguous(), eps), pdl)
    assert normed is not None
    return ids, factors, normed


def _launch(
    logits: Tensor,
    rule: RoutingRule,
    correction: Tensor | None,
    given: tuple[Tensor, Tensor, float] | None,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, experts = logits.shape
    check("logits", logits, (rows, experts), torch.float32)
    if not rule.chosen <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts; wanted {rule.chosen}, as many as are chosen, to {MAX_EXPERTS}")
    if correction is not None:
        check("correction", correction, (experts,), torch.float32)
    ids = new_ids(rows * rule.chosen, logits.device, torch.int32).view(rows, rule.chosen)
    factors = torch.empty(rows, rule.chosen, dtype=torch.float32, device=logits.device)
    x, weight, eps = (None, None, 0.0) if given is None else given
    normed = None if x is None else torch.empty_like(x)
    if rows == 0:
        return ids, factors, normed
    block, width = triton.next_power_of_2(experts), 1 if x is None else x.shape[-1]
    few = given is None and block <= 256
    launch(
        route_kernel, (rows, 1 if given is None else 2), logits, correction, ids, factors, rule.scale,
        Beside(x, weight, normed, eps),
        E=experts, CHOSEN=rule.chosen, SCORES=SCORES[rule.scores], NORMED=rule.normed,
        GROUPS=rule.groups, KEPT=rule.kept_groups, BLOCK=block, PLACES=triton.next_power_of_2(rule.chosen),
        K=width, ROUND_FIRST=x is not None and weight is not None and weight.dtype == x.dtype,
        WIDE=triton.next_power_of_2(width), num_warps=1 if few else 4, enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip
    return ids, factors, normed
