"""The rotation of heads in hosted attention modules, run by our op: recognised by what it computes.

transformers' modules rotate queries and keys by a function of their file, `apply_rotary_pos_emb`. A module whose
function computes the known rotation gets a forward of the same code that calls ours; transformers is not changed.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any, Final
from weakref import proxy

import torch
from torch import Tensor, nn

from fastspec.kernels import reference
from fastspec.models.hosted.swaps import Running, our_op

NAME: Final = "apply_rotary_pos_emb"
DEPRECATION: Final = "transformers.utils.deprecation"


def rotates(part: nn.Module) -> bool:
    """Whether a module's forward rotates heads by a function of that name that computes `reference.rotate`."""
    forward = _forward(part)
    return forward is not None and NAME in forward.__code__.co_names and _known(forward.__globals__.get(NAME))


def _forward(part: nn.Module) -> FunctionType | None:
    """A module's forward, without what only warns of old keywords; None: it is no plain function."""
    forward: Any = type(part).forward
    while hasattr(forward, "__wrapped__") and forward.__globals__.get("__name__") == DEPRECATION:
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


def _known(function: Any) -> bool:
    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(0)
    shapes = (2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 16), (2, 3, 16)
    wide = [torch.randn(shape, generator=generator, dtype=torch.float32, device=cpu) for shape in shapes]
    for dtype in (torch.bfloat16, torch.float32):
        given = [each.to(dtype) for each in wide]
        try:
            found = function(*given)
        except (RuntimeError, TypeError, ValueError, IndexError):  # it wants something else
            return False
        wanted = reference.rotate(*given)
        if not (isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, wanted))):
            return False
    return True


def use_our_rotation(part: nn.Module, running: Running) -> None:
    """Lets a module that `rotates` do so by our op, where that takes heads and angles."""
    forward = _forward(part)
    assert forward is not None, "it rotates"
    own, theirs = proxy(running), forward.__globals__[NAME]

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if more or options or not _fits(q, k, cos, sin):
            found: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, *more, **options)
            return found
        with our_op(own):
            rotated_heads: tuple[Tensor, Tensor] = own.ops.rotate(q, k, cos, sin)
        return rotated_heads

    names = {**forward.__globals__, NAME: rotated}
    ours = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    part.forward = MethodType(ours, proxy(part))


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `Ops.rotate` takes tensors of these shapes and dtypes."""
    if not q.dim() == k.dim() == 4 or cos.dim() != 3 or sin.shape != cos.shape:
        return False
    tensors, (batch, _, tokens, dim) = (q, k, cos, sin), q.shape
    same_form = all(each.dtype == q.dtype and each.stride(-1) == 1 for each in tensors)
    whole = cos.shape[1:] == (tokens, dim) and cos.shape[0] in (1, batch) and dim % 2 == 0
    return same_form and whole and k.shape[0] == batch and k.shape[2:] == q.shape[2:]
