"""Calls of the kernels of experts whose launches are compiled ahead of time: see `recorder`."""

from __future__ import annotations

from functools import partial

import torch

from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import MXFP4, ExpertStack, ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.experts.dispatch import experts, experts_normed
from fastspec.kernels.experts.route import route, route_normed
from fastspec.kernels.experts.router import normed_logits
from fastspec.shapes import ClampedGate, RoutingRule, SquaredRelu
from tests.helpers.recorder import Calls, on_meta

META, F32, I32 = torch.device("meta"), torch.float32, torch.int32
# experts, chosen, hidden and inner of Qwen3-30B-A3B, gpt-oss-20b, and of Qwen3.5-35B-A3B with its shared expert
QWEN, OSS, JOINED = (128, 8, 2048, 768), (32, 4, 2880, 2880), (257, 9, 2048, 512)
NEMOTRON = (128, 6, 2688, 1856)  # Nemotron 3 Nano, whose experts have no gate
# experts in codes: of GPTQ and AWQ, of ModelOpt, and in blocks
KINDS = {"int4": CodesKind("int4", (1, 128)), "nvfp4": CodesKind("fp4", (1, 16)), "fp8": CodesKind("fp8", (128, 128))}
ROWS = (1, 5, 16, 32, 64, 300)  # every tile, experts by pair and by number, sorted


def mixture(rows: int, sizes: tuple[int, int, int, int], form: str, dtype: torch.dtype) -> object:
    """One mixture; `form`: "plain", with a shared expert "shared", one rank's part of that "part", with biases and
    clamped "bias", "mxfp4", one of `KINDS`, without a gate "relu2", or with the norm of the sum "normed".
    """
    count, chosen, hidden, inner = sizes
    made = []
    for shape in ((count, inner if form == "relu2" else 2 * inner, hidden), (count, hidden, inner)):
        kind = MXFP4 if form == "mxfp4" else KINDS.get(form)
        made.append(
            ExpertStack.empty_codes(shape, kind, dtype, META, not made)
            if kind
            else ExpertStack.of(on_meta(shape, dtype))
        )
    biased = form in ("bias", "mxfp4")
    weights = ExpertWeights(
        Weight(on_meta((count, hidden), dtype)),
        made[0],
        made[1],
        gate_up_bias=on_meta((count, 2 * inner), dtype) if biased else None,
        down_bias=on_meta((count, hidden), dtype) if biased else None,
    )
    x = on_meta((rows, hidden), dtype)
    shared = {"shared": x, "shared_logits": on_meta((rows, 1), F32)} if form == "shared" else {}
    if form == "part":
        shared = {"shared": on_meta((rows, hidden), F32), "shared_logits": on_meta((rows, 1), F32)}
    ids, factors = on_meta((rows, chosen), I32), on_meta((rows, chosen), F32)
    clamp = ClampedGate(1.702, 7.0) if biased else SquaredRelu() if form == "relu2" else None
    if form == "normed":
        norm = on_meta((hidden,), F32), 1e-6
        return experts_normed(x, ids, factors, weights, clamp, residual=x, norm=norm)
    return experts(x, ids, factors, weights, clamp, residual=None if form == "part" else x, **shared)


def mixtures(arch: int) -> Calls:
    """Routers, and mixtures of every tile."""
    rules = (RoutingRule(8, normed=True), RoutingRule(8, "sigmoid", True, 2.5), RoutingRule(4, "logits"))
    for rule in (*rules, RoutingRule(8, "sigmoid", True, 2.5, 8, 4)):
        correction = on_meta((128,), F32) if rule.scores == "sigmoid" else None
        yield f"route {rule}", partial(route, on_meta((5, 128), F32), rule, correction)
    x, gamma = on_meta((5, 2880), torch.bfloat16), on_meta((2880,), torch.bfloat16)
    yield (
        "route and norm",
        partial(route_normed, on_meta((5, 128), F32), rules[2], None, x, gamma, 1e-5),
    )
    whole = RoutingRule(6, "sigmoid", True, 2.5, shared="whole", shared_parts=2)
    for rule in (RoutingRule(8, normed=True, shared="gated"), whole):
        correction = on_meta((256,), F32) if rule.scores == "sigmoid" else None
        logits = on_meta((5, 256 + rule.gates), F32)
        yield f"route {rule}", partial(route, logits, rule, correction)
    for hidden, rows, norm_dtype in ((2048, 257, F32), (4096, 128, torch.bfloat16)):
        x, gamma = on_meta((1, 5, hidden), torch.bfloat16), on_meta((hidden,), norm_dtype)
        router = Weight(on_meta((rows, hidden), torch.bfloat16))
        yield f"router {hidden}", partial(normed_logits, x, gamma, 1e-6, router, None)
    for rows in (1, 5):
        yield f"joined {rows}", partial(mixture, rows, JOINED, "normed", torch.bfloat16)
    for rows in ROWS:
        for sizes, form in ((QWEN, "plain"), (QWEN, "shared"), (OSS, "bias"), (OSS, "mxfp4"), (NEMOTRON, "relu2")):
            yield f"{form} {rows}", partial(mixture, rows, sizes, form, torch.bfloat16)
        yield f"fp32 {rows}", partial(mixture, rows, QWEN, "plain", F32)
        if rows in (1, 5, 64):
            for form in KINDS:
                yield f"{form} {rows}", partial(mixture, rows, QWEN, form, torch.bfloat16)
    for inner in (384, 192):  # of two ranks, and of four
        yield f"part {inner}", partial(mixture, 5, (*QWEN[:3], inner), "part", torch.bfloat16)
