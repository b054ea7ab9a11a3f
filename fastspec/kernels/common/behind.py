"""Kernels that processes compile while nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from inspect import getclosurevars
from typing import Any, Final

from fastspec.kernels.common.compile_jobs import NotSendable, is_cached, job_of

LONGEST: Final = 60.0  # seconds that a launch waits for the process; after that its own thread compiles the kernel


class KernelBehind(Future[Any]):
    """A kernel that a process compiles.

    `result` is called by the launch that needs the kernel. It waits for the process, and reads the kernel from Triton's
    disk cache in its own thread. So no other thread runs Triton or CUDA while a graph is captured.

    Args:
        compiling: the call of Triton's compiler.
        hurry: moves this kernel before those that no launch waits for.
    """

    def __init__(self, compiling: Callable[[], Any], hurry: Callable[[KernelBehind], None]) -> None:
        super().__init__()
        self._compiling, self._hurry = compiling, hurry

    @property
    def name(self) -> str:
        """Name of the kernel."""
        source = getclosurevars(self._compiling).nonlocals.get("src")
        return str(getattr(source, "name", "of unknown name"))

    def hurry(self) -> None:
        """Moves this kernel before those that no launch waits for."""
        self._hurry(self)

    def result(self, timeout: float | None = None) -> Any:
        """Returns the compiled kernel.

        Raises:
            RuntimeError: it cannot be compiled. The message names it.
        """
        self.hurry()
        with suppress(TimeoutError):
            super().result(LONGEST if timeout is None else timeout)
        try:
            return self._compiling()
        except Exception as error:  # the compiler, the assembler and the driver raise errors of several kinds
            raise RuntimeError(f"the kernel {self.name} could not be compiled: {error}") from error


def keep(found: Any) -> None:
    """Puts a kernel that is not compiled yet into Triton's cache of this process, where launches look it up.

    Such a launch waits for the kernel. With an unknown version of Triton a launch reads it from the disk cache instead.

    Args:
        found: Triton's FutureKernel of a `KernelBehind`.
    """
    held = getclosurevars(found.finalize_compile).nonlocals
    with suppress(KeyError):
        held["kernel_cache"].setdefault(held["key"], found)


class Behind(Executor):
    """Executor for Triton's compiler whose kernels are compiled by processes after all others.

    Its threads only wait for the processes. They are daemons: the end of the program does not wait for them.

    Args:
        ask: has a process compile a job, and returns after that. Called by the threads.
        count: number of threads.
        rank: number of this rank.
        ranks: number of ranks that submit the same kernels. A rank begins with its share.

    Attributes:
        uncached: number of submitted kernels that were not in Triton's disk cache.
    """

    def __init__(self, ask: Callable[[bytes], None], count: int, rank: int = 0, ranks: int = 1) -> None:
        self._ask, self._count, self._rank, self._ranks = ask, count, rank, ranks
        self.uncached = 0
        self._changing = threading.Lock()
        self._submitted: list[tuple[KernelBehind, bytes]] = []
        self._waiting: list[tuple[KernelBehind, bytes]] = []
        self._running = 0  # threads that have not ended
        self._at_end: Callable[[], None] = lambda: None

    def submit(self, compiling: Callable[..., Any], /, *args: Any, **options: Any) -> KernelBehind:
        """Queues one call of Triton's compiler, `compiling()`. `begin` starts the queue."""
        kernel = KernelBehind(compiling, self._first)
        try:
            cached = is_cached(compiling)
            self.uncached += not cached
            job = None if cached else job_of(compiling)
        except NotSendable:
            job = None
        if job is None:  # the thread that needs it reads or compiles it
            kernel.set_result(None)
        else:
            self._submitted.append((kernel, job))
        return kernel

    def begin(self) -> None:
        """Starts the threads, after the last `submit`."""
        jobs, self._submitted = self._submitted, []
        own = jobs[self._rank :: self._ranks]
        others = [job for number, job in enumerate(jobs) if number % self._ranks != self._rank]
        with self._changing:
            self._waiting += [*own, *reversed(others)]
            more = min(self._count - self._running, len(self._waiting))
            self._running += more
        for _ in range(more):
            threading.Thread(target=self._work, name="fastspec-compile-behind", daemon=True).start()

    def cancel(self) -> None:
        """Drops the kernels that no process has begun. A launch that needs one compiles it itself."""
        with self._changing:
            dropped, self._waiting = self._waiting, []
        for kernel, _ in dropped:
            kernel.set_result(None)

    def at_end(self, done: Callable[[], None]) -> None:
        """Calls `done` when no kernel is left: now, or later in another thread."""
        with self._changing:
            now = not self._running
            if not now:
                self._at_end = done
        if now:
            done()

    def _first(self, kernel: KernelBehind) -> None:
        with self._changing:
            self._waiting.sort(key=lambda each: each[0] is not kernel)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            kernel, job = found
            try:
                self._ask(job)
            finally:
                kernel.set_result(None)

    def _next(self) -> tuple[KernelBehind, bytes] | None:
        """Takes the next job. None: this thread shall end."""
        with self._changing:
            if self._waiting:
                return self._waiting.pop(0)
            self._running -= 1
            last = not self._running
        if last:
            self._at_end()
        return None
