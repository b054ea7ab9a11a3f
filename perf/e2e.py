"""FastSpecGenerator end to end: plain, exact and not, and with drafts, on the same prompts in turn."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from fastspec import FastSpecGenerator, GenerateOutput
from perf.peers import SEED, Prompts
from perf.records import Row
from perf.runs import Call, same_text, summary
from perf.stats import rate, ratio_interval
from perf.workloads import Bytes, step_bytes

WARM_UP_TOKENS = 12  # new tokens of the calls that are not timed: graphs are captured, kernels compiled
_MIB = 2**20
PLAIN, PLAIN_LOOSE = "fastspec plain", "fastspec plain, exact=False"


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured.

    Attributes:
        target, draft: as FastSpecGenerator takes them: directories or live modules.
        batches: prompts of each call, all of one length.
        new: tokens per prompt. ks: drafts per step; 0 is plain decoding, and always measured.
        sampled: draw at temperature 1 from the whole vocabulary, else greedy.
        device, dtype, max_length: for the generators; None: just what prompts and new tokens take.
    """

    target: Any
    draft: Any
    batches: Prompts
    new: int
    ks: tuple[int, ...]
    sampled: bool
    device: str
    dtype: torch.dtype
    max_length: int | None = None

    def options(self, call: int) -> dict[str, Any]:
        """Keywords of a call of `generate`."""
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": SEED + call}
        law: dict[str, Any] = drawn if self.sampled else {"do_sample": False}
        return {**law, "eos_token_id": None, "pad_token_id": 0}


def fastspec_call(generator: FastSpecGenerator, run: Run, index: int, *, k: int, new: int | None = None) -> Call:
    """One timed `generate`, and before it the time to the first tokens of the same prompts."""
    prompts, options = run.batches[index], run.options(index)
    _wait(run.device)
    start = time.perf_counter()
    stream = generator.stream(prompts, max_new_tokens=new or run.new, num_speculative_tokens=k, **options)
    next(iter(stream))
    first = time.perf_counter() - start
    close: Callable[[], None] | None = getattr(stream, "close", None)
    if close is not None:
        close()
    _wait(run.device)
    start = time.perf_counter()
    output = generator.generate(
        prompts, max_new_tokens=new or run.new, num_speculative_tokens=k, return_dict_in_generate=True, **options
    )
    _wait(run.device)
    seconds = time.perf_counter() - start
    if not isinstance(output, GenerateOutput):
        raise TypeError(f"generate gave {type(output).__name__} although return_dict_in_generate was set")
    stats = output.stats
    steps = max(row.steps for row in stats.rows)
    return Call(
        stats.emitted, steps, stats.steps, seconds, first, output.new_tokens, stats.drafted or None, stats.accepted
    )


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def generator_of(run: Run, *, k: int, exact: bool = True, nvtx: bool = False) -> FastSpecGenerator:
    """A generator for up to k drafts that has just the room that a run needs, where it does not say how much."""
    needed = max(len(prompt) for batch in run.batches for prompt in batch) + run.new
    # every call computes its prompts, by a draft as it is stored; the base of a gate may be older than an option
    known, wanted = inspect.signature(FastSpecGenerator).parameters, {"prefix_cache": False, "draft_quantization": None}
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    return FastSpecGenerator(
        run.target,
        run.draft if k else None,
        num_speculative_tokens=k,
        max_batch_size=max(len(batch) for batch in run.batches),
        max_length=run.max_length or needed,
        dtype=run.dtype,
        device=run.device,
        exact=exact,
        nvtx=nvtx,
        progress=False,
        **options,
    )


class _Opened:
    """A generator, what it took to make, and what it holds."""

    def __init__(self, run: Run, *, exact: bool, k: int) -> None:
        self._cuda = torch.device(run.device).type == "cuda"
        self._used_before = self._used()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._reserved_before = torch.cuda.memory_reserved()
        start = time.perf_counter()
        self.generator = generator_of(run, k=k, exact=exact)
        _wait(run.device)
        self.start_up = time.perf_counter() - start

    def _used(self) -> int:
        """Bytes of the GPU in use, by anyone; cached blocks of torch are given back first."""
        if not self._cuda:
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def memory(self) -> Row:
        """What the plan said, what was taken at most, and what the GPU has less now; on a CPU only the first.

        Ask after a call: then all that a call takes was taken.
        """
        row: Row = {"planned_mib": round(self.generator.memory_plan.total / _MIB, 1)}
        if not self._cuda:
            return row | {"peak_mib": None, "used_mib": None}
        peak = torch.cuda.max_memory_reserved() - self._reserved_before
        used = self._used() - self._used_before
        return row | {"peak_mib": round(max(peak, used) / _MIB, 1), "used_mib": round(used / _MIB, 1)}


Extra = Callable[[FastSpecGenerator], list[Row]]  # what else is measured on a generator that is open


