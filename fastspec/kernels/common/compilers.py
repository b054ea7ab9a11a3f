"""Processes that compile Triton kernels: its frontend is Python, so threads of one process wait for each other."""

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
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as first_of
from pathlib import Path
from typing import Any, Final

from fastspec.kernels.common.compile_jobs import NotSendable, is_cached, job_of, launcher_of

HERE: Final = 2  # kernels that this process compiles at once; more would wait for each other
LOOK: Final = 0.01  # seconds between two looks at whether another process has compiled a kernel
_LIMIT: Final = "/sys/fs/cgroup/cpu.max"  # microseconds of all cores together, in a period of so many
LONGEST: Final = 60.0  # seconds that it may take: then it hangs, and this one compiles it as well
_BEGIN: Final = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[1])
from fastspec.kernels.common.compile_jobs import serve
serve(sys.argv[2], sys.argv[3], [int(end) for end in sys.argv[4:]])
"""


class Compilers(Executor):
    """Runs Triton's compiler in processes from the first kernel on that is not in its cache, and in two threads.

    A process writes to the cache on the disk, from which the thread that asked then reads. What a process cannot
    compile, that thread does. The processes are forks of one fresh interpreter, which has imported the kernels, has no
    other thread and no device.

    Ranks that share a machine need the same kernels. Each begins with its share of them, goes on with what the others
    have not come to, and reads the rest: every kernel is compiled once.

    Args:
        count: processes; 0: threads alone.
        kernels: the module that imports all kernels, by its full name.
        now: begin them at once, not with the first such kernel.
        rank, ranks: this one of so many, which ask for the same kernels in the same order.
    """

    def __init__(self, count: int, *, kernels: str, now: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self._kernels = kernels
        self._rank, self._ranks, self._submitted = rank, ranks, 0
        self._later: list[tuple[Future[Any], Callable[[], Any]]] = []  # the shares of others, as they came
        # another program that runs Python in itself would only be started once more
        able = hasattr(os, "fork") and "python" in os.path.basename(sys.executable or "")
        self._count = count if able else 0
        self._places: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: in this process
        self._launchers: set[str] = set()  # kinds of them that a process was asked for
        self._living = 0  # processes that are ready; while there are any, this one only asks them
        self._threads = ThreadPoolExecutor(HERE + self._count, "fastspec-compile")
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
        """Waits until this process has what Triton needs before its first kernel."""
        self._preparing.join()

    def submit(self, compiling: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Queues one call of Triton's compiler, which takes no arguments; the share of others waits for `all_told`."""
        self._submitted += 1
        if self._submitted % self._ranks == self._rank:
            return self._threads.submit(self._compile, compiling)
        future: Future[Any] = Future()
        self._later.append((future, compiling))
        return future

    def all_told(self) -> None:
        """Nothing else is queued for now: goes on with the share of others, beginning where they end."""
        later, self._later = self._later, []
        for future, compiling in reversed(later):
            self._threads.submit(self._compile, compiling).add_done_callback(partial(_passed_on, future))

    def begin(self) -> None:
        """Starts the processes, unless they are; they take jobs when they have imported the kernels."""
        with self._beginning:
            if self._process is not None or not self._count:
                return
            pipes = [Pipe() for _ in range(self._count)]
            ends = [theirs.fileno() for _, theirs in pipes]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            command = [sys.executable, "-c", _BEGIN, repr(sys.path), self._kernels, _cache(), *map(str, ends)]
            # in a session of its own: so that they end together, and an interrupt reaches only this process
            try:
                self._process = subprocess.Popen(command, pass_fds=ends, start_new_session=True, **quiet)
            except OSError:  # no memory, or no right to
                self._count = 0
                self._compile_here()
                return
            for _, theirs in pipes:
                theirs.close()
            self._waiting = threading.Thread(target=self._welcome, args=([ours for ours, _ in pipes],), daemon=True)
            self._waiting.start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes, after what is queued."""
        self.all_told()
        self._threads.shutdown(wait=True, cancel_futures=cancel_futures)
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
        """Makes each process available once it says that it is ready; in place of one that ends, this one compiles."""
        while asked:
            for one in first_of(asked):
                assert isinstance(one, Connection), "nothing else was given"
                asked.remove(one)
                try:
                    one.recv_bytes()
                except (EOFError, OSError):
                    one.close()
                    self._places.put(None)
                else:
                    self._count_living(1)
                    self._places.put(one)

    def _compile(self, compiling: Callable[[], Any]) -> Any:
        place, several = self._places.get(), self._ranks > 1
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

    def _first_with(self, launcher: str) -> bool:
        """True for the first call with this kind of launcher; later calls return False."""
        with self._beginning:
            first = launcher not in self._launchers
            self._launchers.add(launcher)
            return first

    def _count_living(self, more: int) -> None:
        with self._beginning:
            self._living += more


def _prepare() -> None:
    """Does what Triton does before its first kernel: it hashes its files and compiles its driver."""
    with suppress(Exception):  # whoever needs it meets the error, too
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        triton_key()
        _ = driver.active


def _passed_on(future: Future[Any], done: Future[Any]) -> None:
    """Copies the result or error of one future to another."""
    if done.cancelled():
        future.cancel()
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _job(compiling: Callable[[], Any]) -> bytes | None:
    """The text of a job; None: it has none."""
    try:
        return job_of(compiling)
    except NotSendable:
        return None


def _asked(process: Connection, job: bytes, launcher: bool) -> bool:
    """Has a process compile, if it can, and make the kernel's launcher; False: the process has ended."""
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
    """While it lasts, no other process compiles this; where it has begun, waits for its end.

    By a lock on a file, which ends with the process. Where files take no locks, several may compile it.
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
    """True if this process now holds the file's lock, or the file system has no locks."""
    import fcntl  # which not every system has, but those for which Triton ships

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def of_this_machine(sharing: int = 1) -> int:
    """Processes worth having where so many ranks share the machine: one for each core that this process may use.

    A container may see all cores of its machine, and have the time of a few of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, period = map(int, Path(_LIMIT).read_text().split())
        cores = max(min(cores, limit // period), 1)
    return cores // sharing


def _cache() -> str:
    """Triton's cache on the disk."""
    from triton import knobs

    return str(knobs.cache.dir)


def nothing_compiled() -> bool:
    """True if Triton's cache is empty. Then each kernel is compiled before its launch."""
    try:
        with os.scandir(_cache()) as entries:
            return next(entries, None) is None
    except OSError:
        return True
