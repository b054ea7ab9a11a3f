"""Processes that compile Triton kernels: its frontend is Python, so threads of one process wait for each other."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as first_of
from typing import Any, Final

from fastspec.kernels.common.compile_jobs import NotSendable, job_of

HERE: Final = 2  # kernels that this process compiles at once; more would wait for each other
SLOW: Final = 0.1  # seconds; what lies in the cache takes a tenth of it
_BEGIN: Final = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[1])
from fastspec.kernels.common.compile_jobs import serve
serve(sys.argv[2], [int(end) for end in sys.argv[3:]])
"""


class Compilers(Executor):
    """Runs Triton's compiler in processes from the first kernel on that is not in its cache, and in two threads.

    A process writes to the cache on the disk, from which the thread that asked then reads. What a process cannot
    compile, that thread does. The processes are forks of one fresh interpreter, which has imported the kernels, has no
    other thread and no device.

    Args:
        count: processes; 0: threads alone.
        now: begin them at once, not with the first such kernel.
    """

    def __init__(self, count: int, *, now: bool = False) -> None:
        # another program that runs Python in itself would only be started once more
        able = hasattr(os, "fork") and "python" in os.path.basename(sys.executable or "")
        self._count = count if able else 0
        self._places: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: in this process
        self._living = 0  # processes that are ready; while there are any, this one only asks them
        self._threads = ThreadPoolExecutor(HERE + self._count, "fastspec-compile")
        self._beginning = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: threading.Thread | None = None
        if not now or not self._count:
            self._compile_here()
        if now:
            self.begin()

    def submit(self, compiling: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Queues one call of Triton's compiler, which takes no arguments."""
        return self._threads.submit(self._compile, compiling)

    def begin(self) -> None:
        """Starts the processes, unless they are; they take jobs when they have imported the kernels."""
        with self._beginning:
            if self._process is not None or not self._count:
                return
            pipes = [Pipe() for _ in range(self._count)]
            ends = [theirs.fileno() for _, theirs in pipes]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            command = [sys.executable, "-c", _BEGIN, repr(sys.path), _cache(), *map(str, ends)]
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
        place = self._places.get()
        ended = place is not None and not _asked(place, compiling)
        try:
            start = time.perf_counter()
            compiled = compiling()
            if place is None and time.perf_counter() - start > SLOW:
                self.begin()
            return compiled
        finally:
            if ended:
                self._count_living(-1)
                self._places.put(None)
            elif place is not None or not self._living:
                self._places.put(place)

    def _count_living(self, more: int) -> None:
        with self._beginning:
            self._living += more


def _asked(process: Connection, compiling: Callable[[], Any]) -> bool:
    """Has a process compile, if it can; False: the process has ended."""
    try:
        job = job_of(compiling)
    except NotSendable:
        return True
    try:
        process.send_bytes(job)
        process.recv_bytes()
    except (EOFError, OSError):
        process.close()
        return False
    return True


def of_this_machine(sharing: int = 1) -> int:
    """Processes worth having where so many ranks share the machine: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores // sharing


def _cache() -> str:
    """Triton's cache on the disk."""
    from triton import knobs

    return str(knobs.cache.dir)


def nothing_compiled() -> bool:
    """Whether Triton's cache is empty: then what is launched is compiled first."""
    try:
        with os.scandir(_cache()) as entries:
            return next(entries, None) is None
    except OSError:
        return True
