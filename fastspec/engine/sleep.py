"""Releases the memory of an idle engine to the driver, and allocates it again later.

Tensor objects are kept: only the storage of each tensor is freed, and allocated again later. The new storage has
another address, so CUDA graphs are deleted, and captured again. Contents are treated in three ways:

| memory | contents |
|---|---|
| K/V pages and recurrent states | dropped; zeros afterwards |
| weights that will be loaded again | dropped |
| all other buffers | copied to host memory and back, unless they are all zero |
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.engine.memory import release_unused
from fastspec.graphs.addresses import reachable, storages
from fastspec.kernels.cpu.blocked import Blocked
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.states import StateCache
from fastspec.models.hosted.model import HostedModel

_SMALL = 2**16  # bytes; smaller storages stay


@dataclass(slots=True)
class Asleep:
    """Memory that a sleeping engine has released, and the contents to restore.

    Attributes:
        level: 1: caches and buffers were released. 2: weights were released, too.
        freed: number of released bytes.
    """

    level: int
    freed: int = 0
    _emptied: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    _saved: list[tuple[torch.UntypedStorage, Tensor]] = field(default_factory=list)
    _zeroed: list[torch.UntypedStorage] = field(default_factory=list)
    _steps: list[Hashable] = field(default_factory=list)

    def regain(self, engine: Engine) -> None:
        """Allocates all memory again, and restores the saved contents.

        KV cache pages and recurrent states contain zeros afterwards. Weights of `lay_down`'s `dropped` must be loaded
        again.

        Raises:
            MemoryError: there is not enough memory; the engine still sleeps.
        """
        with engine.on_device():
            taken: list[torch.UntypedStorage] = []
            try:
                for storage, size in self._emptied:
                    taken.append(storage)
                    storage.resize_(size)
            except RuntimeError as error:
                for storage in taken:
                    storage.resize_(0)
                release_unused(engine.state.lengths.device)
                raise MemoryError(
                    f"wake() found no room for {self.freed / 2**30:.3f} GiB ({error}); free memory of other programs "
                    "and call it again"
                ) from error
            for storage in self._zeroed:
                _bytes(storage).zero_()
            for storage, values in self._saved:
                _bytes(storage).copy_(values, non_blocking=True)
        engine.finish()

    def recapture(self, engine: Engine) -> None:
        """Captures all decode steps and prefill passes again that were captured before the engine slept."""
        engine.capture_again(self._steps)

    def _keep(
        self,
        emptied: Mapping[int, torch.UntypedStorage],
        caches: Container[int],
        weights: Container[int],
    ) -> None:
        """Notes what `regain` does with each storage. Queues the copies to host memory.

        Args:
            emptied: key -> storage whose memory will be released.
            caches, weights: keys of the storages whose contents are dropped, and of those that will be loaded again.
        """
        others = [storage for key, storage in emptied.items() if key not in caches and key not in weights]
        self._emptied += [(storage, storage.nbytes()) for storage in emptied.values()]
        self._zeroed += [storage for key, storage in emptied.items() if key in caches]
        for storage, zero in zip(others, _all_zero(others), strict=True):
            if zero:
                self._zeroed.append(storage)
            else:
                self._saved.append((storage, _to_host(storage)))


def lay_down(engine: Engine, level: int, kept: Sequence[Any], dropped: Sequence[Any]) -> Asleep:
    """Releases the memory of an engine. Nothing may run on the engine before `Asleep.regain`.

    Args:
        engine: the engine.
        level: 1 or 2, see `Asleep`. Only stored in the result.
        kept: weights that keep their memory.
        dropped: weights whose memory is released without a copy. They will be loaded again.
    """
    device = engine.state.lengths.device
    engine.finish()
    asleep = Asleep(level, _steps=engine.runner.release())
    # the host reads the ring without a call of torch, so it stays
    stays = {*storages(kept), *storages([engine.ring])}
    roots = [engine.modules, engine.state, engine.prompts, engine.texts, engine.prefix_states]
    objects = list(reachable(roots))
    caches = storages(_caches(objects))
    weights = storages(dropped)
    with engine.on_device():
        freed = {
            key: storage
            for key, storage in {**storages(roots, objects), **weights}.items()
            if key not in stays and storage.nbytes() >= _SMALL and storage.device == device
        }
        movable = {key: storage for key, storage in freed.items() if storage.resizable()}
        asleep.freed += sum(storage.nbytes() for storage in freed.values())
        asleep._keep(movable, caches, weights)
        if device.type == "cuda":  # once for all copies
            torch.cuda.synchronize(device)
        for key in freed.keys() - movable.keys():
            _give_pages_back(freed[key])
        for storage in movable.values():
            storage.resize_(0)
    for each in reachable(dropped):
        if isinstance(each, Blocked):
            asleep.freed += each.nbytes
            each.empty()
    release_unused(device)
    return asleep


def models_of(engine: Engine) -> list[Any]:
    """Returns the modules and weights of an engine's hosted models."""
    objects = reachable([engine.modules])
    return [part for each in objects if isinstance(each, HostedModel) for part in (each.module, each.weights)]


def held_bytes(engine: Engine, *others: Any) -> int:
    """Returns the bytes of all tensors that an engine and `others` hold, on the engine's device."""
    device = engine.state.lengths.device
    found = storages([engine, *others]).values()
    return sum(each.nbytes() for each in found if each.device == device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _all_zero(storages: Sequence[torch.UntypedStorage]) -> list[bool]:
    """Returns for each storage whether all its bytes are 0. Waits once for all of them."""
    found = [_bytes(storage).any().logical_not() for storage in storages]
    return torch.stack(found).tolist() if found else []


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    """Copies a storage to host memory. The copy of a GPU's storage is only queued, and its host memory is pinned."""
    there = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=there)
    return copy.copy_(_bytes(storage), non_blocking=there)


def _caches(objects: Iterable[object]) -> list[Tensor]:
    """Returns the tensors of all KV caches and recurrent states among the objects."""
    found: list[Tensor] = []
    for each in objects:
        if isinstance(each, PagedKVCache):
            found += [each.keys, each.values]
        elif isinstance(each, StateCache):
            found += [each.states, each.inputs]
        elif isinstance(each, HostedModel):
            found += [*each.keys, *each.values]
    return found


def _give_pages_back(storage: torch.UntypedStorage) -> None:
    """Sets a storage that torch cannot free to zero.

    On Linux its whole memory pages are also returned to the operating system. They are allocated again when used.
    """
    start, size, page = storage.data_ptr(), storage.nbytes(), mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + size) // page * page
    if sys.platform != "linux" or first >= last:
        _bytes(storage).zero_()
        return
    whole = _bytes(storage)
    whole[: first - start].zero_()
    whole[last - start :].zero_()
    status = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    if status:
        whole.zero_()
