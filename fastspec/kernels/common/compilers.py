"""`Compilers` and `Behind`: executors that compile Triton kernels in several processes.

Triton's compiler is Python code, so threads of one process would run in turn.
"""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from inspect import getclosurevars
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as first_of
from pathlib import Path
from typing import Any, Final

from fastspec.kernels.common.compile_jobs import EARLY_PART, NotSendable, is_cached, job_of, launcher_of

HERE: Final = 2  # number of kernels that this process compiles at a time; with more, threads would wait for each other
# kernels of sampled steps that take longest to compile, longest first (perf/results/compile.jsonl)
SLOWEST: Final = ("_distribution_kernel", "_end_kernel", "_draw_kernel")
LOOK: Final = 0.01  # seconds between two checks for a kernel that another process compiles
_NICE: Final = 10  # niceness of the processes after `Compilers.shutdown`, when no start of a generator waits for them
_LIMIT: Final = "/sys/fs/cgroup/cpu.max"  # file with the CPU limit: microseconds of CPU time per period, and the period
# seconds for one kernel; after that the compiling process counts as hung, and this process compiles the kernel
LONGEST: Final = 60.0
_BEGIN: Final = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[1])
from fastspec.kernels.common.compile_jobs import serve
serve(sys.argv[2], sys.argv[3], [int(end) for end in sys.argv[4:]])
"""


class KernelBehind(Future[Any]):
    """Future of a kernel that another process compiles in the background.

    The launch that needs the kernel calls `result`. `result` waits for the process. Then the calling thread itself
    reads the kernel from Triton's disk cache. So no other thread runs Triton or CUDA while a CUDA graph is captured.

    Args:
        compiling: function that calls Triton's compiler, which first looks the kernel up in the disk cache.
        hurry: function that moves its argument to the front of the queue of kernels to compile.
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
        """Moves this kernel to the front of the queue of kernels that no process compiles yet."""
        self._hurry(self)

    def result(self, timeout: float | None = None) -> Any:
        """Waits until the kernel is compiled, and returns it.

        Args:
            timeout: seconds to wait for the process. None: LONGEST seconds. After that time the calling thread compiles
                the kernel.

        Raises:
            RuntimeError: the kernel cannot be compiled. The message names it.
        """
        self.hurry()
        with suppress(TimeoutError):
            super().result(LONGEST if timeout is None else timeout)
        try:
            return self._compiling()
        except Exception as error:  # the compiler, the assembler and the driver raise errors of several kinds
            raise RuntimeError(f"the kernel {self.name} could not be compiled: {error}") from error


def keep(found: Any) -> None:
    """Puts a kernel that is still being compiled into Triton's in-memory cache, where launches look kernels up.

    A launch that finds the kernel there waits until it is compiled. With an unknown version of Triton nothing is
    stored. A launch then reads the kernel from the disk cache.

    Args:
        found: the kernel, as Triton's FutureKernel that contains a `KernelBehind`.
    """
    held = getclosurevars(found.finalize_compile).nonlocals
    with suppress(KeyError):
        held["kernel_cache"].setdefault(held["key"], found)


def _place(name: str) -> int:
    """Returns the index of a kernel's name in SLOWEST, or len(SLOWEST) if it is not there."""
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


