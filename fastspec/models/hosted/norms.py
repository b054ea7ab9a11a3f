"""RMSNorm modules of hosted models, run by our op: recognised by what they compute, not by name."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn

from fastspec.kernels import reference
from fastspec.models.hosted.swaps import Running, our_op

Form = Literal["rounded", "wide", "plus_one"]
FORMS: Final[tuple[Form, ...]] = ("rounded", "wide", "plus_one")
_SCALES: Final = (1.0, 0.001, 40.0, 1e-5)  # of trial rows: the last shows epsilon


class KnownNorm(NamedTuple):
    """What an RMSNorm does with its weight w.

    Attributes:
        form: "rounded": rounded before w is multiplied, as Llama's. "wide": rounded after it, as Helium's.
            "plus_one": likewise, the factor is 1 + w, as Gemma's.
        eps: epsilon.
    """

    form: Form
    eps: float

    def weight(self, stored: Tensor) -> Tensor:
        """The weight as `Ops.norm` takes it, of the module's [K] in the dtype of the model."""
        if self.form == "rounded":
            return stored
        return stored.float() if self.form == "wide" else 1.0 + stored.float()


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight by our op, in the place of an RMSNorm."""

    _running: Running

    def __init__(self, running: Running, known: KnownNorm, stored: Tensor) -> None:
        super().__init__()
        self._running = proxy(running)  # which owns this module
        self.eps = known.eps
        self.weight: Tensor
        self.register_buffer("weight", known.weight(stored))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], and the same shape."""
        with our_op(self._running):
            out: Tensor = self._running.ops.norm(x, self.weight, self.eps)
        return out


def known_norm(part: nn.Module) -> KnownNorm | None:
    """How a module is an RMSNorm over the last axis; None: it is none.

    It has a weight [K] and nothing else, and gives what a form above gives, to the bit, in bf16 and in fp32.
    """
    names = [name for name, _ in part.named_parameters()]
    if names != ["weight"] or any(True for _ in part.children()) or any(True for _ in part.buffers()):
        return None
    (weight,) = part.parameters()
    if weight.dim() != 1:
        return None
    cpu = torch.device("cpu")
    width, generator = len(weight), torch.Generator(cpu).manual_seed(0)
    stored = torch.randn(width, generator=generator, dtype=torch.float32, device=cpu)
    scales = torch.tensor(_SCALES, dtype=torch.float32, device=cpu)[:, None, None]
    x = torch.randn(len(_SCALES), 2, width, generator=generator, dtype=torch.float32, device=cpu) * scales
    numbers = {value for value in vars(part).values() if isinstance(value, float) and 0 < value < 1}
    for known in (KnownNorm(form, eps) for eps in sorted(numbers) for form in FORMS):
        if all(_is(part, known, x.to(dtype), stored.to(dtype)) for dtype in (torch.bfloat16, torch.float32)):
            return known
    return None


def _is(part: nn.Module, known: KnownNorm, x: Tensor, stored: Tensor) -> bool:
    try:
        found: Any = torch.func.functional_call(part, {"weight": stored}, (x,))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # it wants something else than rows
        return False
    wanted = reference.norm(x, known.weight(stored), known.eps)
    return isinstance(found, Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
