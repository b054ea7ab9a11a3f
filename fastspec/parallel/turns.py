"""Messages of rank 0 to the ranks that follow it, before each step: texts in order, each read once by every rank."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it for its own tools alone

from fastspec.errors import RankFailed
from fastspec.parallel.monitor import LOST
from fastspec.parallel.world import World

_NAP = 0.004  # seconds between two looks while nothing is told for long; shorter at first
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
        key, begun = f"turn/{self._number}", time.monotonic()
        try:
            while not self._store.check([key]):  # not `wait`, whose every timeout torch writes to stderr
                self._world.check()
                time.sleep(min(_NAP, (time.monotonic() - begun) / 8))
            found = self._store.get(key).decode()
        except RankFailed:
            raise
        except RuntimeError as error:  # the store is gone
            raise self._world.broken(error) from error
        self._number += 1
        if self._number % _SEEN == 0:
            self._store.set(f"seen/{self._world.rank}", str(self._number))
        return found

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
