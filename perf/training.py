"""What a trainer asks for: scores, new weights, rollouts. `python -m perf training`, and vLLM beside where it is.

| bench | what is timed |
|---|---|
| score | log-probabilities of given tokens: of prompts, and of answers; beside them reading the same prompts |
| update | all weights from tensors of the same device |
| rollout | prompts x copies, sampled; each row has its own length. Its tail: a tenth of the rows is left |
| grpo | a run of TRL's trainer on the shipped pair, with drafts and without: the reward of each step |

vLLM scores by `prompt_logprobs`, and draws rows of the same lengths.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator
from fastspec.adaptive.controller import AUTO
from fastspec.scheduling.handle import Handle
from perf.experiment import FAILURES, say, wait
from perf.grpo import curves
from perf.models import SEED, Models, add_pair_options, opened
from perf.peers import NOT_HERE, VLLM_SHARE, failed, importable
from perf.records import Row
from perf.workloads import OWN, SHIPPED

COLUMNS = ("bench", "case", "engine", "batch", "prompt", "new", "k", "tokens", "seconds", "tok_s", "read_tok_s",
           "tail_s", "tail_tok_s", "drafted", "gb", "gb_s", "plan_gib", "peak_gib", "rollout_s", "texts_equal",
           "status")  # fmt: skip
TAIL = 0.1  # share of the rows that are left when the tail begins
WARM = 12  # tokens of each row before a rollout is timed
LOOK = 0.005  # seconds between two looks at what rows have
CALLS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure.

    Attributes:
        bench: "score", "update" or "rollout".
        prompts: number of prompts. copies: rows of each.
        prompt, new: tokens of a prompt, and of an answer: given ones, or the most that are drawn.
        mean: tokens after which a drawn row ends, on average, if `new` does not end it before. 0: at `new`.
        ks: drafts per step that are measured.
        kv: format of K and V. None: 16 bits.
        card: GB of a smaller GPU on which the generator must have room. 0: all of this one.
    """

    bench: str
    prompts: int = 8
    copies: int = 1
    prompt: int = 128
    new: int = 0
    mean: int = 0
    ks: tuple[int | str, ...] = (0, 4)
    kv: str | None = None
    card: int = 0

    @property
    def rows(self) -> int:
        """Rows of a call."""
        return self.prompts * self.copies

    @property
    def name(self) -> str:
        """Names the task in rows."""
        card = f", {self.kv} K/V on {self.card} GB" if self.card else ""
        return f"{self.bench}, {self.rows} rows of {self.prompt} + {self.new}{card}"

    def lengths(self) -> list[int]:
        """Tokens of each row's answer: exponential, so that a few rows are much longer than the others."""
        if not self.mean:
            return [self.new] * self.rows
        drawn = random.Random(SEED)
        return [min(self.new, 1 + int(drawn.expovariate(1 / self.mean))) for _ in range(self.rows)]