def measure(
    run: Run,
    say: Callable[[str], None] = lambda _: None,
    *,
    restart: bool = False,
    extra: Extra | None = None,
) -> tuple[list[Row], dict[str, list[Call]]]:
    """Plain decoding with exact True and False, then every k, in turn over the same batches.

    Args:
        run: what.
        say: told of progress.
        restart: make the generator a second time, to see how long that takes when everything is compiled.
        extra: gives more rows, from the generator with all the drafts, when the calls are done.

    Returns:
        One row a way of decoding, then the extra ones; and the calls behind each, by the row's engine name.
    """
    ks = tuple(k for k in dict.fromkeys(run.ks) if k and run.draft is not None)
    with ExitStack() as stack:
        main = _Opened(run, exact=True, k=max(ks, default=0))
        facts: Row = {"start_up_s": round(main.start_up, 2)}
        if restart:
            main.generator.close()
            main = _Opened(run, exact=True, k=max(ks, default=0))
            facts["start_up_warm_s"] = round(main.start_up, 3)
        stack.enter_context(main.generator)
        ways: list[tuple[str, int, FastSpecGenerator]] = [(PLAIN, 0, main.generator)]
        ways += [(f"fastspec k={k}", k, main.generator) for k in ks]
        facts["warm_up_s"] = _warm_up(ways, run)
        facts |= main.memory()
        loose = _Opened(run, exact=False, k=0)
        stack.enter_context(loose.generator)
        ways.insert(1, (PLAIN_LOOSE, 0, loose.generator))
        _warm_up(ways[1:2], run)
        say("warm")
        calls = _in_turn(ways, run, say)
        more = extra(main.generator) if extra else []
    rows = [summary(name, k, calls[name]) for name, k, _ in ways]
    for row in rows:
        if row["ms_step"] is not None and row["first_ms"] is not None:
            row["prefill_ms"] = round(max(0.0, row["first_ms"] - row["ms_step"]), 3)
        if row["engine"] == PLAIN_LOOSE:
            row["start_up_s"] = round(loose.start_up, 2)
            continue
        row |= facts
        equal, compared = same_text(calls[row["engine"]], calls[PLAIN])
        row["text_equal"] = None if run.sampled else f"{equal} of {compared}"
    return [*with_speed_ups(rows, calls), *more], calls


def _warm_up(ways: Sequence[tuple[str, int, FastSpecGenerator]], run: Run) -> float:
    """A short call each; seconds taken."""
    start = time.perf_counter()
    for _, k, generator in ways:
        fastspec_call(generator, run, 0, k=k, new=min(WARM_UP_TOKENS, run.new))
    return round(time.perf_counter() - start, 2)


def _in_turn(
    ways: Sequence[tuple[str, int, FastSpecGenerator]], run: Run, say: Callable[[str], None]
) -> dict[str, list[Call]]:
    """Every batch in every way, turn and turn about, so that a machine that slows down slows all."""
    calls: dict[str, list[Call]] = {name: [] for name, _, _ in ways}
    for index in range(len(run.batches)):
        for name, k, generator in ways:
            calls[name].append(fastspec_call(generator, run, index, k=k))
        say(f"call {index + 1} of {len(run.batches)}")
    return calls


def with_speed_ups(rows: Sequence[Row], calls: dict[str, list[Call]]) -> list[Row]:
    """Adds to each row its speed over the faster of our plain ways, with an interval over the same prompts."""
    base = max((PLAIN, PLAIN_LOOSE), key=lambda name: _rate(calls[name]))
    found = []
    for row in rows:
        mine = calls[row["engine"]]
        low, high = ratio_interval(*_sums(mine), *_sums(calls[base]))
        ratio = _rate(mine) / _rate(calls[base])
        found.append({**row, "speed_up": round(ratio, 3), "speed_up_95": [round(low, 3), round(high, 3)], "over": base})
    return found


def _sums(calls: Sequence[Call]) -> tuple[list[float], list[float]]:
    return [float(call.tokens) for call in calls], [call.seconds for call in calls]


def _rate(calls: Sequence[Call]) -> float:
    return rate(*_sums(calls))


def with_floors(
    rows: Sequence[Row],
    target: PretrainedConfig,
    draft: PretrainedConfig | None,
    run: Run,
    ceiling_gb_s: float,
) -> list[Row]:
    """Adds the time that reading alone takes at the measured ceiling, and how far from it a step is."""
    ours = Bytes.of(target, run.dtype)
    theirs = None if draft is None else Bytes.of(draft, run.dtype)
    batch = len(run.batches[0])
    context = statistics.mean(len(prompt) for prompts in run.batches for prompt in prompts) + run.new / 2
    found = []
    for row in rows:
        k = row.get("k") or 0
        floor = step_bytes(ours, theirs if k else None, k=k, batch=batch, context=context) / ceiling_gb_s / 1e6
        step = row.get("ms_step")
        ratio = None if step is None else round(step / floor, 3)
        found.append({**row, "floor_ms": round(floor, 4), "step_over_floor": ratio})
    return found
