"""The session of a generator: its scheduler, and who uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastspec.output import Stats
from fastspec.parallel.ranks import Ranks
from fastspec.runtime.calibrate import Calibration, calibrate
from fastspec.runtime.draft_plan import Choice, DraftPlan
from fastspec.runtime.engine import Engine
from fastspec.runtime.request import lengths_of
from fastspec.runtime.scheduler import Scheduler
from fastspec.runtime.settings import Settings
from fastspec.runtime.warmup import decode, warm_up_for
from fastspec.sampling.rules import synthetic_name
from fastspec.session.calls import Prepared, check_whole


@dataclass(slots=True, eq=False)
class Session:
    """Runs calls on one scheduler, one at a time, from the making of a generator to its close.

    Attributes:
        running: what runs them; None once it is closed.
        settings: that the generator was made with.
        drafting: how many drafts the steps of a call make.
        progress: show progress bars.
        ranks: that make every call alike.
    """

    running: Scheduler | None
    settings: Settings
    drafting: DraftPlan
    progress: bool
    ranks: Ranks = field(default_factory=Ranks.alone)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def scheduler(self) -> Scheduler:
        """What runs the calls.

        Raises:
            RuntimeError: the session is closed.
        """
        self.check_open()
        assert self.running is not None, "it is open"
        return self.running

    def check_open(self) -> None:
        """Raises RuntimeError where the session is closed."""
        if self.running is None:
            raise RuntimeError("this generator is closed; make a new one")

    @property
    def engine(self) -> Engine:
        """What the scheduler runs on."""
        return self.scheduler.engine

    @contextmanager
    def alone(self) -> Iterator[Scheduler]:
        """The scheduler, for one call at a time.

        Raises:
            RuntimeError: another call has it, or the session is closed.
        """
        scheduler = self.scheduler
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; wait for it, or make one per thread")
        try:
            yield scheduler
        finally:
            self._lock.release()

    def warm_up(self, choice: Choice, length: int, loaded: Callable[[], None] = lambda: None) -> None:
        """Captures the steps that calls with such drafts may come to.

        Args:
            choice: drafts of the calls.
            length: tokens of the longest row.
            loaded: waits for weights that another thread still fills.
        """
        with self.alone() as scheduler, self.ranks.guarded("warming up"):
            for shortest in dict.fromkeys((0, length)):  # prompts of any length, and long ones alone
                warm_up_for(
                    scheduler.engine,
                    self.settings.layout.batch,
                    choice,
                    length,
                    shortest,
                    progress=self.progress,
                    prompts=not shortest,
                    loaded=lambda: self._all_ready(loaded),
                )

    def run(self, call: Prepared) -> Iterator[dict[int, list[int]]]:
        """Runs a call to its end; yields what each step emitted, by the row's index.

        Raises:
            RuntimeError: another call is running.
            InvalidLogits: a row has failed; the others are whole.
        """
        choice = self.drafting.of(call.chosen)
        with self.alone() as scheduler, self.ranks.guarded("generating"):
            self._make_ready(call, choice)
            yield from decode(scheduler, call.requests, call.chosen.stop_ids, choice)
        check_whole(call.requests, call.chosen.copies)

    def calibrate(self, call: Prepared) -> Calibration:
        """Tries every k on a call's prompts."""
        choice = self.drafting.every(call.chosen)
        with self.alone() as scheduler, self.ranks.guarded("calibrating"):
            self._make_ready(call, choice)
            return calibrate(scheduler, call.requests, call.chosen.stop_ids, choice)

    def _make_ready(self, call: Prepared, choice: Choice) -> None:
        rows, lengths = min(len(call.requests), self.settings.layout.batch), lengths_of(call.requests)
        warm_up_for(self.engine, rows, choice, *lengths, progress=self.progress, loaded=self.ranks.world.meet)

    def _all_ready(self, loaded: Callable[[], None]) -> None:
        """Waits for this rank's weights and for the other ranks: devices must not wait for one that compiles."""
        loaded()
        self.ranks.world.meet()

    def stats(self, call: Prepared, start: float) -> Stats:
        """What a call has done since `start`, a time of `time.perf_counter`."""
        rows, seconds = tuple(request.stats() for request in call.requests), time.perf_counter() - start
        choice, threads = self.drafting.of(call.chosen), self.engine.threads
        synthetic, now = synthetic_name(self.settings.verification), threads.now if threads else None
        return Stats.of(rows, choice.k, seconds, synthetic, choice.note, self.settings.exact, now)

    def close(self) -> None:
        """Waits for the device and lets the scheduler go, with all its buffers. Closing twice is fine.

        Raises:
            RuntimeError: a call is still running.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; close it after that call")
        try:
            if self.running is not None:
                self.running.engine.finish()
            self.running = None
            self.ranks.close()
        finally:
            self._lock.release()
