"""Finds tensors and quantised matrices by references, because CUDA graphs contain their addresses."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.common.code_packing import PackedCodes

_PACKAGES = ("fastspec", "builtins", "collections", "functools", "torch", "transformers")
_LEAVES = (str, bytes, int, float, type, ModuleType, BuiltinFunctionType)


def storages(roots: Sequence[Any], objects: Iterable[object] | None = None) -> dict[int, torch.UntypedStorage]:
    """Returns {address of the storage object: storage} for all tensors that can be reached from `roots`.

    Args:
        roots: objects that hold tensors.
        objects: result of `reachable(roots)`. None: it is computed.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for each in reachable(roots) if objects is None else objects:
        if isinstance(each, Tensor) and each.layout is torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            found[storage._cdata] = storage
    return found


def reachable(roots: Sequence[Any]) -> Iterator[object]:
    """Yields the objects that can be reached from `roots` by references.

    Objects of most other packages are left out, for example a user's own proposer. So are objects that only these
    refer to.
    """
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _LEAVES):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):  # not its globals
            waiting += each.__closure__ or ()
        elif isinstance(each, MethodType):
            waiting.append(each.__self__)
        elif type(each).__module__.partition(".")[0] in _PACKAGES:
            yield each
            if not isinstance(each, Tensor):
                waiting += gc.get_referents(each)


def code_layouts(roots: Sequence[Any]) -> dict[int, tuple[object, ...]]:
    """Returns {id() of a quantised matrix: its `PackedCodes.layout`} for all that can be reached from `roots`."""
    return {id(each): each.layout for each in reachable(roots) if isinstance(each, PackedCodes)}