TASKS = (
    Task("score", 8, 1, 2048, 0, ks=(4,)),
    Task("score", 64, 1, 128, 512, ks=(0, 4)),
    Task("update"),
    *(Task("rollout", rows // 8, 8, 128, 1920, mean=512, ks=(0, AUTO, 2, 4)) for rows in (64, 128, 256)),
    Task("rollout", 32, 8, 128, 1920, mean=512, ks=(0, AUTO), kv="fp8", card=80),
)
SMALL = (
    Task("score", 2, 1, 40, 0, ks=(2,)),
    Task("score", 2, 1, 8, 12, ks=(0, 2)),
    Task("update"),
    Task("rollout", 2, 3, 8, 24, mean=8, ks=(0, 2, AUTO)),
)
GRPO = "grpo"
SETS = {"all": TASKS, "small": SMALL, GRPO: ()}
GRPO_STEPS = 20


def generator_of(models: Models, task: Task, k: int | str) -> FastSpecGenerator:
    """A generator with the room that a task needs."""
    return FastSpecGenerator(
        models.sources[0],
        models.sources[1] if k else None,
        verification="coupled",
        num_speculative_tokens=k,
        max_batch_size=task.rows,
        max_length=task.prompt + max(1, task.new),
        dtype=models.dtype,
        device=models.device,
        kv_dtype=task.kv,
        prefix_cache=task.bench == "rollout",  # copies share their prompt
        progress=False,
    )


@contextmanager
def smaller(card: int, device: str) -> Iterator[None]:
    """Context in which torch may take at most `card` GB more than it has. 0: all that there is."""
    if not card or torch.device(device).type != "cuda":
        yield
        return
    allowed = card * 10**9 + torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / torch.cuda.get_device_properties(0).total_memory))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def taken(work: Callable[[], object], device: str, calls: int = CALLS) -> float:
    """Median seconds of a call, after one that is not timed."""
    times = []
    for _ in range(calls + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def scores(models: Models, task: Task) -> Iterator[Row]:
    """Given tokens per second: of prompts if nothing is new, else of answers."""
    prompts = models.prompts(task.rows, task.prompt)
    answers = models.prompts(task.rows, task.new) if task.new else [[] for _ in prompts]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = task.rows * (task.new or task.prompt - 1)
    asked: dict[str, Any] = {"lengths": task.prompt, "prompt_logprobs": False} if task.new else {}
    for k in task.ks:
        with generator_of(models, task, k) as generator:
            seconds = taken(lambda: generator.score(rows, **asked), models.device)
            row = _row(task, f"fastspec k={k}", k, tokens, seconds)
            if not task.new:
                read = taken(lambda: generator.generate(prompts, max_new_tokens=1, eos_token_id=[]), models.device)
                row["read_tok_s"] = round(tokens / read, 1)
            yield row


def updates(models: Models, task: Task) -> Iterator[Row]:
    """Seconds of an update of the target from tensors of the same device."""
    state = {name: each.detach().clone() for name, each in models.live[0].state_dict().items()}
    size = sum(each.numel() * each.element_size() for each in state.values()) / 1e9
    with generator_of(models, task, 0) as generator:
        seconds = taken(lambda: generator.update_weights(state), models.device)
    yield {**_row(task, "fastspec", 0, 0, seconds), "gb": round(size, 3), "gb_s": round(size / seconds, 1)}


def rollouts(models: Models, task: Task) -> Iterator[Row]:
    """Drawn tokens per second of all rows and of the tail; texts are the same for every k."""
    prompts = [prompt for prompt in models.prompts(task.prompts, task.prompt) for _ in range(task.copies)]
    lengths = task.lengths()
    first: list[list[int]] | None = None
    for k in task.ks:
        with smaller(task.card, models.device), Peak(models.device) as peak, generator_of(models, task, k) as generator:
            drawn(generator, prompts, [min(WARM, length) for length in lengths], models.device)
            generator.reset_prefix_cache()
            rollout = drawn(generator, prompts, lengths, models.device)
            plan = generator.memory_plan.total
        first = first or rollout.texts
        row = _row(task, f"fastspec k={k}", k, sum(map(len, rollout.texts)), rollout.seconds)
        row |= {"plan_gib": round(plan / 2**30, 2), "peak_gib": peak.gib, "drafted": rollout.drafted}
        yield {**row, **tail(rollout.events, task.rows), "texts_equal": rollout.texts == first}


class Peak:
    """Context that counts the memory of a GPU that torch takes within, at most.

    Args:
        device: any device.

    Attributes:
        gib: GiB. None: the device is no GPU.
    """

    def __init__(self, device: str) -> None:
        self._counts = torch.device(device).type == "cuda"
        self._before = 0
        self.gib: float | None = None

    def __enter__(self) -> Peak:
        if self._counts:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        if self._counts:
            self.gib = round((torch.cuda.max_memory_allocated() - self._before) / 2**30, 2)


Event = tuple[float, dict[int, int]]  # seconds since the beginning, tokens of each row that got some


@dataclass(frozen=True, slots=True)
class Rollout:
    """All rows of a rollout.

    Attributes:
        texts: new tokens of each row.
        events: when rows had new tokens.
        seconds: time of the whole.
        drafted: mean number of draft tokens per row and step.
    """

    texts: list[list[int]]
    events: list[Event]
    seconds: float
    drafted: float


def drawn(generator: FastSpecGenerator, prompts: list[list[int]], lengths: Sequence[int], device: str) -> Rollout:
    """Draws a row of each prompt, of its own length. All of them begin together."""
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": [], "logprobs": True, "pad_token_id": 0}
    generator.pause()
    rows = [
        generator.submit(prompt, max_new_tokens=length, seed=SEED + index, **options)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    wait(device)
    start = time.perf_counter()
    generator.resume()
    events = list(watched(rows, start))
    seconds = time.perf_counter() - start
    outputs = [row.result() for row in rows]
    each = [output.stats.rows[0] for output in outputs]
    drafted = sum(row.drafted for row in each) / max(1, sum(row.steps for row in each))
    return Rollout([output.new_tokens[0] for output in outputs], events, seconds, round(drafted, 2))


def watched(rows: Sequence[Handle], start: float) -> Iterator[Event]:
    """Looks at handles until all have ended, and yields what each has got since the look before."""
    shown = [0] * len(rows)
    ended = False
    while not ended:
        ended = all(row.done for row in rows)
        counts = [row.delivery.counts[0] for row in rows]
        new = {index: count - shown[index] for index, count in enumerate(counts) if count > shown[index]}
        if new:
            yield time.perf_counter() - start, new
        shown = counts
        time.sleep(0 if ended else LOOK)


def tail(events: Sequence[Event], rows: int) -> Row:
    """Seconds and tokens per second of the time in which a tenth of the rows goes on."""
    last = dict[int, float]()
    for at, emitted in events:
        last.update(dict.fromkeys((row for row, count in emitted.items() if count), at))
    ends = sorted(last.values())
    begins = ends[max(0, len(ends) - max(1, round(TAIL * rows)) - 1)]
    seconds = ends[-1] - begins
    tokens = sum(sum(emitted.values()) for at, emitted in events if at > begins)
    return {"tail_s": round(seconds, 3), "tail_tok_s": round(tokens / seconds, 1) if seconds else None}


def _row(task: Task, engine: str, k: int | str, tokens: int, seconds: float) -> Row:
    told: Row = {"bench": task.bench, "case": task.name, "engine": engine, "batch": task.rows, "prompt": task.prompt}
    told |= {"new": task.new, "k": k, "tokens": tokens, "seconds": round(seconds, 4), "status": "ok"}
    return told | {"tok_s": round(tokens / seconds, 1) if tokens else None}


def of_vllm(models: Models, task: Task) -> Row:
    """The row of vLLM on the same prompts."""
    if task.bench == "update" or not importable("vllm") or models.directories is None:
        reason = NOT_HERE if task.bench != "update" else "an update needs a trainer's process"
        return {"bench": task.bench, "case": task.name, "engine": "vllm", "status": reason}
    try:
        return _vllm(models, task, models.directories[0])
    except FAILURES as error:
        return {"bench": task.bench, "case": task.name, **failed("vllm", 0, error, say)}


def _vllm(models: Models, task: Task, target: Path) -> Row:
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=task.prompt + task.new + 1,
        max_num_seqs=task.rows,
        gpu_memory_utilization=VLLM_SHARE,
        enable_prefix_caching=task.bench == "rollout",
    )
    prompts = models.prompts(task.prompts, task.prompt)
    if task.bench == "score":
        answers = models.prompts(task.rows, task.new) if task.new else [[] for _ in prompts]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        params = [vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)] * len(rows)
        tokens = sum(map(len, rows)) - len(rows)
    else:
        rows, tokens = [prompt for prompt in prompts for _ in range(task.copies)], sum(task.lengths())
        law: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        params = [
            vllm.SamplingParams(max_tokens=length, seed=SEED + index, **law)
            for index, length in enumerate(task.lengths())
        ]

    def ask() -> None:
        engine.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)

    seconds = taken(ask, models.device, 1)
    return {**_row(task, "vllm", 0, tokens, seconds), "version": getattr(vllm, "__version__", "unknown")}


