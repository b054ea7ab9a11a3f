"""The session of a generator: runs its calls and handles on one scheduler, in the caller's thread or in its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

from fastspec.distributed.following import Leader, Reader, RequestNumbers
from fastspec.distributed.ranks import Ranks
from fastspec.distributed.turns import Turns
from fastspec.engine.engine import Engine
from fastspec.engine.settings import Settings
from fastspec.engine.warmup import decode, warm_up_for
from fastspec.errors import UnsupportedOption
from fastspec.output import Stats
from fastspec.sampling.rules import synthetic_name
from fastspec.scheduling.calibrate import Calibration, calibrate
from fastspec.scheduling.calls import PreparedCall, check_valid
from fastspec.scheduling.delivery import Delivery
from fastspec.scheduling.draft_length import Choice, DraftPlan
from fastspec.scheduling.format_trial import FormatTrial
from fastspec.scheduling.handle import Handle
from fastspec.scheduling.loop import Loop
from fastspec.scheduling.messages import Joining, Message
from fastspec.scheduling.requests import lengths_of
from fastspec.scheduling.scheduler import Scheduler

Emitted = dict[int, list[int]]


class Session:
    """Runs calls on one scheduler, from the making of a generator to its close.

    A call that is alone makes its steps itself, in its caller's thread. From the first `submit`, or the first
    call that comes while another one runs, a thread makes all steps (`Loop`), and calls and handles go on together.

    Args:
        scheduler: what runs them.
        settings: that the generator was made with.
        drafting: how many drafts the steps of a call make.
        progress: show progress bars.
        ranks: that make every call alike; several make one call at a time.
        trial: of the draft's format, made before one of the first calls; None: there is none.

    Attributes:
        loop: the thread that steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        drafting: DraftPlan,
        progress: bool,
        ranks: Ranks | None = None,
        trial: FormatTrial | None = None,
    ) -> None:
        self._scheduler: Scheduler | None = scheduler  # None once the session is closed
        self.ranks = ranks or Ranks.alone()
        self.settings, self.drafting, self.progress = settings, drafting, progress
        rows, longest = self.rows, (settings.max_length, 0)
        several = self.ranks.size > 1
        self._numbers = RequestNumbers()  # by which ranks name requests to each other
        self._leader = Leader(self.ranks.world, self._numbers) if several and self.ranks.first else None
        loaded = self.ranks.world.wait_for_all if several else lambda: None
        self.trial = trial

        # for calls that others may join; the loop does not know of this object, which would else outlive its last user
        def make_ready(joining: Joining) -> None:
            call, choice = joining.call, joining.choice
            if trial is not None:
                _try_formats(trial, scheduler, call, choice, drafting)
            # for the longest rows too, so that a call that joins while rows run finds its steps captured
            for lengths in dict.fromkeys((lengths_of(call.requests), longest)):
                _make_ready(scheduler, rows, choice, lengths, progress, loaded)

        hooks: dict[str, Any] = {}
        if several:
            hooks = {"guarded": self.ranks.stepping, "on_end": self._numbers.forget}
        if self._leader is not None:
            hooks["before_turn"] = self._leader.tell
        self.loop = Loop(scheduler, make_ready, **hooks)
        self._joining = threading.Lock()  # nothing joins while the session is being closed
        self._calls: set[Delivery] = set()  # that callers of `run` wait for

    @property
    def scheduler(self) -> Scheduler:
        """What runs the calls.

        Raises:
            RuntimeError: the session is closed.
        """
        self.check_open()
        assert self._scheduler is not None, "it is open"
        return self._scheduler

    def check_open(self) -> None:
        """Raises RuntimeError where the session is closed, or its thread is in another process."""
        if self._scheduler is None:
            raise RuntimeError("this generator is closed; make a new one")
        self.loop.check_here()

    @property
    def engine(self) -> Engine:
        """What the scheduler runs on."""
        return self.scheduler.engine

    @property
    def in_use(self) -> bool:
        """Whether a call or a handle is not at its end."""
        return bool(self._calls) or not self.loop.idle

    @contextmanager
    def alone(self) -> Iterator[Scheduler]:
        """The scheduler, for work that needs the device for itself.

        Raises:
            RuntimeError: a call or a handle goes on, the session is closed, or other ranks follow this one.
        """
        scheduler = self.scheduler
        if self.leads:
            raise RuntimeError("this is for all ranks alike, and they follow rank 0 from its first submit() on")
        if not self.loop.turn.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; wait for it")
        try:
            if self.in_use:
                raise RuntimeError("this generator is in use by other calls or handles; wait for them, or cancel them")
            yield scheduler
        finally:
            self.loop.turn.release()

    @property
    def leads(self) -> bool:
        """Whether the other ranks follow this one: calls are made here alone."""
        return self.ranks.size > 1 and self.loop.running

    def guarded(self) -> AbstractContextManager[None]:
        """While it lasts, an error of this rank alone ends a call that all ranks make."""
        return nullcontext() if self.leads else self.ranks.guarded("generating")

    def check_submits(self) -> None:
        """Checks that `submit` may be called here.

        Raises:
            UnsupportedOption: other ranks share the model, and this is not the one that they follow.
            RankFailed: one of them has failed.
            RuntimeError: a call that all ranks make goes on.
        """
        if self.ranks.size == 1:
            return
        self.ranks.world.check()
        if not self.ranks.first:
            raise UnsupportedOption(
                f"submit() is for rank 0, and this is rank {self.ranks.world.rank}: call follow() here, which makes "
                "the steps of what rank 0 submits"
            )
        if self._calls and not self.loop.running:
            raise RuntimeError("a call that all ranks make goes on; submit when it has ended")

    def follow(self, reader: Reader) -> None:
        """Makes every step that rank 0 makes, until it closes its generator.

        Args:
            reader: of what rank 0 tells.

        Raises:
            UnsupportedOption: there are no other ranks, or this is rank 0.
            RankFailed: a rank has failed.
            RuntimeError: a call goes on here.
        """
        if self.ranks.size == 1 or self.ranks.first:
            raise UnsupportedOption("follow() is for the ranks behind rank 0, which submits; here call submit()")
        self.ranks.world.check()
        with self._joining, self.alone():
            turns = Turns(self.ranks.world)
        with closing(turns), self.ranks.guarded("following rank 0"):
            turns.begin()
            messages: list[Message] = []
            while None not in messages:
                messages = reader.read(turns.next(), self._numbers)
                self.loop.make_turn(messages)
                self.ranks.world.check()
            turns.end()

    def prepared(self, make: Callable[[], PreparedCall], submitted: bool, stored_tokenizer: bool) -> PreparedCall:
        """A call, once all ranks have made it alike; or of this rank alone, where the others follow it.

        Args:
            submitted: it is a submit's.
            stored_tokenizer: it brings no tokenizer but the checkpoint's.

        Raises:
            UnsupportedOption: it brings one, which the ranks that follow do not have; or as `Ranks.agreed_call`.
        """
        if self.ranks.size == 1:
            return make()
        if not (submitted or self.leads):
            return self.ranks.agreed_call(make, lambda call: (call.requests, call.options))
        if not stored_tokenizer:
            raise UnsupportedOption(
                "a tokenizer of its own does not go with submit() and tensor_parallel, for the other ranks have the "
                "checkpoint's alone: leave tokenizer out, or make the call with generate() on all ranks alike"
            )
        return make()

    def submit(self, call: PreparedCall) -> Handle:
        """Lets a call of one prompt join what runs; from any thread.

        Raises:
            UnsupportedOption: it has several.
            OutOfPages: it needs more pages than there are.
            RuntimeError: the session is closed.
        """
        if (rows := len(call.requests)) != 1:
            raise UnsupportedOption(f"submit takes one prompt and one text of it, got {rows}; submit each")
        delivery = Delivery(call.requests)
        self._join(call, delivery)

        def stats() -> Stats:
            return self.stats(call, delivery.started, delivery.ended or time.perf_counter())

        return Handle(call, delivery, lambda: self.loop.leave(call.requests), stats)

    def _join(self, call: PreparedCall, delivery: Delivery) -> None:
        joining = Joining(call, self.drafting.for_call(call.options), delivery)
        with self._joining:
            for request in call.requests:
                self.scheduler.check(request)
            self.loop.join(joining)

    def warm_up(
        self,
        choice: Choice,
        length: int,
        loaded: Callable[[], None] = lambda: None,
        compilers: Executor | None = None,
    ) -> None:
        """Captures the steps that calls with such drafts may need.

        Args:
            choice: drafts of the calls.
            length: tokens of the longest row.
            loaded: waits for weights that another thread still fills.
            compilers: of `Engine.compile`.
        """
        with self.alone() as scheduler, self.ranks.guarded("warming up"):
            for shortest in dict.fromkeys((0, length)):  # prompts of any length, and long ones alone
                warm_up_for(
                    scheduler.engine,
                    self.rows,
                    choice,
                    length,
                    shortest,
                    progress=self.progress,
                    prompts=not shortest,
                    loaded=lambda: self._all_ready(loaded),
                    compilers=compilers,
                )

    def run(self, call: PreparedCall) -> Iterator[Emitted]:
        """Runs a call to its end; yields what each step, or a few, emitted, by the row's index.

        Raises:
            RuntimeError: the session is closed, or a step failed.
            InvalidLogits: a row has failed; the others are whole.
        """
        delivery = Delivery(call.requests)
        with self._joining:
            self.check_open()
            here = not self.in_use and not self.loop.running
            if not here and self.ranks.size > 1 and not self.leads:
                raise RuntimeError("this generator is in use by another call; several ranks make one call at a time")
            self._calls.add(delivery)
        try:
            if here:
                with self.ranks.guarded("generating"):
                    yield from self._step_here(call, delivery)
            else:
                self._join(call, delivery)
                yield from delivery.follow(0)
        finally:
            self._calls.discard(delivery)
            self.loop.leave(call.requests)
        check_valid(call.requests, call.options.copies)

    def _step_here(self, call: PreparedCall, delivery: Delivery) -> Iterator[Emitted]:
        """Makes the steps of a call, until the loop's thread does."""
        choice, steps = self.drafting.for_call(call.options), None
        try:
            while True:
                with self.loop.turn:
                    if self.loop.running:
                        break
                    if steps is None:
                        if self.trial is not None:
                            _try_formats(self.trial, self.scheduler, call, choice, self.drafting)
                        self._make_ready(call, choice)
                        steps = decode(self.scheduler, call.requests, call.options.stop_ids, choice)
                        self.loop.deliveries.update(dict.fromkeys(call.requests, delivery))
                    emitted = next(steps, None)
                if emitted is None:
                    return
                yield emitted
            if steps is None:
                self._join(call, delivery)
            yield from delivery.follow(0 if steps is None else delivery.wait(0))
        finally:
            if steps is not None:
                steps.close()

    def calibrate(self, call: PreparedCall) -> Calibration:
        """Tries every k on a call's prompts."""
        choice = self.drafting.for_calibration(call.options)
        with self.alone() as scheduler, self.ranks.guarded("calibrating"):
            self._make_ready(call, choice)
            return calibrate(scheduler, call.requests, call.options.stop_ids, choice)

    def _make_ready(self, call: PreparedCall, choice: Choice) -> None:
        rows, lengths = min(len(call.requests), self.rows), lengths_of(call.requests)
        _make_ready(self.scheduler, rows, choice, lengths, self.progress, self.ranks.world.wait_for_all)

    def _all_ready(self, loaded: Callable[[], None]) -> None:
        """Waits for this rank's weights and for the other ranks: devices must not wait for one that compiles."""
        loaded()
        self.ranks.world.wait_for_all()

    @property
    def rows(self) -> int:
        """Rows that decode at once."""
        return self.settings.layout.batch

    def stats(self, call: PreparedCall, start: float, end: float) -> Stats:
        """What a call has done, and how long it took: times of `time.perf_counter`."""
        rows, choice = tuple(request.stats() for request in call.requests), self.drafting.for_call(call.options)
        threads = self._scheduler and self._scheduler.engine.threads
        return Stats.of(
            rows,
            choice.k,
            end - start,
            synthetic=synthetic_name(self.settings.verification),
            auto=choice.note,
            exact=self.settings.exact,
            threads=threads.now if threads else None,
            same_text_on=self.ranks.same_text_on,
            draft_format=None if self.trial is None else str(self.trial),
        )

    def close(self) -> None:
        """Cancels handles, waits for the device and lets the scheduler go, with all its buffers.

        Closing twice is fine.

        Raises:
            RuntimeError: a call is still running.
        """
        with self._joining:
            if self._scheduler is None:
                return
            if self._calls or not (self.loop.running or self.loop.turn.acquire(blocking=False)):
                raise RuntimeError("this generator is in use by another call; close it after that call")
            scheduler, self._scheduler = self._scheduler, None
        try:
            self.loop.stop()
            if self._leader is not None:
                self._leader.end()
            scheduler.engine.finish()
        finally:
            if not self.loop.running:
                self.loop.turn.release()
            self.ranks.close()


def _try_formats(
    trial: FormatTrial, scheduler: Scheduler, call: PreparedCall, choice: Choice, drafting: DraftPlan
) -> None:
    """Tries the formats of the draft on a call that is about to begin, if it is time."""
    rows = min(len(call.requests), scheduler.engine.state.batch)

    def make_ready(choice: Choice, lengths: tuple[int, int]) -> None:
        _make_ready(scheduler, rows, choice, lengths, progress=False)

    trial.before(scheduler, call.requests, choice, call.options.stop_ids, make_ready, drafting)


def _make_ready(
    scheduler: Scheduler,
    rows: int,
    choice: Choice,
    lengths: tuple[int, int],
    progress: bool,
    loaded: Callable[[], None] = lambda: None,
) -> None:
    warm_up_for(scheduler.engine, rows, choice, *lengths, progress=progress, loaded=loaded)
