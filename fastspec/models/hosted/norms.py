"""RMSNorms of hosted modules: which formula each computes, found by trying it, and our op in its place."""

from __future__ import annotations

import copy
from typing import Any, Final, Literal
from weakref import proxy

import torch
from torch import Tensor, nn

from fastspec.kernels import reference
from fastspec.models.hosted.swaps import Running

NormKind = Literal["rms", "rms_fp32", "rms_plus_one"]
_KINDS: Final[tuple[NormKind, ...]] = ("rms", "rms_fp32", "rms_plus_one")
_EPSILONS: Final = ("variance_epsilon", "eps")
_ROWS: Final = 8
_MOVED: Final = 0.01  # share of bf16 outputs that another order of a sum may round to a neighbour


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight by our op, in the place of an RMSNorm.

    Args:
        running: the model that it belongs to.
        weight: [K], of the module that it replaces.
        eps: as there.
        kind: its formula, as `LayerPlan.norm` names them.
    """

    _running: Running

    def __init__(self, running: Running, weight: Tensor, eps: float, kind: NormKind) -> None:
        super().__init__()
        self._running = proxy(running)  # which owns this module
        self.eps, self._rounds_first = eps, kind == "rms"
        self.register_buffer("weight", _factor(weight, kind))

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to the same."""
        running = self._running
        running.inside = True
        try:
            weight = self.weight.to(x.dtype) if self._rounds_first else self.weight
            out: Tensor = running.ops.norm(x.contiguous(), weight, self.eps)
            return out
        finally:
            running.inside = False


def _factor(weight: Tensor, kind: NormKind) -> Tensor:
    """What our op multiplies by: in fp32 where the result is rounded behind it."""
    if kind == "rms":
        return weight
    return weight.float() + 1.0 if kind == "rms_plus_one" else weight.float()


def norm_kinds(module: nn.Module) -> dict[str, tuple[NormKind, int]]:
    """Which submodules, by name, compute an RMSNorm, by which formula and of which width.

    Args:
        module: on any device, the meta device too; nothing is read from it.
    """
    tried: dict[Any, NormKind | None] = {}
    found: dict[str, tuple[NormKind, int]] = {}
    for name, part in module.named_modules():
        if not _may_be(part):
            continue
        key = type(part), part.weight.shape, epsilon(part)
        if key not in tried:
            tried[key] = _kind_of(part)
        kind = tried[key]
        if kind is not None:
            found[name] = kind, int(part.weight.shape[0])
    return found


def epsilon(part: Any) -> float | None:
    """The epsilon of a norm; None: it has none by a known name."""
    return next((getattr(part, name) for name in _EPSILONS if isinstance(getattr(part, name, None), float)), None)


def _may_be(part: nn.Module) -> bool:
    tensors = [*part.named_parameters(), *part.named_buffers()]
    named = type(part).__name__.endswith("RMSNorm") and [name for name, _ in tensors] == ["weight"]
    return named and tensors[0][1].dim() == 1 and epsilon(part) is not None


def _kind_of(part: Any) -> NormKind | None:
    """The formula whose values are those of the module, for random values."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        real = copy.deepcopy(part).to_empty(device="cpu").float()
        width = real.weight.numel()
        real.weight.normal_(0.7, 0.5, generator=generator)
        x, eps = real.weight.new_empty(_ROWS, width).normal_(0.0, 2.0, generator=generator), epsilon(part)
        assert eps is not None, "asked before"
        for kind in _KINDS:
            ours = reference.norm(x, _factor(real.weight, kind), eps)
            if not torch.allclose(real(x), ours, rtol=1e-4, atol=1e-5):
                continue
            half = copy.deepcopy(real).to(torch.bfloat16)
            theirs, ours = half(x.bfloat16()), reference.norm(x.bfloat16(), _factor(half.weight, kind), eps)
            if theirs.dtype is ours.dtype and float((theirs != ours).float().mean()) <= _MOVED:
                return kind
    return None