BENCHES: dict[str, Callable[[Models, Task], Iterator[Row]]] = {
    "score": scores,
    "update": updates,
    "rollout": rollouts,
}


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf training`."""
    made.set_defaults(columns=COLUMNS)
    add_pair_options(made, "8b+1b")
    made.add_argument("--tasks", choices=sorted(SETS), default="all", help="set of tasks")
    made.add_argument("--only", nargs="*", default=[""], help="tasks whose name holds one of these, such as rollout")
    made.add_argument("--ks", type=drafts_of, help="numbers of drafts in place of each task's own, such as 0,auto")
    made.add_argument("--peers", action="store_true", help="vLLM on the same tasks")


def drafts_of(told: str) -> tuple[int | str, ...]:
    """Reads numbers of drafts, such as "0,4,auto"."""
    return tuple(AUTO if each == AUTO else int(each) for each in told.split(","))


def command_training(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Scores, updates and rollouts, as a trainer asks for them."""
    if given.tasks == GRPO:
        for row in curves(GRPO_STEPS):
            yield [{"workload": SHIPPED, **row}]
        return
    about = {"workload": OWN if given.target else given.workload}
    with opened(given, save=given.peers and importable("vllm"), say=say) as models:
        for named in dict.fromkeys(task for only in given.only for task in SETS[given.tasks] if only in task.name):
            task = replace(named, ks=given.ks or named.ks)
            for row in BENCHES[task.bench](models, task):
                yield [{**about, **row}]
            if given.peers:
                yield [{**about, **of_vllm(models, task)}]
