"""The processes that share one model: how they find each other, exchange CPU tensors, and notice failures."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.distributed.monitor import LOST, Monitor
from fastspec.errors import RankFailed

PATIENCE = 20.0  # seconds by which a rank may reach an exchange later than the others
STARTING = 600.0  # the same while generators are constructed
_SLICE = 0.25  # seconds between two checks of the other ranks while an exchange is awaited
_TELLING = LOST + 1.5  # seconds in which a rank whose connection broke may still learn the cause


class World:
    """Ranks 0..size-1, one process each, all on one host.

    Args:
        rank, size: index of this process, and number of processes.
        group: gloo group of all processes. None for one process alone.
        patience: seconds that ranks wait in an exchange for a later rank. After that time the later rank has failed.

    Attributes:
        rank, size, group, patience: see Args.
        local_rank: index of this process on its host, and of its GPU.
    """

    def __init__(self, rank: int, size: int, group: Any = None, patience: float = PATIENCE) -> None:
        self.rank, self.size, self.local_rank = rank, size, rank
        self.group, self.patience = group, patience
        self._monitor: Monitor | None = None
        self._failed: str | None = None
        if size > 1:
            port = Monitor(rank, size, None) if rank == 0 else None
            told = self.share_number(0.0 if port is None else float(port.port))
            self._monitor = port or Monitor(rank, size, int(told))

    @classmethod
    def alone(cls) -> World:
        """Returns a world of one process."""
        return cls(0, 1)

    @classmethod
    def meet(cls, patience: float = PATIENCE) -> World:
        """Waits for all processes that torchrun or the caller started, and returns their world.

        Without a process group the world is this process alone.
        """
        if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
            return cls.alone()
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=STARTING))
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return cls.alone()
        group = dist.new_group(list(range(size)), backend="gloo", timeout=timedelta(seconds=STARTING))
        return cls(rank, size, group, patience)

    def close(self) -> None:
        """Ends the heartbeats. The process group stays until the process ends."""
        if self._monitor is not None:
            self._monitor.close()

    def gather(self, tensor: Tensor, patience: float | None = None) -> list[Tensor]:
        """Gathers CPU tensors from all ranks, in rank order. All these tensors have the same shape and dtype.

        Args:
            tensor: tensor of this rank.
            patience: seconds to wait for the other ranks. None: the patience of the world.

        Raises:
            RankFailed: a rank did not answer within `patience`, or has ended.
        """
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(lambda: self.group.allgather([found], [tensor]), patience)
        return found

    def gather_bytes(self, data: bytes, patience: float | None = None) -> list[bytes]:
        """Gathers bytes from all ranks, in rank order. Their lengths may differ. For arguments see `gather`."""
        if self.size == 1:
            return [data]
        lengths = self.gather(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), patience)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0") or b"\0"), dtype=torch.uint8)
        found = self.gather(padded, patience)
        return [bytes(each[: int(length)].tolist()) for each, length in zip(found, lengths, strict=True)]

    def share_number(self, number: float) -> float:
        """Sends the `number` of rank 0 to all ranks, and returns it. All ranks call it."""
        if self.size == 1:
            return number
        words = self.gather(torch.tensor(list(struct.pack("<d", number)), dtype=torch.uint8, device="cpu"), STARTING)
        (shared,) = struct.unpack("<d", bytes(words[0].tolist()))
        return float(shared)

    def share_seconds(self, seconds: float | None) -> float | None:
        """Returns the `seconds` of rank 0 on all ranks, so that they decide equally. None if rank 0 passed None."""
        if self.size == 1:
            return seconds
        shared = self.share_number(-1.0 if seconds is None else seconds)
        return None if shared < 0 else shared

    def check(self) -> None:
        """Raises RankFailed if any rank is known to have failed."""
        if self._failed is None and self._monitor is not None and (cause := self._monitor.cause):
            self._failed = cause
        if self._failed is not None:
            raise RankFailed(f"{self._failed}. No rank can continue: end all processes and start them again")

    def launched(self) -> None:
        """Counts a launched step. Other ranks read the count to see how far this rank is."""
        if self._monitor is not None:
            self._monitor.exchanges += 1

    def waiting(self, seconds: float) -> None:
        """Checks the other ranks while this rank waits for the result of a step.

        Args:
            seconds: time that it has waited so far.

        Raises:
            RankFailed: a rank has failed, or `seconds` exceeds the patience.
        """
        self.check()
        if seconds > self.patience:
            self._give_up()

    def wait_for_all(self) -> None:
        """Waits until every rank has called this method. Loading and compiling may take longer on some ranks."""
        self.gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), STARTING)

    def doing(self, what: str) -> None:
        """Sets the description of this rank's work, for error messages of other ranks."""
        if self._monitor is not None:
            self._monitor.doing = what

    @contextmanager
    def guarded(self, what: str, symmetric: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Context in which an error of this rank ends the work of all ranks. Errors of other ranks name its cause.

        Args:
            what: description of the work.
            symmetric: errors that all ranks raise at the same point. They do not end the work of the others.
        """
        if self.size == 1:
            yield
            return
        self.check()
        self.doing(what)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, (*symmetric, GeneratorExit)):
                self.abort(error)
            raise
        finally:
            self.doing(f"past {what}")

    def abort(self, error: BaseException) -> None:
        """Tells all ranks that this rank has failed with `error`."""
        told = str(error).splitlines()
        cause = f"rank {self.rank} raised {type(error).__name__}: {told[0] if told else ''}"
        if isinstance(error, RankFailed) and self._failed is not None:
            cause = self._failed
        if self._monitor is not None:
            self._monitor.abort(cause)
        self._failed = self._failed or cause

    def _finish(self, begin: Callable[[], Any], patience: float | None) -> None:
        """Begins an exchange, and waits until it is complete or a rank has failed.

        Args:
            begin: starts a collective operation of torch, and returns its `Work`.
            patience: see `gather`.
        """
        self.check()
        if self._monitor is not None:
            self._monitor.exchanges += 1
        end = time.monotonic() + (self.patience if patience is None else patience)
        work = None
        while True:
            try:
                work = begin() if work is None else work
                work.wait(timedelta(seconds=_SLICE))
                return
            except RuntimeError as error:  # the wait ended before the exchange, or the exchange failed
                if work is None or work.is_completed():
                    raise self.broken(error) from error
            self.check()
            if time.monotonic() > end:
                self._give_up()

    def _give_up(self) -> None:
        """Ends the work of all ranks, because one is too late."""
        slowest = "another rank" if self._monitor is None else self._monitor.slowest()
        self._failed = f"rank {self.rank} waited too long for {slowest}; it hangs, or it makes other calls"
        if self._monitor is not None:
            self._monitor.abort(self._failed)
        self.check()

    @property
    def port(self) -> int:
        """Port of the heartbeat store on this host."""
        assert self._monitor is not None, "one rank has nobody to tell of itself"
        return self._monitor.port

    def broken(self, error: RuntimeError) -> RankFailed:
        """Returns RankFailed for a broken connection to another rank. Waits for the cause that a rank may tell.

        Args:
            error: the error of the connection.
        """
        cause = self._monitor.wait_for_cause(_TELLING) if self._monitor is not None else None
        if cause is None and self._monitor is not None:
            cause = f"the connection to another rank broke, perhaps to {self._monitor.slowest()}"
        self._failed = self._failed or cause or str(error).splitlines()[0]
        return RankFailed(f"{self._failed}. No rank can continue: end all processes and start them again")