class Behind(Executor):
    """Executor for Triton's compiler that compiles kernels in the background, in the processes of `Compilers`.

    Kernels started by `begin_early` are compiled at the same time as the kernels of `Compilers.submit`. Kernels started
    by `begin` are compiled after all these, so that they take no time of cores from them. A kernel that a launch needs
    does not wait for others. The threads of this executor only wait for the processes. They are daemons: the end of the
    program does not wait for them.

    Args:
        ask: function that has a process compile a job, and returns when it is compiled. Its arguments are the job, and
            True if `begin_early` started the kernel. The threads call it.
        count: number of threads.
        rank: index of this rank.
        ranks: number of ranks that submit the same kernels. Each rank first compiles every ranks-th kernel.

    Attributes:
        uncached: number of submitted kernels that were not in Triton's disk cache.
    """

    def __init__(self, ask: Callable[[bytes, bool], None], count: int, rank: int = 0, ranks: int = 1) -> None:
        self._ask, self._count, self._rank, self._ranks = ask, count, rank, ranks
        self.uncached = 0
        self._changing = threading.Condition()
        self._submitted: list[tuple[KernelBehind, bytes]] = []
        self._waiting: list[tuple[KernelBehind, bytes]] = []
        self._early = set[KernelBehind]()
        self._first_compiled = set[KernelBehind]()  # of `begin_early` and not compiled yet: the others wait for these
        self._needed = set[KernelBehind]()  # kernels that launches wait for
        self._running = 0  # threads that have not ended
        self._at_end: Callable[[], None] = lambda: None

    def submit(self, compiling: Callable[..., Any], /, *args: Any, **options: Any) -> KernelBehind:
        """Adds one call of Triton's compiler, `compiling()`, to those that the next `begin` or `begin_early` starts.

        Returns the future of the kernel. If the kernel is in the disk cache, no process compiles it.
        """
        kernel = KernelBehind(compiling, self._first)
        try:
            cached = is_cached(compiling)
            self.uncached += not cached
            job = None if cached else job_of(compiling)
        except NotSendable:
            job = None
        if job is None:  # the thread that launches the kernel reads it from the cache, or compiles it
            kernel.set_result(None)
        else:
            self._submitted.append((kernel, job))
        return kernel

    def begin_early(self) -> None:
        """Starts to compile the kernels that were submitted until now, on 1 / EARLY_PART of the processes.

        The kernels of SLOWEST come first, because the first sampled call waits for the one that ends last.
        """
        self._submitted.sort(key=lambda each: _place(each[0].name))
        early = {kernel for kernel, _ in self._submitted}
        self._early |= early
        with self._changing:
            self._first_compiled |= early
        self._begin(self._count // EARLY_PART)

    def begin(self) -> None:
        """Starts to compile the kernels that were submitted until now, after all kernels of `Compilers.submit`."""
        self._begin(self._count)

    def _begin(self, threads: int) -> None:
        jobs, self._submitted = self._submitted, []
        own = jobs[self._rank :: self._ranks]
        others = [job for number, job in enumerate(jobs) if number % self._ranks != self._rank]
        with self._changing:
            self._waiting += [*own, *reversed(others)]
            # a kernel that waits for early ones must not stand before them
            self._waiting.sort(key=lambda each: each[0] not in self._early | self._needed)
            more = max(0, min(threads - self._running, len(self._waiting)))
            self._running += more
        for _ in range(more):
            threading.Thread(target=self._work, name="fastspec-compile-behind", daemon=True).start()

    def cancel(self) -> None:
        """Drops the kernels that no process has begun to compile. Launches that need these kernels compile them."""
        with self._changing:
            dropped, self._waiting = self._waiting, []
            self._first_compiled -= {kernel for kernel, _ in dropped}
            self._changing.notify_all()
        for kernel, _ in dropped:
            kernel.set_result(None)

    def at_end(self, done: Callable[[], None]) -> None:
        """Calls `done` when no kernel is left in the queue or being compiled: at once, or later in another thread."""
        with self._changing:
            now = not self._running
            if not now:
                self._at_end = done
        if now:
            done()

    def _first(self, kernel: KernelBehind) -> None:
        with self._changing:
            self._needed.add(kernel)
            self._waiting.sort(key=lambda each: each[0] is not kernel)
            self._changing.notify_all()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            kernel, job = found
            try:
                self._ask(job, kernel in self._early)
            finally:
                kernel.set_result(None)
                with self._changing:
                    self._first_compiled.discard(kernel)
                    self._changing.notify_all()

    def _may_begin(self) -> bool:
        """True if the first kernel of the queue does not wait for others, and if the queue is empty."""
        if not self._waiting or not self._first_compiled:
            return True
        kernel = self._waiting[0][0]
        return kernel in self._early or kernel in self._needed

    def _next(self) -> tuple[KernelBehind, bytes] | None:
        """Waits until a kernel may begin, and takes it and its job from the queue. Returns None if the queue is empty.

        After None the calling thread must end, because it is counted as ended.
        """
        with self._changing:
            self._changing.wait_for(self._may_begin)
            if self._waiting:
                return self._waiting.pop(0)
            self._running -= 1
            last = not self._running
        if last:
            self._at_end()
        return None


class Compilers(Executor):
    """Executor for Triton's compiler, with threads of this process and with compiling processes.

    The compiling processes start with the first kernel that is not in Triton's disk cache. A compiling process compiles
    a kernel and writes it to the disk cache. A thread of this process waits for that, and reads the kernel from the
    cache. If a compiling process cannot compile a kernel, the thread does. The compiling processes are forks of a fresh
    interpreter that has imported only the kernels. It has one thread and has not used a GPU. Unless `now` is True,
    threads of this process compile HERE kernels at a time until a compiling process is ready.

    Ranks of one machine need the same kernels. Each rank first compiles every ranks-th kernel. Then it goes through the
    others, compiles those that no rank has begun, and reads the rest from the cache. So every kernel is compiled once.

    Args:
        count: number of compiling processes. 0: only threads compile.
        kernels: full name of the module that imports all kernels.
        now: True to start the compiling processes at once. False to start them with the first kernel that is not
            cached.
        rank: index of this rank.
        ranks: number of ranks. All submit the same kernels in the same order.

    Attributes:
        behind: executor for kernels that are compiled in the background, also after `shutdown`. None: there are no
            compiling processes.
    """

    def __init__(self, count: int, *, kernels: str, now: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self._kernels = kernels
        self._rank, self._ranks, self._submitted = rank, ranks, 0
        self._later: list[tuple[Future[Any], Callable[[], Any]]] = []  # calls that other ranks make first, in order
        # sys.executable of a program that embeds Python would start that program
        able = hasattr(os, "fork") and "python" in os.path.basename(sys.executable or "")
        self._count = count if able else 0
        # free compilers: a connection to a process, or None, which stands for a thread of this process
        self._places: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._launchers: set[str] = set()  # results of `launcher_of` that a process was already asked to make
        self._starting = 0  # number of processes that have not answered yet
        self._living = 0  # number of processes that are ready; if there are any, this process compiles nothing itself
        self._threads = ThreadPoolExecutor(HERE + self._count, "fastspec-compile")
        self._not_begun = 0  # kernels of `submit` that wait for a free compiler
        self._all_begun = threading.Condition()
        self._nobody_waits = False  # True after `shutdown`
        self.behind = Behind(self._compile_behind, self._count, rank, ranks) if self._count else None
        self._beginning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: threading.Thread | None = None
        if not now or not self._count:
            self._compile_here()
        if now:
            self.begin()
        self._preparing = threading.Thread(target=_prepare, name="fastspec-compile-prepare", daemon=True)
        self._preparing.start()

    def prepared(self) -> None:
        """Waits until Triton is initialised in this process. The constructor started this in a thread."""
        self._preparing.join()

    def submit(self, compiling: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Queues one call of Triton's compiler, `compiling()`, and returns the future of its result.

        A kernel that is among the first ones of another rank is not queued now, but by `queue_rest`.
        """
        self._submitted += 1
        self._count_waiting(1)
        if self._submitted % self._ranks == self._rank:
            return self._threads.submit(self._compile, compiling)
        future: Future[Any] = Future()
        self._later.append((future, compiling))
        return future

    def queue_rest(self) -> None:
        """Queues the kernels that are among the first ones of other ranks, the last one first.

        Called after the last `submit`.
        """
        later, self._later = self._later, []
        for future, compiling in reversed(later):
            self._threads.submit(self._compile, compiling).add_done_callback(partial(_copy_outcome, future))

    def begin(self) -> None:
        """Starts the compiling processes, unless they run. They take jobs after they have imported the kernels."""
        with self._beginning:
            if self._process is not None or not self._count:
                return
            pipes = [Pipe() for _ in range(self._count)]
            ends = [theirs.fileno() for _, theirs in pipes]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            command = [sys.executable, "-c", _BEGIN, repr(sys.path), self._kernels, _cache(), *map(str, ends)]
            # in a session of their own, so that they end together and Ctrl-C reaches only this process
            try:
                self._process = subprocess.Popen(command, pass_fds=ends, start_new_session=True, **quiet)
            except OSError:  # no memory, or not permitted
                self._count = 0
                self._compile_here()
                return
            self._lower_priority()
            self._starting = len(pipes)
            for _, theirs in pipes:
                theirs.close()
            self._waiting = threading.Thread(target=self._welcome, args=([ours for ours, _ in pipes],), daemon=True)
            self._waiting.start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for all queued calls, then ends the compiling processes. May be called twice.

        If kernels of `behind` are left, the processes compile these before they end. `shutdown` does not wait for that.

        Args:
            wait: not read. `shutdown` always waits.
            cancel_futures: True to drop all queued calls, and all kernels of `behind`, that are not being compiled yet.
        """
        self.queue_rest()
        self._threads.shutdown(wait=True, cancel_futures=cancel_futures)
        self._count_waiting(-self._not_begun)  # those that were cancelled
        if self.behind is None:
            self._end()
            return
        with self._beginning:
            self._nobody_waits = True
            self._lower_priority()
        if cancel_futures:
            self.behind.cancel()
        self.behind.at_end(self._end)

    def _lower_priority(self) -> None:
        """Gives the compiling processes a lower priority than other programs, if they run after `shutdown`."""
        if self._process is not None and self._nobody_waits:
            with suppress(OSError):  # they have ended
                os.setpriority(os.PRIO_PGRP, self._process.pid, _NICE)

    def _end(self) -> None:
        """Kills the compiling processes, and closes the connections to them."""
        with self._beginning:
            self._count = 0
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._waiting is not None:
            self._waiting.join()
        with suppress(queue.Empty):
            while True:
                place = self._places.get_nowait()
                if place is not None:
                    place.close()

    def _compile_here(self) -> None:
        for _ in range(HERE):
            self._places.put(None)

    def _welcome(self, asked: list[Connection]) -> None:
        """Waits until each compiling process is ready or has ended. Adds each ready process to the free compilers.

        For each compiling process that has ended, a thread of this process is added instead.

        Args:
            asked: connections to the compiling processes.
        """
        while asked:
            for one in first_of(asked):
                assert isinstance(one, Connection), "nothing else was given"
                asked.remove(one)
                try:
                    one.recv_bytes()
                except (EOFError, OSError):
                    one.close()
                    self._answered(living=0)
                    self._places.put(None)
                else:
                    self._answered(living=1)
                    self._places.put(one)

    def _compile(self, compiling: Callable[[], Any]) -> Any:
        place, several = self._places.get(), self._ranks > 1
        self._count_waiting(-1)
        job, ended = _job(compiling) if several or place is not None else None, False
        try:
            with _alone(job) if several and job is not None else nullcontext():
                if place is not None and job is not None:
                    ended = not _asked(place, job, self._first_with(launcher_of(job)))
                if place is None and not is_cached(compiling):
                    self.begin()
                return compiling()
        finally:
            if ended:
                self._count_living(-1)
                self._places.put(None)
            elif place is not None or not self._living:
                self._places.put(place)

    def _compile_behind(self, job: bytes, early: bool) -> None:
        """Compiles a job in a process, and waits for it. Compiles nothing if all compiling processes have ended.

        Args:
            job: text of the job.
            early: True: begins as soon as a process is free. False: waits before that until all kernels of `submit`
                have begun to compile.
        """
        with self._all_begun:
            self._all_begun.wait_for(lambda: early or self._not_begun <= 0)
        self.begin()
        if (place := self._free_process()) is None:
            return
        with _alone(job) if self._ranks > 1 else nullcontext():
            if _asked(place, job, self._first_with(launcher_of(job))):
                self._places.put(place)
            else:
                self._count_living(-1)
                self._places.put(None)

    def _free_process(self) -> Connection | None:
        """Waits for a free compiling process. Returns the connection to it, or None if all of them have ended."""
        while (place := self._places.get()) is None:
            if not (self._starting or self._living):
                self._places.put(None)  # for the other threads that wait
                return None
        return place

    def _count_waiting(self, more: int) -> None:
        with self._all_begun:
            self._not_begun += more
            self._all_begun.notify_all()

    def _first_with(self, launcher: str) -> bool:
        """True at the first call for this launcher. A compiling process must then compile the launcher.

        launcher: key of the launcher, see `launcher_of`.
        """
        with self._beginning:
            first = launcher not in self._launchers
            self._launchers.add(launcher)
            return first

    def _answered(self, *, living: int) -> None:
        """Counts one compiling process that is ready (living=1), or that ended before it was ready (living=0)."""
        with self._beginning:
            self._starting -= 1
            self._living += living

    def _count_living(self, more: int) -> None:
        with self._beginning:
            self._living += more


def _prepare() -> None:
    """Initialises Triton before the first kernel: computes the hash of its files, and compiles its driver."""
    with suppress(Exception):  # a later use of Triton gets the same error
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        triton_key()
        _ = driver.active


def _copy_outcome(future: Future[Any], done: Future[Any]) -> None:
    """Copies the result, error or cancellation of the completed future `done` to `future`."""
    if done.cancelled():
        future.cancel()
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _job(compiling: Callable[[], Any]) -> bytes | None:
    """Returns the text of the job for a call of Triton's compiler. None if the call cannot be converted to text."""
    try:
        return job_of(compiling)
    except NotSendable:
        return None


def _asked(process: Connection, job: bytes, launcher: bool) -> bool:
    """Has a compiling process compile a job, and waits for it. Returns False if the process has ended, else True.

    Args:
        process: connection to the compiling process.
        job: text of the job.
        launcher: True to compile the kernel's launcher as well.
    """
    try:
        process.send_bytes(b"launcher" if launcher else b"")
        process.send_bytes(job)
        process.recv_bytes()
    except (EOFError, OSError):
        process.close()
        return False
    return True


@contextmanager
def _alone(job: bytes) -> Iterator[None]:
    """Context in which no other rank compiles this job. If one compiles it now, waits for it up to LONGEST seconds.

    The context holds a lock on a file. The operating system releases the lock at the end of the process. On file
    systems without locks several ranks may compile the same job.
    """
    path = os.path.join(_cache(), f"{hashlib.sha256(job).hexdigest()[:32]}.compiling")
    until = time.monotonic() + LONGEST
    try:
        os.makedirs(_cache(), exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        while not _locked(file) and time.monotonic() < until:
            time.sleep(LOOK)
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(file)


def _locked(file: int) -> bool:
    """Tries to lock a file. Returns True if this process now holds the lock, or if the file system has no locks."""
    import fcntl  # not available on Windows, which has no Triton either

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def of_this_machine(sharing: int = 1) -> int:
    """Returns the number of compiling processes for one rank: the usable cores divided by `sharing`.

    A container's CPU limit also limits this number, because a container may see more cores than it may use.

    Args:
        sharing: number of ranks on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" if there is no limit
        limit, period = map(int, Path(_LIMIT).read_text().split())
        cores = max(min(cores, limit // period), 1)
    return cores // sharing


def _cache() -> str:
    """Returns the directory of Triton's disk cache."""
    from triton import knobs

    return str(knobs.cache.dir)


def nothing_compiled() -> bool:
    """True if Triton's disk cache is empty, so every kernel must be compiled."""
    try:
        with os.scandir(_cache()) as entries:
            return next(entries, None) is None
    except OSError:
        return True
