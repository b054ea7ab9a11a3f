"""Torch definition of a mixture of experts: the router, and the weighted sum of the chosen experts' outputs.

Batch invariance: every matrix product has blocks of `PAIRS` (token, expert) pairs. The outputs of a token's experts are
added in the order in which they were chosen. So a token's bits do not depend on other tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.experts import ExpertStack, ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.reference.linear import linear
from fastspec.kernels.reference.linear import norm as norm_of
from fastspec.kernels.reference.recurrent import sigmoid
from fastspec.shapes import UNTILED, ClampedGate, RoutingRule, SquaredRelu, Tiling

PAIRS = 8  # (token, expert) pairs of one matrix product


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token, the best first, and computes the factors of their outputs.

    Args:
        logits: fp32 [R, E + rule.gates], the router's logits of R tokens.
        rule: formulas and number of experts, see `RoutingRule`.
        correction: fp32 [E], added to the scores only to choose experts (DeepSeek-V3, arXiv 2412.19437). None: nothing
            is added.

    Returns:
        Ids of the experts, int32 [R, rule.held], and their factors, fp32 [R, rule.held].
    """
    if rule.shared is not None:
        return _with_shared(logits, rule, correction)
    scores = logits
    if rule.scores == "softmax":
        scores = torch.softmax(logits, dim=-1)
    elif rule.scores == "sigmoid":
        scores = sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if rule.groups > 1:
        ranked = ranked.masked_fill(~_in_kept_groups(ranked, rule), -torch.inf)
    ids = _largest(ranked, rule.chosen)
    factors = scores.gather(-1, ids)
    if rule.scores == "logits":
        factors = torch.softmax(factors, dim=-1)
    if rule.normed:
        total = factors.cumsum(-1)[:, -1:]  # cumsum adds in the order of choice, for any number of rows
        factors = factors / (total + rule.eps)
    return ids.int(), factors * rule.scale


