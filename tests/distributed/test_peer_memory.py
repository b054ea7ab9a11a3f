"""Memory for other processes: what the driver is asked for, in which order, and what is left where it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fastspec.distributed.peer_memory import IpcMemoryHandle, SharedMemory
from tests.helpers.ranks import Table

OWN, THEIRS, CONTEXT = 0x7F0000000000, 0x7E0000000000, 0x5500


class Driver:
    """A driver whose handle of a rank's memory is the rank, and by which that of rank r lies at THEIRS + r."""

    def __init__(self, rank: int, refuses: str = "") -> None:
        self.rank, self.refuses, self.calls = rank, refuses, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            plain = [each.value if isinstance(each, ctypes._SimpleCData) else None for each in arguments]
            self.calls.append((name, *[each for each in plain if each is not None]))
            if name == self.refuses:
                return 2
            self.answer(name, arguments)
            return 0

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        out = arguments[0]._obj if hasattr(arguments[0], "_obj") else None
        if name == "cuCtxGetCurrent":
            out.value = CONTEXT
        elif name == "cuMemAlloc_v2":
            out.value = OWN
        elif name == "cuIpcGetMemHandle":
            ctypes.memmove(ctypes.byref(out), bytes([self.rank + 1]) * 64, 64)
        elif name == "cuIpcOpenMemHandle_v2":
            out.value = THEIRS + bytes(arguments[1])[0] - 1
        elif name == "cuGetErrorString":
            arguments[1]._obj.value = b"out of memory"


def made(drivers: list[Driver]) -> list[SharedMemory | RuntimeError]:
    """Of each rank its memory, or the error that it got."""
    table = Table(len(drivers))

    def rank(number: int) -> SharedMemory | RuntimeError:
        def everyone(data: bytes) -> list[bytes]:
            return [bytes(each.tolist()) for each in table.gather(number, torch.tensor(list(data), dtype=torch.uint8))]

        try:
            return SharedMemory(4096, -3, everyone, number, drivers[number])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(drivers)) as pool:
        return list(pool.map(rank, range(len(drivers))))


def test_each_rank_opens_the_memory_of_the_others_and_closes_it_first() -> None:
    drivers = [Driver(rank) for rank in range(3)]
    memories = made(drivers)
    for rank, memory in enumerate(memories):
        assert isinstance(memory, SharedMemory)
        assert memory.addresses == [OWN if other == rank else THEIRS + other for other in range(3)]
        assert ("cuMemAlloc_v2", 4096) in drivers[rank].calls
        assert ("cuMemsetD32_v2", OWN, 2**32 - 3, 1024) in drivers[rank].calls
        drivers[rank].calls.clear()
        for _ in range(2):  # the second has nothing to do
            memory.close()
        others = [("cuIpcCloseMemHandle", THEIRS + other) for other in range(3) if other != rank]
        ends = [("cuCtxPushCurrent_v2", CONTEXT), *others, ("cuMemFree_v2", OWN), ("cuCtxPopCurrent_v2",)]
        assert drivers[rank].calls == ends


@pytest.mark.parametrize("refused", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_a_refusal_is_told_to_all_and_leaves_nothing(refused: str) -> None:
    drivers = [Driver(0), Driver(1, refused)]
    first, second = made(drivers)
    assert str(second).endswith(f"{refused}: out of memory (2)")
    if refused != "cuIpcOpenMemHandle_v2":  # all were told before any opened the others'
        assert str(first) == f"rank 1: {refused}: out of memory (2)"
        assert ("cuMemFree_v2", OWN) in drivers[0].calls
    freed = [("cuMemFree_v2", OWN)] if refused != "cuMemAlloc_v2" else []
    assert [call for call in drivers[1].calls if call[0] == "cuMemFree_v2"] == freed


def test_a_handle_is_as_long_as_the_driver_writes() -> None:
    assert ctypes.sizeof(IpcMemoryHandle) == 64
