"""Drafters on 45 tasks of nine kinds, with a real model: `python -m perf tasks --target DIR`.

The tasks are in tasks.jsonl, written for this project. Their kinds follow what people use assistants for: edit code,
write docstrings, summarise, quote, convert to JSON, copy, tell stories, chat, and go on with an agent's calls of tools.
Summarising and chat are categories of SPEED-Bench, too. A prompt is the task in the model's chat template, or the task
alone if there is no template.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, NGram, Suffix
from perf.experiment import Arm, Call, Experiment, generate, law, rated, same_text, say, step_sums, token_sums
from perf.records import Row
from perf.tasks.peer import ASSISTANT, DRAFTING, LLAMA_CPP, NAMES, peer_calls

FILE = Path(__file__).with_name("tasks.jsonl")
PLAIN, ALL = "plain", "all"
LOOKUPS: dict[str, Any] = {"lookup": {"proposer": NGram()}, "suffix": {"proposer": Suffix()}}
COLUMNS = ("drafter", "k", "kind", "temperature", "tokens_per_step", "tokens_per_step_95", "acceptance", "tok_s",
           "tok_s_95", "text_equal")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its kind, and the text of the user's message."""

    kind: str
    prompt: str


def read_tasks(path: Path = FILE) -> list[Task]:
    """Reads the tasks of a file of JSON lines."""
    return [Task(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def ids_of(generator: FastSpecGenerator, task: Task) -> list[int]:
    """Token ids of a task's prompt."""
    tokenizer = generator.tokenizer
    if not tokenizer.chat_template:
        return list(tokenizer(task.prompt)["input_ids"])
    messages = [{"role": "user", "content": task.prompt}]
    made: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(made["input_ids"])


def arms_of(stack: ExitStack, given: argparse.Namespace) -> dict[str, Arm]:
    """Generators by "drafter k"; they close with the stack."""
    kinds: dict[str, dict[str, Any]] = {PLAIN: {}} | {name: LOOKUPS[name] for name in given.lookups}
    if given.draft is not None:
        kinds["draft model"] = {"draft": given.draft}
    for form in given.self_draft:
        kinds[f"itself in {form}"] = {"draft": given.target, "draft_quantization": form}
    heads = {name: Path(folder) for name, folder in (each.split("=", 1) for each in given.head)}
    learned: dict[str, dict[str, Any]] = {name: {"draft": folder} for name, folder in heads.items()}
    for name, folder in (each.split("=", 1) for each in given.mtp):
        learned[name] = {"target": folder, "draft": "mtp", "draft_vocab": drafted_ids(Path(folder))}
    kinds |= learned
    if given.after_lookup:
        kinds |= {f"lookup, then {name}": {**how, "proposer": NGram()} for name, how in learned.items()}
    sizes: dict[str, Any] = {"max_batch_size": given.batch, "max_length": given.max_length, "device": given.device}
    arms = {}
    for name, how in kinds.items():
        for k in (0,) if name == PLAIN else given.k:
            chosen = {"target": given.target, **how, "dtype": given.dtype, "num_speculative_tokens": k}
            generator = FastSpecGenerator(**chosen, **sizes, progress=False)
            arms[f"{name} {k}"] = Arm(stack.enter_context(generator))
    return arms


def drafted_ids(folder: Path) -> list[int] | None:
    """Ids that the MTP layers in a checkpoint of tools.heads draft. None: all."""
    path = folder / "draft_vocab.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def rows_of(
    name: str, temperature: float, kinds: Sequence[str], calls: Sequence[Call], plain: Sequence[Call]
) -> list[Row]:
    """The rows of one arm at one temperature: one for each kind, and one for all.

    Args:
        name: "drafter k".
        temperature: 0 for greedy.
        kinds: kind of the tasks of each call.
        calls: calls of the arm. plain: those of plain decoding.
    """
    drafter, _, drafts = name.rpartition(" ")
    rows = []
    for kind in (ALL, *dict.fromkeys(kinds)):
        chosen = [index for index, own in enumerate(kinds) if kind in (ALL, own)]
        found, others = [calls[index] for index in chosen], [plain[index] for index in chosen]
        sums = [step_sums(call) for call in found]
        emitted, steps = ([value for each in sums for value in each[column]] for column in (0, 1))
        drafted = sum(call.drafted or 0 for call in found)
        row: Row = {
            "bench": "tasks",
            "drafter": drafter,
            "k": int(drafts),
            "kind": kind,
            "temperature": temperature,
            **rated("tokens_per_step", (emitted, steps), 3),
            "acceptance": round(sum(call.accepted or 0 for call in found) / drafted, 4) if drafted else None,
            **rated("tok_s", token_sums(found), 1),
        }
        if temperature == 0:
            row["text_equal"] = "{} of {}".format(*same_text(found, others))
        rows.append(row)
    return rows


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf tasks`."""
    made.set_defaults(out="tasks", columns=COLUMNS)
    made.add_argument("--target", type=Path, required=True, help="a checkpoint")
    made.add_argument("--name", required=True, help="name of the target in the rows, without a path")
    made.add_argument("--lookups", nargs="*", default=[*LOOKUPS], choices=LOOKUPS, help="default: all")
    made.add_argument("--draft", type=Path, help="a draft model")
    made.add_argument("--self-draft", nargs="+", default=[], metavar="FORMAT", help="the target as its own draft")
    made.add_argument("--each", type=int, help="tasks of each kind; default: all")
    made.add_argument("--head", action="append", default=[], metavar="NAME=DIR", help="a head; may be repeated")
    made.add_argument("--mtp", action="append", default=[], metavar="NAME=DIR", help="--target with MTP layers in DIR")
    made.add_argument("--dtype", default=None, help="of the models; default: the checkpoint's")
    made.add_argument("--k", type=int, nargs="+", default=[4])
    made.add_argument("--new", type=int, default=128, help="new tokens at most")
    made.add_argument("--max-length", type=int, default=1024)
    made.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0: greedy")
    made.add_argument("--batch", type=int, default=1, help="tasks of one kind that a call decodes together")
    made.add_argument("--after-lookup", action="store_true", help="each head after lookup as well")
    made.add_argument(
        "--peers",
        nargs="+",
        default=[],
        choices=NAMES,
        help="peers, greedy; need --batch 1. The assistant is --draft, or the target a second time",
    )
    made.add_argument("--gguf", type=Path, help="the target's GGUF file, for the peer llama.cpp")
    made.add_argument("--kinds", nargs="+", help="kinds of tasks; default: all")


def chosen(tasks: Sequence[Task], kinds: Sequence[str] | None, each: int | None) -> list[Task]:
    """Selects tasks of some kinds, and the first ones of each kind. None: all."""
    seen: Counter[str] = Counter()
    found = []
    for task in tasks:
        seen[task.kind] += 1
        if (kinds is None or task.kind in kinds) and (each is None or seen[task.kind] <= each):
            found.append(task)
    return found


def batches(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    """The tasks of each call: up to `size` of one kind."""
    found: list[list[Task]] = []
    for kind in dict.fromkeys(task.kind for task in tasks):
        own = [task for task in tasks if task.kind == kind]
        found += [own[start : start + size] for start in range(0, len(own), size)]
    return found


def command_tasks(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Tokens per step and acceptance of drafters on 45 tasks, with a model of your own."""
    tasks = chosen(read_tasks(), given.kinds, given.each)
    if not tasks:
        raise SystemExit(
            f"--kinds {given.kinds}: no such task; kinds are {sorted({task.kind for task in read_tasks()})}"
        )
    if given.peers and given.batch > 1:
        raise SystemExit(f"--peers needs --batch 1, got --batch {given.batch}: peers decode one prompt at a time")
    if LLAMA_CPP in given.peers and given.gguf is None:
        raise SystemExit("--peers llama.cpp needs --gguf FILE, the file of the same model, and the package cyllama")
    on_cpu = torch.device(given.device).type == "cpu"
    clock, words = (time.process_time, "processor time") if on_cpu else (time.perf_counter, "wall")
    with ExitStack() as stack:
        arms = arms_of(stack, given)
        calls_of = batches(tasks, given.batch)
        prompts = [[ids_of(next(iter(arms.values())).generator, task) for task in each] for each in calls_of]
        kinds = [each[0].kind for each in calls_of]
        for temperature in given.temperatures:

            def measure(arm: Arm, number: int, temperature: float = temperature) -> Call:
                options = law(temperature > 0, number, temperature)
                ends = arm.generator.tokenizer.eos_token_id
                return generate(arm, prompts[number], given.new, clock=clock, eos_token_id=ends, **options)

            longest = max(range(len(prompts)), key=lambda number: max(map(len, prompts[number])))
            for arm in arms.values():
                for number in {0, longest}:  # warm
                    measure(arm, number)
            calls = Experiment(arms, measure, len(prompts)).run(say)
            workload = f"{given.name}, {len(tasks)} tasks, up to {given.new} new tokens, batch {given.batch}"
            shared = {"workload": workload, "seconds_of": words}
            plain = calls[f"{PLAIN} 0"]
            yield [
                {**row, **shared}
                for name, found in calls.items()
                for row in rows_of(name, temperature, kinds, found, plain)
            ]
            if temperature == 0:
                ends = next(iter(arms.values())).generator.tokenizer.eos_token_id
                for name, found in beside(given, prompts, eos_token_id=ends, clock=clock):
                    yield [{**row, **shared} for row in rows_of(name, 0, kinds, found, plain)]


def beside(given: argparse.Namespace, prompts: list[list[list[int]]], **how: Any) -> Iterator[tuple[str, list[Call]]]:
    """Yields "peer k" and its calls, as soon as they are there."""
    how |= {"dtype": given.dtype, "device": given.device, "length": given.max_length, "assistant": given.draft}
    how["gguf"] = given.gguf
    for peer in given.peers:
        name = NAMES[peer] + (", itself" if peer == ASSISTANT and given.draft is None else "")
        for k in given.k if peer in DRAFTING else (0,):
            say(f"{name}, k = {k}")
            yield f"{name} {k}", peer_calls(peer, given.target, prompts, k, given.new, **how)
