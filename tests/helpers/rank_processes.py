"""Groups of real processes over gloo, each one rank; forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.limits import HANGS

CONTEXT = multiprocessing.get_context("forkserver")
NOTHING = "nothing came"


class Processes:
    """So many ranks, which do what they are told until they are stopped.

    Args:
        size: how many.
        meeting: a file that is not there yet, by which they find each other.
    """

    def __init__(self, size: int, meeting: Path) -> None:
        CONTEXT.set_forkserver_preload([__name__, "tests.distributed.tasks"])
        ends = [CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in ends]
        self.processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, str(meeting), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in ends:
            theirs.close()

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `task` gives on each rank, or what it raised, as "TypeOfError: text"; NOTHING of one that died."""
        for rank in range(len(self._pipes)):
            self.send(rank, task, *arguments)
        return [self.answer(rank) for rank in range(len(self._pipes))]

    def send(self, rank: int, task: Callable[..., Any], *arguments: Any) -> None:
        """Begins a task on one rank; `answer` has what it gives."""
        self._pipes[rank].send((task, arguments))

    def answer(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv() if self._pipes[rank].poll(HANGS) else NOTHING
        except EOFError:
            self.processes[rank].join(HANGS)
            return f"{NOTHING}: exit code {self.processes[rank].exitcode}"

    def tell(self, rank: int, word: object) -> None:
        """Something for a task that waits for it, by `Rank.wait`."""
        self._pipes[rank].send(word)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Rank:
    """What a task gets: who it is, and what earlier tasks of this process left."""

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        self.rank, self.size, self.kept = rank, size, dict[str, Any]()
        self._pipe = pipe

    def wait(self) -> object:
        return self._pipe.recv()


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)  # as in processes that a user starts: each draws numbers of its own
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=HANGS)
    )
    here = Rank(rank, size, pipe)
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = task(here, *arguments)
        except BaseException as error:  # noqa: BLE001  (the test judges it)
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)
