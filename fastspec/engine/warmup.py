"""Warm-up of a call: captures its decode steps as CUDA graphs.

The steps are also timed if k, the number of draft tokens per step, is chosen while decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from fastspec.engine.engine import Engine
from fastspec.kernels.select import compilers as kernel_compilers
from fastspec.models.interface import Pending
from fastspec.proposers.readings import choose_reading
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.shapes import FULL, GRAMMAR_ONLY, GRAMMARS, GREEDY, StepShape

_ALIKE = 1.15  # if the step times of two ks have a larger ratio, a k between them is measured, too


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
    """Captures the decode steps that a call with up to `rows` requests at once may need, and times them if needed.

    Args:
        engine: engine of the generator.
        rows: number of requests that decode at once.
        choice: numbers of draft tokens, sampler kind and log-probabilities of the call.
        longest, shortest: largest and smallest number of tokens of a sequence.
        progress: True to show progress bars.
        prompts: True to compile and capture prefill passes, too.
        loaded: function that waits until another thread has filled the weights. Called after the kernels are compiled.
        compilers: the constructor's executor for `Engine.compile`. It also starts to compile the kernels of
            `steps_of_options`, without waiting for them. None: an executor is made here if a step is not captured yet.

    Raises:
        RuntimeError: a step could not be captured; the message names it.
    """
    lengths = longest, shortest
    recorded = choice.top_logprobs
    missing = engine.missing(
        rows, choice.ks, choice.sampler, recorded, *lengths, choice.grammars, processed=choice.processed
    )
    if engine.runner.static and missing:
        own = kernel_compilers(*engine.sharing) if compilers is None else nullcontext(compilers)
        behind = [] if compilers is None else steps_of_options(engine, rows, choice)
        with own as compiling, engine.on_device():
            engine.compile(missing, prompts=prompts, compilers=compiling, behind=behind)
    loaded()
    engine.choose_threads()
    if missing or prompts:  # if nothing is missing, the call begins at once
        _choose_reading(engine)
        bar = tqdm(missing, desc="capturing steps", unit="graph", disable=not (progress and missing))
        with engine.on_device():
            for size, shape in bar:
                engine.capture(size, shape)
            if prompts:
                engine.prompts.capture()
    if choice.controller is not None:
        _time(engine, rows, choice, lengths, progress)


def steps_of_options(engine: Engine, rows: int, choice: DraftChoice) -> list[tuple[int, StepShape]]:
    """Returns (number of batch slots, shape) of decode steps that calls with options or long sequences may need.

    Together these steps launch every kernel of such calls. The likeliest come first: sampled steps with the most draft
    tokens, over one batch slot and over all. Then come steps with log-probabilities, grammars and long sequences. Each
    step is listed once.

    Args:
        engine: engine of the generator.
        rows: number of requests that decode at once.
        choice: numbers of draft tokens of a call without options.
    """
    longest = engine.shapes.row_tokens - 1
    short, middle, unguided = (0, 0), (min(longest, engine.shapes.middle_length), 0), (None,)
    kinds = (
        (FULL, None, short, unguided),
        (GREEDY, 0, short, unguided),
        (FULL, 0, short, unguided),
        (FULL, None, short, (GRAMMAR_ONLY,)),
        (GREEDY, 0, short, (GRAMMAR_ONLY,)),
        (FULL, 0, short, GRAMMARS),
        (GREEDY, None, middle, unguided),
        (GREEDY, None, (longest, 0), unguided),
        (GREEDY, None, (longest, longest), unguided),
    )
    found = [
        engine.missing(rows, choice.ks, sampler, top_logprobs, *lengths, guided)
        for sampler, top_logprobs, lengths, guided in kinds
    ]
    sampled = found[0]
    k = max(choice.ks)
    likeliest = [step for step in sampled if step[0] in (1, sampled[0][0]) and step[1].num_drafts == k]
    return list(dict.fromkeys(step for steps in (reversed(likeliest), *found) for step in steps))


def _choose_reading(engine: Engine) -> None:
    """Runs `choose_reading` for the engine's models.

    This happens before any CUDA graph is captured, and before any request uses KV cache pages or recurrent states.
    """
    chunk, pages = engine.sizes.chunks[0], engine.state.block_table.shape[1]
    shape = engine.shapes.chunk(chunk, chunk, GREEDY)
    modules, row = engine.modules, engine.state.state_rows[:1]
    with engine.on_device():
        free = torch.arange(1, pages + 1, device=row.device)[None]
        choose_reading(modules.target, modules.proposer, shape, engine.shapes.tiling, free, row)


def compilers_for(
    target: Any, device: Any, graphs: bool | None, rank: int, ranks: int
) -> AbstractContextManager[Executor | None]:
    """Context that starts worker processes for compiling kernels, if the generator will run on CUDA.

    Yields the executor of these processes. None: the generator will run on another device, or without CUDA graphs. The
    context is entered before the arguments are checked, so that the processes start while the models are found.

    Args:
        target, device, graphs: arguments of the constructor, not checked yet.
        rank, ranks: index of this rank, and number of all ranks on this machine.
    """
    there = torch.cuda.is_available() and graphs is not False
    if there and device is None and isinstance(target, torch.nn.Module):
        there = any(parameter.is_cuda for parameter in islice(target.parameters(), 1))
    elif there and device is not None:
        there = str(device).startswith("cuda")
    return kernel_compilers(rank, ranks) if there else nullcontext()


@contextmanager
def filling(pending: Sequence[Pending], device: torch.device) -> Iterator[Callable[[], None]]:
    """Context in which allocated weights are read from their checkpoints.

    On CUDA another thread reads them, while this thread compiles kernels. The context yields a function that waits for
    all weights. If loading has failed, that function raises the error. At the end of the context the loading of weights
    that are not read yet is cancelled.

    Args:
        pending: weights that are allocated, but not read yet.
        device: device of the weights.
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
    """Measures the times of decode steps that the controller of `choice` does not know yet.

    Without CUDA graphs a step takes long. Then only steps over all batch slots are timed, and only for the ks that
    `timed_ks` picks.

    Args:
        engine: engine of the generator.
        rows: number of requests that decode at once.
        choice: numbers of draft tokens of the call, and the controller that chooses among them.
        lengths: largest and smallest number of tokens of a sequence.
        progress: True to show a progress bar.
    """
    controller = choice.controller
    assert controller is not None, "the caller saw to it"
    static = engine.runner.static
    buckets, repeats = (engine.shapes.buckets(rows), 9) if static else ([engine.shapes.bucket(rows)], 3)
    known = controller.times.measured
    missing = [(size, k) for size in buckets for k in choice.ks if (size, k) not in known]
    if not missing:
        return
    with engine.on_device(), tqdm(desc="timing steps", unit="step", disable=not progress) as bar:

        def seconds(size: int, k: int) -> float:
            recorded = choice.top_logprobs
            taken = engine.step_seconds(size, k, choice.sampler, recorded, lengths, repeats, processed=choice.processed)
            bar.update()
            return taken

        if static:
            controller.know({each: seconds(*each) for each in missing})
            return
        for size in buckets:
            found = timed_ks(choice.ks, partial(seconds, size))
            controller.know({(size, k): taken for k, taken in found.items()})


def timed_ks(ks: Sequence[int], seconds: Callable[[int], float]) -> dict[int, float]:
    """Returns {k: seconds of a decode step with k draft tokens} for all ks. Only some ks are measured.

    These are found by bisection, beginning with the first and the last k. If the times of two measured ks are almost
    equal, the times between them are interpolated. A step becomes longer when its matrix products need one more tile of
    rows. The ks on both sides of such a jump are measured.

    Args:
        ks: numbers of draft tokens per step, ascending.
        seconds: function that measures a step with k draft tokens, in seconds.
    """
    found = {k: seconds(k) for k in (ks[0], ks[-1])}
    open_ = [(0, len(ks) - 1)]
    while open_:
        low, high = open_.pop()
        if high - low < 2:
            continue
        first, last = found[ks[low]], found[ks[high]]
        if last <= _ALIKE * first:
            for k in ks[low + 1 : high]:
                found[k] = first + (last - first) * (k - ks[low]) / (ks[high] - ks[low])
            continue
        middle = (low + high) // 2
        found[ks[middle]] = seconds(ks[middle])
        open_ += [(low, middle), (middle, high)]
    return found
