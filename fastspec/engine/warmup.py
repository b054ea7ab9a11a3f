"""Warm-up of a call: captures its steps, and times them where k is to be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from fastspec.engine.engine import Engine
from fastspec.kernels.select import compilers as kernel_compilers
from fastspec.models.interface import Pending
from fastspec.proposers.readings import choose_reading
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.shapes import GREEDY


def warm_up_for(
    engine: Engine,
    rows: int,
    choice: DraftChoice,
    longest: int,
    shortest: int,
    *,
    progress: bool,
    prompts: bool = False,
    loaded: Callable[[], None] = lambda: None,
    compilers: Executor | None = None,
) -> None:
    """Captures and times the steps over up to `rows` rows that a call may need, with a progress bar each.

    Args:
        engine: of the generator.
        rows: at once.
        choice: drafts of the call.
        longest: tokens that its rows may get. shortest: that they all have.
        progress: show the bars.
        prompts: compile and capture the passes over prompts, too.
        loaded: waits for weights that another thread still fills; kernels are compiled before.
        compilers: of `Engine.compile`; None: begun here where something is missing.

    Raises:
        RuntimeError: a step could not be captured; the message says which.
    """
    lengths = longest, shortest
    missing = engine.missing(rows, choice.ks, choice.sampler, choice.top_logprobs, *lengths, choice.grammars)
    if engine.runner.static and missing:
        own = kernel_compilers(*engine.sharing) if compilers is None else nullcontext(compilers)
        with own as compiling, engine.on_device():
            engine.compile(missing, prompts=prompts, compilers=compiling)
    loaded()
    engine.choose_threads()
    if missing or prompts:  # else a call begins at once
        _choose_reading(engine)
        bar = tqdm(missing, desc="capturing steps", unit="graph", disable=not (progress and missing))
        with engine.on_device():
            for size, shape in bar:
                engine.capture(size, shape)
            if prompts:
                engine.prompts.capture()
    if choice.controller is not None:
        _time(engine, rows, choice, lengths, progress)


def _choose_reading(engine: Engine) -> None:
    """`choose_reading` of an engine's head, before anything is captured or admitted."""
    chunk, pages = engine.sizes.chunks[0], engine.state.block_table.shape[1]
    shape = engine.shapes.chunk(chunk, chunk, GREEDY)
    with engine.on_device():
        free = torch.arange(1, pages + 1, device=engine.state.lengths.device)[None]
        choose_reading(engine.modules.target, engine.modules.proposer, shape, engine.shapes.tiling, free)


def compilers_for(
    target: Any, device: Any, graphs: bool | None, rank: int, ranks: int
) -> AbstractContextManager[Executor | None]:
    """Processes that compile a generator's kernels, started before its arguments are checked; None: none are needed.

    Args:
        target, device, graphs: of the constructor. rank, ranks: this one of so many, on one machine.
    """
    there = torch.cuda.is_available() and graphs is not False
    if there and device is None and isinstance(target, torch.nn.Module):
        there = any(parameter.is_cuda for parameter in islice(target.parameters(), 1))
    elif there and device is not None:
        there = str(device).startswith("cuda")
    return kernel_compilers(rank, ranks) if there else nullcontext()


@contextmanager
def filling(pending: Sequence[Pending], device: torch.device) -> Iterator[Callable[[], None]]:
    """A context in which weights are filled: on CUDA by another thread, while this one compiles kernels.

    It yields a function that waits until all weights are filled, and raises the error of the loading. Leaving the
    context stops the loading.
    """

    def fill() -> None:
        for weights in pending:
            weights.fill()

    if device.type != "cuda":
        yield fill
        return
    with ThreadPoolExecutor(1, "fastspec-load") as pool:
        filled = pool.submit(fill)
        try:
            yield filled.result
        finally:
            for weights in pending:
                weights.cancel()


def _time(engine: Engine, rows: int, choice: DraftChoice, lengths: tuple[int, int], progress: bool) -> None:
    """Times the steps that the controller has no time for yet."""
    controller = choice.controller
    assert controller is not None, "the caller saw to it"
    # without graphs steps are slow enough, on a CPU at least, that one bucket must do for all
    static = engine.runner.static
    buckets, repeats = (engine.shapes.buckets(rows), 9) if static else ([engine.shapes.bucket(rows)], 3)
    known = controller.times.measured
    missing = [(size, k) for size in buckets for k in choice.ks if (size, k) not in known]
    bar = tqdm(missing, desc="timing steps", unit="step", disable=not (progress and missing))
    with engine.on_device():
        for size, k in bar:
            shape = engine.shapes.typical(k, choice.sampler, choice.top_logprobs, *lengths)
            taken = engine.share_seconds(engine.seconds(size, shape, repeats))
            assert taken is not None, "it was measured"
            controller.know({(size, k): taken})
