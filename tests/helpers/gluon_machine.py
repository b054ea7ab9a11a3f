"""The program that runs, its memory and its copies, of the simulator of Gluon kernels: see `gluon_simulator`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import torch

from tests.helpers.gluon_values import OF_TORCH, Layout, Pointer, Shared, Values
from tests.helpers.limits import HANGS


class Machine:
    """The program that runs, and its asynchronous copies."""

    def __init__(self) -> None:
        self.ids, self.counts, self.late = (0, 0, 0), (1, 1, 1), True
        self.turn, self.stuck = threading.Condition(), threading.Event()
        self.failed: list[BaseException] = []
        self.open: list[Any] = []
        self.groups: deque[list[Any]] = deque()

    def copy(self, to: Shared, pointer: Pointer, mask: Values | None = None) -> None:
        value = load(pointer, mask, 0)
        if self.late:
            self.open.append((to, value))
        else:
            to.store(value)

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for to, value in self.groups.popleft():
                to.store(value)


MACHINE = Machine()


class Barrier:
    """A barrier in shared memory: a phase ends with so many arrivals, or when all bytes that it expects have come."""

    def __init__(self) -> None:
        self.phases, self.expected = 0, 0
        self.needed, self.arrived = 1, 0
        self.copies: list[tuple[Shared, Values]] = []

    def end(self) -> None:
        for to, value in self.copies:
            to.store(value)
        self.phases, self.expected, self.copies = self.phases + 1, 0, []
        MACHINE.turn.notify_all()

    def arrive(self) -> None:
        self.arrived = (self.arrived + 1) % self.needed
        if self.arrived == 0:
            self.end()

    def expect(self, nbytes: int) -> None:
        assert self.expected == 0, "a phase that expects bytes already"
        self.expected = nbytes

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is over: the one at hand has the other."""
        MACHINE.stuck.set()
        over = MACHINE.turn.wait_for(lambda: self.phases % 2 != parity or MACHINE.failed, HANGS)
        assert not MACHINE.failed, MACHINE.failed
        assert over, "warps wait for each other"


class Barriers:
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        return self.each[place]


class Described:
    """A tensor as the copy engine takes it: block by block, with zeros for what is not there."""

    def __init__(self, tensor: torch.Tensor, block: list[int]) -> None:
        pointer = pointer_to(tensor)
        self.array, self.kind, self.block = pointer.memory.reshape(tensor.shape), pointer.kind, block

    def at(self, place: list[int]) -> Values:
        value = np.zeros(self.block, self.array.dtype)
        firsts = [int(first) for first in place]
        there = self.array[tuple(slice(first, first + size) for first, size in zip(firsts, self.block, strict=True))]
        value[tuple(slice(size) for size in there.shape)] = there
        return Values(value, self.kind)


def engine_copy(described: Described, place: list[int], barrier: Barrier, to: Shared) -> None:
    """Lands at once, or when all has come that the barrier expects; till then nothing is there."""
    value = described.at(place)
    nothing = Shared(to.kind, to.shape)
    to.store(Values(nothing.array, to.kind) if MACHINE.late else value)
    barrier.copies.append((to, value))
    if sum(each.array.nbytes for _, each in barrier.copies) == barrier.expected:
        barrier.end()


def specialized(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    """The first part here, the others in threads; these begin as late as may be, or run as far as they can before."""
    failed = MACHINE.failed = []

    def worked(function: Any, given: tuple[Any, ...]) -> None:
        try:
            with MACHINE.turn, np.errstate(all="ignore"):
                function(*given)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            MACHINE.stuck.set()
            with MACHINE.turn:
                MACHINE.turn.notify_all()

    threads = [threading.Thread(target=worked, args=part, daemon=True) for part in parts[1:]]
    for thread in threads:
        MACHINE.stuck.clear()
        thread.start()
        if not MACHINE.late:
            MACHINE.stuck.wait(HANGS)
    try:
        worked(*parts[0])
    finally:
        for thread in threads:
            thread.join(HANGS)
    assert not failed, failed


def shared(kind: str, shape: list[int], layout: Any, value: Values | None = None) -> Any:
    return Barriers(shape[0]) if isinstance(layout, BarrierLayout) else Shared(kind, shape, value)


class BarrierLayout(Layout):
    """Of barriers."""


def load(pointer: Pointer, mask: Values | None = None, other: Any = 0, **_: Any) -> Values:
    at, seen = pointer.chosen(mask)
    if seen is None:
        return Values(pointer.memory[at], pointer.kind)
    rest = other.array if isinstance(other, Values) else np.asarray(other).astype(pointer.memory.dtype)
    return Values(np.where(seen, pointer.memory[at], rest), pointer.kind)


def store(pointer: Pointer, value: Values, mask: Values | None = None, **_: Any) -> None:
    assert value.kind == pointer.kind or pointer.kind == "int64", (value.kind, pointer.kind)
    at, seen = pointer.chosen(mask)
    values = np.broadcast_to(value.array, at.shape)
    if seen is None:
        pointer.memory[at] = values
    else:
        pointer.memory[at[seen]] = values[seen]


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """Its memory, from its first element to its last."""
    kind = OF_TORCH[tensor.dtype]
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,))
    if kind == "bfloat16":
        return Pointer(flat.view(torch.int16).numpy().view(np.uint16), kind)
    if kind == "float8e4nv":
        return Pointer(flat.view(torch.uint8).numpy(), kind)
    return Pointer(flat.numpy(), kind)
