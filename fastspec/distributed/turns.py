"""Messages of rank 0 to the ranks that follow it, before each step: texts in order, each read once by every rank."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it for its own tools alone

from fastspec.distributed.monitor import LOST
from fastspec.distributed.world import World

_NAP = 0.004  # seconds between two looks while nothing is told for long; shorter at first
_LOOK = 0.25  # seconds between two looks at the others while nothing is told
_SEEN = 64  # turns after which a follower says how far it is, and rank 0 forgets what all have read


class Turns:
    """One end of this message log: rank 0 writes, the others read. It uses the store of the ranks' signs of life.

    A store answers one request at a time on a connection, so this has a connection of its own: waiting here must not
    delay signs of life.

    Args:
        world: of all ranks, several.
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
        """Says that this rank follows."""
        self._store.set(f"follows/{self._world.rank}", "")

    def tell(self, text: str) -> None:
        """Tells all others a text, in the order of the calls.

        Raises:
            RankFailed: a rank has failed.
        """
        self._world.check()
        self._store.set(f"turn/{self._number}", text)
        self._number += 1
        if self._number % _SEEN == 0:
            self._forget()

    def next(self) -> str:
        """Waits for the next text.

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
        if isinstance(found, RuntimeError):  # the store is gone
            raise self._world.broken(found) from found
        self._number += 1
        if self._number % _SEEN == 0:
            self._store.set(f"seen/{self._world.rank}", str(self._number))
        return found

    def _read(self) -> None:
        """Reads the texts that are wanted, in a thread: the store of a process that is stopped never answers."""
        while (number := self._wanted.get()) is not None:
            try:
                self._found.put(self._read_one(f"turn/{number}"))
            except RuntimeError as error:
                self._found.put(error)

    def _read_one(self, key: str) -> str:
        begun = time.monotonic()
        while not self._store.check([key]):  # not `wait`, whose every timeout torch writes to stderr
            time.sleep(min(_NAP, (time.monotonic() - begun) / 8))
            if self._over:
                raise RuntimeError("nobody waits for it")
        return self._store.get(key).decode()

    def close(self) -> None:
        """Ends the thread that reads."""
        self._over = True
        self._wanted.put(None)

    def end(self) -> None:
        """Says that this rank has read all there is."""
        self._store.set(f"ended/{self._world.rank}", "")

    def wait_for_end(self) -> None:
        """Waits until those that follow have said so, or may be gone: with rank 0 its store ends, and all in it."""
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
