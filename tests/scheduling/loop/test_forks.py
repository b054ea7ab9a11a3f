"""A process that was forked from one whose thread makes steps: it is told so, and its parent goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fastspec.scheduling.handle import FORKED
from tests.helpers.limits import HANGS
from tests.helpers.services import opened

PROMPT, LONG = [5, 6, 7, 8], {"max_new_tokens": 120, "eos_token_id": None, "do_sample": False}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_waiting_for_ever(pair: tuple[Path, Path]) -> None:
    """As `multiprocessing` forks, and servers that load and then fork."""
    with opened(pair) as gen:
        gen.submit(PROMPT, max_new_tokens=1).result()
        with gen._loop.turn:  # no step is made meanwhile
            running = gen.submit(PROMPT, **LONG)
            child = os.fork()
            if not child:
                said = []
                try:
                    signal.alarm(round(HANGS))
                    for ask in (running.result, lambda: gen.generate([[1]]), lambda: gen.submit([1])):
                        with pytest.raises(RuntimeError, match=FORKED):
                            ask()
                        said.append(ask)
                finally:  # this is no process for the tests behind
                    os._exit(0 if len(said) == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(running.result().new_tokens[0]) == 120, "the parent goes on"