def _with_shared(logits: Tensor, rule: RoutingRule, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes `route` for a rule with a shared expert, whose parts are the last experts of every token."""
    experts = logits.shape[1] - rule.gates
    ids, factors = route(logits[:, :experts], rule._replace(shared=None), correction)
    gate = sigmoid(logits[:, experts:]) if rule.gates else torch.ones_like(factors[:, :1])
    last = torch.arange(experts, experts + rule.shared_parts, dtype=ids.dtype, device=ids.device)
    last, gate = last.expand(len(ids), -1), gate.expand(-1, rule.shared_parts)
    return torch.cat((ids, last), dim=-1), torch.cat((factors, gate), dim=-1)


def normed_logits(
    x: Tensor, weight: Tensor, eps: float, router: Weight, bias: Tensor | None, tiling: Tiling = UNTILED
) -> tuple[Tensor, Tensor]:
    """Computes the RMSNorm of hidden states, and the router's logits of the result.

    Args:
        x: [..., K], hidden states.
        weight: [K], weight of the norm; see `norm`.
        eps: epsilon of the norm.
        router: [N, K], row-major.
        bias: [N], bias of the router.
        tiling: `tiling.rows` rows are multiplied in one matrix product.

    Returns:
        The normed hidden states [..., K] in x's dtype, and the logits, fp32 [..., N].
    """
    h = norm_of(x, weight, eps)
    return h, linear(h, router, bias, tiling, out_dtype=torch.float32)


def route_normed(
    logits: Tensor, rule: RoutingRule, correction: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `route`, and the RMSNorm of the hidden states that the experts read.

    Args:
        logits, rule, correction: see `route`.
        x: [..., K], hidden states.
        weight: [K], weight of the norm; see `norm`.
        eps: epsilon of the norm.

    Returns:
        Ids and factors as `route` returns them, and the normed hidden states [..., K].
    """
    ids, factors = route(logits, rule, correction)
    return ids, factors, norm_of(x, weight, eps)


def _largest(x: Tensor, count: int) -> Tensor:
    """Returns the indices [R, count] of each row's largest elements, the largest first.

    Of equal elements, the one with the lowest index is first.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_kept_groups(ranked: Tensor, rule: RoutingRule) -> Tensor:
    """Returns bool [R, E], True for experts in the groups from which a token's experts are chosen.

    ranked: scores by which experts are ranked, [R, E].
    """
    groups = ranked.unflatten(-1, (rule.groups, -1))
    best = groups.sort(dim=-1, descending=True).values
    kept = _largest(best[..., 0] + best[..., 1], rule.kept_groups)
    inside = torch.zeros_like(best[..., 0], dtype=torch.bool).scatter_(-1, kept, True)
    return inside[..., None].expand_as(groups).flatten(-2)


def experts(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    clamp: ClampedGate | SquaredRelu | None,
    *,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
    residual: Tensor | None,
) -> Tensor:
    """Sums expert outputs: residual + sum_j factors_j expert_j(x) [+ [sigmoid(shared_logits) *] shared].

        expert(x) = f(x gate_up^T [+ bias]) down^T [+ bias],   f = silu(gate) * up, or the activation `clamp`

    Args:
        x: [B, Q, hidden], or [R, hidden].
        ids, factors: [R, chosen], results of `route`.
        weights: experts of the layer.
        clamp: activation of the experts: the clamped gate of gpt-oss, or relu squared without a gate. None: silu.
        shared: output of the shared expert, shape of x. None: there is none.
        shared_logits: fp32 [..., 1], logits of the shared expert's gate. None: it has no gate.
        residual: the residual stream, shape of x. None: the result is the sum alone, in fp32.

    Returns:
        Shape and dtype of x; fp32 if `residual` is None. An expert's output is rounded to x's dtype, and the sum over
        experts is in fp32.
    """
    flat, chosen = x.reshape(-1, x.shape[-1]), ids.shape[1]
    outputs = torch.zeros(ids.numel(), x.shape[-1], dtype=x.dtype, device=x.device)
    if x.is_cuda or torch.compiler.is_compiling():  # shapes must not depend on values
        outputs = _by_pairs(flat, ids, weights, clamp)
    else:
        pairs = ids.flatten()
        for expert in pairs.unique().tolist():
            at = (pairs == expert).nonzero()[:, 0]
            outputs[at] = _of_expert(flat[at // chosen], expert, weights, clamp)
    outputs = outputs.view(-1, chosen, x.shape[-1])
    total = torch.zeros_like(flat, dtype=torch.float32)
    for place in range(chosen):
        total = total + factors[:, place, None] * outputs[:, place].float()
    total = total.view(x.shape)
    if shared is not None:
        total = total + (shared.float() if shared_logits is None else sigmoid(shared_logits) * shared.float())
    return total if residual is None else residual + total.to(x.dtype)


def experts_normed(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    clamp: ClampedGate | SquaredRelu | None,
    *,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
    residual: Tensor,
    norm: tuple[Tensor, float],
) -> tuple[Tensor, Tensor]:
    """Computes `experts`, and the RMSNorm of its result.

    Args:
        x, ids, factors, weights, clamp, shared, shared_logits, residual: see `experts`.
        norm: weight [hidden] and epsilon of an RMSNorm, see `norm`.

    Returns:
        (the result of `experts`, its RMSNorm), both with the shape and dtype of x.
    """
    given = x, ids, factors, weights, clamp
    out = experts(*given, shared=shared, shared_logits=shared_logits, residual=residual)
    return out, norm_of(out, *norm)


def _of_expert(rows: Tensor, expert: int, weights: ExpertWeights, clamp: ClampedGate | SquaredRelu | None) -> Tensor:
    """Returns the outputs [R, hidden] of one expert for rows [R, hidden], computed in blocks of `PAIRS` rows."""
    up, down = weights.gate_up.values(expert), weights.down.values(expert)
    up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert].flatten()
    down_bias = None if weights.down_bias is None else weights.down_bias[expert]
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % PAIRS)).split(PAIRS)
    return torch.cat([F.linear(gated(F.linear(each, up, up_bias), clamp), down, down_bias) for each in blocks])[
        : len(rows)
    ]


def _by_pairs(rows: Tensor, ids: Tensor, weights: ExpertWeights, clamp: ClampedGate | SquaredRelu | None) -> Tensor:
    """Returns the outputs [R * chosen, hidden] of all (token, expert) pairs.

    The matrices of each pair's expert are copied. So no tensor's shape depends on the values of `ids`.
    """
    room = (0, -ids.numel() % PAIRS)
    blocks = F.pad(rows.repeat_interleave(ids.shape[1], dim=0), (0, 0, *room)).split(PAIRS)
    chosen = F.pad(ids.flatten().long(), room).split(PAIRS)
    parts = []
    for block, expert in zip(blocks, chosen, strict=True):

        def product(x: Tensor, stack: ExpertStack, bias: Tensor | None, expert: Tensor = expert) -> Tensor:
            out = torch.bmm(stack.values(expert), x[..., None])[..., 0]
            return out if bias is None else out + bias[expert].flatten(1)

        parts.append(_through(block, weights, clamp, product))
    return torch.cat(parts)[: ids.numel()]


def _through(
    x: Tensor, weights: ExpertWeights, clamp: ClampedGate | SquaredRelu | None, product: Callable[..., Tensor]
) -> Tensor:
    inner = gated(product(x, weights.gate_up, weights.gate_up_bias), clamp)
    return product(inner, weights.down, weights.down_bias)


def gated(gate_up: Tensor, clamp: ClampedGate | SquaredRelu | None) -> Tensor:
    """Applies an expert's activation to the result of its first matrix product. Returns [..., I].

    Args:
        gate_up: [..., 2 I], gate first. For `SquaredRelu`, which has no gate, [..., I].
        clamp: see `experts`.
    """
    if isinstance(clamp, SquaredRelu):
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * sigmoid(clamp.alpha * gate) * (up + 1)
