"""What a trainer asks for: scores, new weights, rollouts. `python -m perf training`, and vLLM beside where it is.

| bench | what is timed |
|---|---|
| score | log-probabilities of given tokens: of prompts, and of answers; beside them reading the same prompts |
| update | all weights from tensors of the same device |
| rollout | prompts x copies, sampled, until each row meets one of some ids; its tail: a tenth of the rows is left |

vLLM scores by `prompt_logprobs`, and draws the same number of rows with the same ids at which they end.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec import FastSpecGenerator
from perf.experiment import FAILURES, say, wait
from perf.models import SEED, Models, add_pair_options, opened
from perf.peers import NOT_HERE, VLLM_SHARE, failed, importable
from perf.records import Row
from perf.workloads import OWN

COLUMNS = ("bench", "case", "engine", "batch", "prompt", "new", "k", "tokens", "seconds", "tok_s", "read_tok_s",
           "tail_s", "tail_tok_s", "gb", "gb_s", "texts_equal", "status")  # fmt: skip
TAIL = 0.1  # share of the rows that are left when the tail begins
MOST_ENDS = 64  # ids at which a row ends
CALLS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure.

    Attributes:
        bench: "score", "update" or "rollout".
        prompts: number of prompts. copies: rows of each.
        prompt, new: tokens of a prompt, and of an answer: given ones, or the most that are drawn.
        mean: tokens after which a drawn row ends, on average. 0: at `new`.
        ks: drafts per step that are measured.
    """

    bench: str
    prompts: int = 8
    copies: int = 1
    prompt: int = 128
    new: int = 0
    mean: int = 0
    ks: tuple[int, ...] = (0, 4)

    @property
    def rows(self) -> int:
        """Rows of a call."""
        return self.prompts * self.copies

    @property
    def name(self) -> str:
        """Names the task in rows."""
        return f"{self.bench}, {self.rows} rows of {self.prompt} + {self.new}"


TASKS = (
    Task("score", 8, 1, 2048, 0, ks=(4,)),
    Task("score", 64, 1, 128, 512, ks=(0, 4)),
    Task("update"),
    *(Task("rollout", rows // 8, 8, 128, 2048, mean=512, ks=(0, 2, 4)) for rows in (64, 128, 256)),
)
SMALL = (
    Task("score", 2, 1, 40, 0, ks=(2,)),
    Task("score", 2, 1, 8, 12, ks=(0, 2)),
    Task("update"),
    Task("rollout", 2, 3, 8, 24, mean=8, ks=(0, 2)),
)
SETS = {"all": TASKS, "small": SMALL}


def generator_of(models: Models, task: Task, k: int) -> FastSpecGenerator:
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
        prefix_cache=False,
        progress=False,
    )


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


def ends_of(vocab: int, mean: int) -> list[int]:
    """Ids at which rows end after about `mean` tokens, if all ids were equally likely."""
    count = min(MOST_ENDS, max(1, vocab // mean)) if mean else 0
    return [index * (vocab // count) for index in range(count)]


def rollouts(models: Models, task: Task) -> Iterator[Row]:
    """Drawn tokens per second of all rows and of the tail; texts are the same for every k."""
    prompts = models.prompts(task.prompts, task.prompt)
    options: dict[str, Any] = {
        "max_new_tokens": task.new,
        "do_sample": True,
        "top_k": 0,
        "seed": SEED,
        "num_return_sequences": task.copies if task.copies > 1 else None,
        "eos_token_id": ends_of(models.configs[0].vocab_size, task.mean),
        "logprobs": True,
        "pad_token_id": 0,
    }
    first: dict[int, list[int]] | None = None
    for k in task.ks:
        with generator_of(models, task, k) as generator:
            drawn(generator, prompts, {**options, "max_new_tokens": min(12, task.new)}, models.device)
            texts, events, seconds = drawn(generator, prompts, options, models.device)
        first = first or texts
        row = _row(task, f"fastspec k={k}", k, sum(map(len, texts.values())), seconds)
        yield {**row, **tail(events, task.rows), "texts_equal": texts == first}


Event = tuple[float, dict[int, int]]  # seconds since the beginning, tokens of each row that got some


def drawn(
    generator: FastSpecGenerator, prompts: list[list[int]], options: dict[str, Any], device: str
) -> tuple[dict[int, list[int]], list[Event], float]:
    """Draws all rows; returns their texts, the events and the seconds."""
    texts: dict[int, list[int]] = {}
    events: list[Event] = []
    wait(device)
    start = time.perf_counter()
    for emitted in generator.stream(prompts, **options):
        for row, tokens in emitted.items():
            texts.setdefault(row, []).extend(tokens)
        events.append((time.perf_counter() - start, {row: len(tokens) for row, tokens in emitted.items()}))
    wait(device)
    return texts, events, time.perf_counter() - start


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


def _row(task: Task, engine: str, k: int, tokens: int, seconds: float) -> Row:
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
        enable_prefix_caching=False,
    )
    prompts = models.prompts(task.prompts, task.prompt)
    if task.bench == "score":
        answers = models.prompts(task.rows, task.new) if task.new else [[] for _ in prompts]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        tokens = sum(map(len, rows)) - len(rows)
    else:
        rows, tokens = prompts, 0
        ends = ends_of(models.configs[0].vocab_size, task.mean)
        params = vllm.SamplingParams(
            n=task.copies, max_tokens=task.new, temperature=1.0, seed=SEED, stop_token_ids=ends, logprobs=0,
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
    made: list[Any] = []

    def ask() -> None:
        made[:] = engine.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)

    seconds = taken(ask, models.device, 1)
    if not tokens:
        tokens = sum(len(each.token_ids) for request in made for each in request.outputs)
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
    made.add_argument("--only", default="", help="tasks whose name holds this, such as rollout")
    made.add_argument("--peers", action="store_true", help="vLLM on the same tasks")


def command_training(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Scores, updates and rollouts, as a trainer asks for them."""
    about = {"workload": OWN if given.target else given.workload}
    with opened(given, save=given.peers and importable("vllm"), say=say) as models:
        for task in (task for task in SETS[given.tasks] if given.only in task.name):
            for row in BENCHES[task.bench](models, task):
                yield [{**about, **row}]
            if given.peers:
                yield [{**about, **of_vllm(models, task)}]
