"""How many bytes of tensors there are at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operations allocate within it, and not what their operands lie in.

    Attributes:
        peak: the most bytes that were there after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does the operation, and counts."""
        found = function(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and _storage(each) not in given:
                self._live.append((StorageWeakRef(each.untyped_storage()), each.untyped_storage().nbytes()))
        self._live = [(reference, size) for reference, size in self._live if not reference.expired()]
        self.peak = max(self.peak, sum(size for _, size in self._live))
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
