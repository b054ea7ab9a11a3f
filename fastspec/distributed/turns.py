"""Messages of rank 0 to the other ranks before each step: an ordered log of texts that every rank reads once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it for its own tools alone

from fastspec.distributed.monitor import LOST
from fastspec.distributed.world import World

_NAP = 0.004  # upper limit of the seconds between two reads while no message comes; reads are more frequent at first
_LOOK = 0.25  # seconds between two checks of the other ranks while no message comes
_SEEN = 64  # a follower reports its position after this many turns; rank 0 deletes texts that all have read


class Turns:
    """One end of the message log, which rank 0 writes and the other ranks read. The heartbeats' key-value store has it.

    A connection to the store answers one request at a time. So this class has its own connection: waiting here must not
    delay heartbeats.

    Args:
        world: all ranks; more than one.
    """

    def __init__(self, world: World) -> None:
        self._world, self._number, self._forgotten = world, 0, 0
        self._over = False
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        self._found: SimpleQueue[str | RuntimeError] = SimpleQueue()
        self._reading = threading.Thread(target=self._read, name="fastspec-turns", daemon=True)
        self._store = TCPStore(
            "127.0.0.1", world.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LOST)
        )

    def begin(self) -> None:
        """Tells rank 0 that this rank has begun to read the log."""
        self._store.set(f"follows/{self._world.rank}", "")

    def tell(self, text: str) -> None:
        """Appends a text to the log, for all other ranks.

        Raises:
            RankFailed: a rank has failed.
        """
        self._world.check()
        self._store.set(f"turn/{self._number}", text)
        self._number += 1
        if self._number % _SEEN == 0:
            self._forget()

    def next(self) -> str:
        """Waits for the next text of the log, and returns it.

        Raises:
            RankFailed: a rank has failed meanwhile.
        """
        if not self._reading.is_alive():
            self._reading.start()
        self._wanted.put(self._number)
        while True:
            try:
                found = self._found.get(timeout=_LOOK)
                break
            except Empty:
                self._world.check()
        if isinstance(found, RuntimeError):  # the process with the store has ended
            raise self._world.broken(found) from found
        self._number += 1
        if self._number % _SEEN == 0:
            self._store.set(f"seen/{self._world.rank}", str(self._number))
        return found

    def _read(self) -> None:
        """Reads the turns whose numbers are in `_wanted`, in a thread of its own.

        A read never returns if the process with the store has stopped. Only this thread then waits for it.
        """
        while (number := self._wanted.get()) is not None:
            try:
                self._found.put(self._read_one(f"turn/{number}"))
            except RuntimeError as error:
                self._found.put(error)

    def _read_one(self, key: str) -> str:
        begun = time.monotonic()
        while not self._store.check([key]):  # not `wait`, because torch prints each of its timeouts to stderr
            time.sleep(min(_NAP, (time.monotonic() - begun) / 8))
            if self._over:
                raise RuntimeError("nobody waits for it")
        return self._store.get(key).decode()

    def close(self) -> None:
        """Ends the reading thread."""
        self._over = True
        self._wanted.put(None)

    def end(self) -> None:
        """Tells rank 0 that this rank has read the whole log."""
        self._store.set(f"ended/{self._world.rank}", "")

    def wait_for_end(self) -> None:
        """Waits until all other ranks have called `end`, at most LOST seconds.

        Rank 0 calls this method before its process ends, because the store with the log ends with that process.
        """
        until = time.monotonic() + LOST
        for rank in range(1, self._world.size):
            while self._store.check([f"follows/{rank}"]) and not self._store.check([f"ended/{rank}"]):
                if time.monotonic() > until:
                    return
                time.sleep(0.01)

    def _forget(self) -> None:
        others = [f"seen/{rank}" for rank in range(1, self._world.size)]
        if not all(self._store.check([each]) for each in others):
            return
        read = min(int(self._store.get(each)) for each in others)
        for number in range(self._forgotten, read):
            self._store.delete_key(f"turn/{number}")
        self._forgotten = read
