"""Heartbeats: each rank tells the others that it is alive, how many exchanges it has begun, and why it gave up."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it for its own tools alone

BEAT = 0.25  # seconds between two heartbeats
LOST = 10.0  # seconds without a heartbeat after which a rank counts as dead; a busy host may delay a live one
_ABORT = "abort"
_ANSWERS = 2.0  # seconds to wait for the store: it never answers if its process is stopped


class Status(NamedTuple):
    """State that a rank reports to the others.

    Attributes:
        beat: a counter that grows while the process lives.
        exchanges: number of exchanges that the rank has begun.
        doing: description of the rank's present work, for error messages.
    """

    beat: int
    exchanges: int
    doing: str


class Monitor:
    """Sends and reads heartbeats in one thread of each rank, through a key-value store in the process of rank 0.

    Args:
        rank, size: index of this process, and number of processes.
        port: port of the store on this host. None: this rank creates the store.

    Attributes:
        port: port of the store.
        exchanges: number of exchanges that this rank has begun; set by `World`.
        doing: description of this rank's work, which the others read.
    """

    def __init__(self, rank: int, size: int, port: int | None) -> None:
        self._rank, self._size = rank, size
        self._store = TCPStore(
            "127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False, timeout=timedelta(seconds=LOST)
        )
        self.port: int = self._store.port
        self.exchanges, self.doing = 0, "starting"
        self._seen: dict[int, tuple[Status, float]] = {}
        self._cause: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fastspec-ranks", daemon=True)
        self._thread.start()

    def abort(self, cause: str) -> None:
        """Tells all ranks that this rank cannot go on. If several ranks tell a cause, the first cause is kept."""
        self._cause = self._cause or cause
        telling = threading.Thread(target=self._tell, args=(cause,), name="fastspec-ranks-abort", daemon=True)
        telling.start()
        telling.join(_ANSWERS)

    def _tell(self, cause: str) -> None:
        try:
            self._cause = self._store.compare_set(_ABORT, "", cause).decode()
        except RuntimeError:
            return  # rank 0 with the store has ended, and the other ranks notice that themselves

    @property
    def cause(self) -> str | None:
        """Reason why the group cannot go on. None while no rank has failed."""
        if self._cause is None:
            now = time.monotonic()
            # rank 0 first: while it is stopped, its store gives no heartbeats of the other ranks either
            seen = sorted(self._seen.items())
            lost = next(((rank, said) for rank, (said, since) in seen if now - since > LOST), None)
            if lost is not None:  # tell all ranks, because some may not have noticed and would wait for this rank
                self.abort(f"rank {lost[0]} gave no sign of life for {LOST:.0f} s; it was {lost[1].doing}")
        return self._cause

    def wait_for_cause(self, seconds: float) -> str | None:
        """Waits until a rank has told why the group cannot go on. Returns the cause. None: no cause in `seconds`."""
        end = time.monotonic() + seconds
        while self.cause is None and time.monotonic() < end:
            time.sleep(BEAT / 4)
        return self.cause

    def slowest(self) -> str:
        """Returns a text that names the other rank which has begun the fewest exchanges."""
        if not self._seen:
            return "another rank"
        rank, (status, _) = min(self._seen.items(), key=lambda item: (item[1][0].exchanges, item[0]))
        return f"rank {rank}, which is {status.doing}, at exchange {status.exchanges}"

    def close(self) -> None:
        """Ends the heartbeat thread."""
        self._closed.set()
        self._thread.join(LOST)

    def _watch(self) -> None:
        beat = 0
        while not self._closed.is_set():
            beat += 1
            try:
                self._exchange_signs(beat)
            except RuntimeError as error:  # error of the store, which has no narrower class
                if not self._closed.is_set():
                    text = str(error).splitlines()[0]
                    self._cause = self._cause or f"rank 0 has ended, because its store does not answer ({text})"
                return
            self._closed.wait(BEAT)

    def _exchange_signs(self, beat: int) -> None:
        mine = Status(beat, self.exchanges, self.doing)
        self._store.set(f"status/{self._rank}", json.dumps(mine))
        if self._cause is None and self._store.check([_ABORT]):
            self._cause = self._store.get(_ABORT).decode()
        now = time.monotonic()
        for rank in range(self._size):
            key = f"status/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            status = Status(*json.loads(self._store.get(key)))
            before = self._seen.get(rank)
            if before is None or before[0].beat != status.beat:
                self._seen[rank] = status, now
            else:
                self._seen[rank] = status, before[1]
