"""Many requests at once: `generate` on the whole batch, handles, and servers.

All engines have the same weights, prompts and number of new tokens; no token ends a text. Servers are processes of
their own that read checkpoints from disk. `serving` asks them for whole answers, and again by streams; in `servers`
clients only stream. There every round has prompts of its own, each server gets them in turn, and a server whose turn it
is not is stopped. A server that cannot take part says why in its row's `status`.

Usage: python -m perf serving --workload 8b+1b --requests 32 --prompt 64 --new 128 --drafts 2
       python -m perf servers --workload shipped --requests 32 --prompt 64 --new 64 --drafts 4 --cpus 0
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fastspec import FastSpecGenerator
from perf.experiment import FAILURES, Arm, generate
from perf.models import add_pair_options, opened
from perf.records import Row
from perf.servers import Answer, Line, Running, asked, checkpoints, ours, running, status_of, streamed, texts_of, theirs
from perf.workloads import OWN, SHIPPED

ROUNDS = 3  # after one that pays for captures
ANSWER_SECONDS = 300.0
ENGINES = ("handles", "fastspec serve", "transformers", "transformers serve")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round, and CPU seconds of the process that answers."""

    seconds: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Load:
    """The requests and the models that answer them.

    Attributes:
        texts, prompts: of every request, as text and as ids. new: tokens of an answer. k: drafts per step.
        target, draft: directories of the checkpoints, with a tokenizer; no draft: None.
        device: of all engines.
    """

    texts: list[str]
    prompts: list[list[int]]
    new: int
    k: int
    target: Path
    draft: Path | None
    device: str

    @property
    def max_length(self) -> int:
        """Tokens of a row."""
        return max(map(len, self.prompts)) + self.new + 32


@dataclass(frozen=True, slots=True)
class Turn:
    """All answers of one server in one round.

    Attributes:
        answers: in the order of the prompts. cpu: CPU seconds of the server.
        load: mean number of runnable threads of the machine in the last minute.
    """

    answers: list[Answer]
    cpu: float
    load: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last piece."""
        return max(answer.pieces[-1] for answer in self.answers) - min(answer.asked for answer in self.answers)

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together."""
        return self.tokens / self.seconds


def _add_load(made: argparse.ArgumentParser, *, workload: str, new: int, drafts: int) -> None:
    """Adds the options of a command that asks for many answers at once."""
    add_pair_options(made, workload)
    made.add_argument("--requests", type=int, default=32, help="at once")
    made.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=new, help="tokens of an answer")
    made.add_argument("--drafts", type=int, default=drafts, help="per step; 0 leaves drafting out")


def _whole(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def add_serving_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf serving`."""
    _add_load(made, workload="8b+1b", new=128, drafts=2)
    made.add_argument("--engines", type=lambda text: tuple(text.split(",")), default=ENGINES, help=", ".join(ENGINES))


def add_servers_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf servers`."""
    _add_load(made, workload=SHIPPED, new=64, drafts=4)
    made.add_argument("--rounds", type=int, default=4, help="that are measured")
    made.add_argument("--cpus", type=_whole, default=(), help="that each server is bound to, such as 0,1")
    made.add_argument("--peer-python", default=sys.executable, help="interpreter that has transformers[serving]")


def command_serving(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Many requests at once: generate, handles, our server and transformers'."""
    name = OWN if given.target else given.workload
    about = f"{name}, {given.requests} prompts of {given.prompt}, {given.new} new, k = {given.drafts}"
    with tempfile.TemporaryDirectory() as scratch, opened(given) as models:
        prompts = models.prompts(given.requests, given.prompt)
        target, draft = checkpoints(models, Path(scratch))
        texts = texts_of(models, prompts, target)
        load = Load(texts, prompts, given.new, given.drafts, target, draft, given.device)
        base: float | None = None
        for how, rounds, status in timed(load, given.engines):
            tokens = given.requests * given.new
            row: Row = {"bench": "serving", "workload": about, "how": how, "status": status}
            if rounds:
                taken, cpu = (statistics.median(each) for each in zip(*map(astuple, rounds), strict=True))
                base = base or taken
                row |= {"tok_s": round(tokens / taken), "over_generate": round(base / taken, 3)}
                row |= {
                    "seconds": [round(one.seconds, 3) for one in rounds],
                    "ms_cpu_token": round(1e3 * cpu / tokens, 3),
                }
            yield [row]


def command_servers(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Our server and transformers' in turn, under many streaming clients at once."""
    name = OWN if given.target else given.workload
    about = f"{name}, {given.requests} prompts of {given.prompt}, {given.new} new, greedy, streamed"
    with tempfile.TemporaryDirectory() as scratch, opened(given) as models:
        prompts = models.prompts(given.requests * (given.rounds + 1), given.prompt)
        target, draft = checkpoints(models, Path(scratch))
        texts = texts_of(models, prompts, target)
        shape: dict[str, Any] = {"rows": given.requests, "device": given.device}
        shape["length"] = given.prompt * 2 + given.new + 32  # a text may come back as more tokens than it was made of
        lines = [ours(target, None, k=0, **shape)]
        lines += [ours(target, draft, k=given.drafts, **shape)] if given.drafts and draft else []
        lines += [theirs(target, python=given.peer_python, **shape)]
        rounds = [texts[start : start + given.requests] for start in range(0, len(texts), given.requests)]
        for row in compared(lines, rounds, given.new, given.cpus):
            threads = {"threads": len(given.cpus)} if given.cpus else {}
            yield [{"bench": "servers", "workload": about, **row, **threads}]


def _freed() -> None:
    """Frees unused memory: the next engine may be another process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(load: Load, engines: tuple[str, ...]) -> Iterator[tuple[str, list[Round], str]]:
    """(name, rounds, status) of every engine."""
    yield from _in_process(load, handles="handles" in engines)
    _freed()
    shape: dict[str, Any] = {"rows": len(load.texts), "length": load.max_length, "device": load.device}
    for name, line in (
        ("fastspec serve", ours(load.target, load.draft, k=load.k, **shape)),
        ("transformers serve", theirs(load.target, **shape)),
    ):
        if name in engines:
            try:
                for way, rounds in _served(line, load):
                    yield f"{name}{way}", rounds, "ok"
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                yield name, [], status_of(name, error)
    if "transformers" in engines:
        try:
            # a process of its own, whose end frees the device, whatever its threads still hold
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                yield "transformers, generate_batch", pool.submit(_continuous, load).result(), "ok"
        except FAILURES as error:
            yield "transformers, generate_batch", [], status_of("generate_batch", error)


def _in_process(load: Load, *, handles: bool) -> Iterator[tuple[str, list[Round], str]]:
    options: dict[str, Any] = {"max_new_tokens": load.new, "do_sample": False, "eos_token_id": []}
    made: dict[str, Any] = {"max_batch_size": len(load.prompts), "max_length": load.max_length, "progress": False}
    made |= {"num_speculative_tokens": load.k, "draft_quantization": None, "device": load.device}
    with FastSpecGenerator(load.target, load.draft, **made) as generator:

        def batch() -> list[list[int]]:
            return generate(Arm(generator), load.prompts, load.new, do_sample=False, eos_token_id=[]).text

        def submitted() -> list[list[int]]:
            waiting = [generator.submit(prompt, **options) for prompt in load.prompts]
            return [handle.result().new_tokens[0] for handle in waiting]

        def streamed() -> list[list[int]]:
            async def one(prompt: list[int]) -> list[int]:
                return [token async for token in generator.submit(prompt, **options)]

            async def every() -> list[list[int]]:
                return list(await asyncio.gather(*map(one, load.prompts)))

            return asyncio.run(every())

        expected = batch()
        ways = {"generate": batch} | ({"submit": submitted, "submit, one event loop": streamed} if handles else {})
        for name, way in ways.items():

            def checked(way: Callable[[], list[list[int]]] = way) -> None:
                if way() != expected:
                    raise RuntimeError("another text than generate's")

            yield name, _rounds(checked), "ok"


def _continuous(load: Load) -> list[Round]:
    """transformers' continuous batching without a server, in a process of its own: the whole batch at once."""
    config = GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_pretrained(load.target, dtype="auto")
    model.to(load.device).eval()

    def once() -> None:
        found = model.generate_batch(load.prompts, generation_config=config, persistent_manager=True)
        counts = {len(each.generated_tokens) for each in found.values()}
        if counts != {load.new} or len(found) != len(load.prompts):
            errors = {str(each.error) for each in found.values()}
            raise RuntimeError(f"{len(found)} answers of {sorted(counts)} tokens, errors {sorted(errors)}")

    try:
        return _rounds(once)
    finally:
        model.destroy_cached_continuous_batching_manager()


def _rounds(once: Callable[[], object], cpu: Callable[[], float] = time.process_time) -> list[Round]:
    taken = []
    for _ in range(ROUNDS + 1):
        start, before = time.perf_counter(), cpu()
        once()
        taken.append(Round(time.perf_counter() - start, cpu() - before))
    return taken[1:]


def _served(line: Line, load: Load) -> Iterator[tuple[str, list[Round]]]:
    """Way of asking and its rounds: whole answers, then streams."""
    with running(line) as server, ThreadPoolExecutor(len(load.texts)) as pool:
        server.wait(load.texts[0])

        def checked(counts: list[int]) -> None:
            if counts != [load.new] * len(counts):
                raise RuntimeError(f"answers of {sorted(set(counts))} tokens, wanted {load.new}")

        def whole() -> None:
            answers = pool.map(lambda text: asked(server.port, line.model, text, load.new, ANSWER_SECONDS), load.texts)
            checked(list(answers))

        def streams() -> None:
            checked([answer.tokens for answer in asyncio.run(_all(server, load.texts, load.new))])

        yield "", _rounds(whole, server.cpu_seconds)
        yield ", streams", _rounds(streams, server.cpu_seconds)


def compared(lines: Sequence[Line], rounds: Sequence[list[str]], new: int, cpus: Sequence[int]) -> Iterator[Row]:
    """One row a server; the last server is the base of the comparison.

    Args:
        lines: the servers.
        rounds: prompts of each round; the first round is not measured.
        new: tokens of an answer.
        cpus: cores that each server is bound to.
    """
    turns: dict[str, list[Turn]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        there: list[Running] = []
        started = [stack.enter_context(running(line, cpus)) for line in lines]
        for server in started:
            try:
                server.wait("warm")
            except (OSError, RuntimeError) as error:
                failed[server.line.name] = status_of(server.line.name, error)
            else:
                there.append(server)
        for server in there:
            server.hold()
        for texts in rounds:
            for server in there:
                name = server.line.name
                if name in failed:
                    continue
                try:
                    turns.setdefault(name, []).append(turn(server, texts, new))
                except (OSError, RuntimeError, asyncio.TimeoutError) as error:
                    failed[name] = status_of(name, error)
    taken = {name: found[1:] for name, found in turns.items() if name not in failed}
    base = taken.get(lines[-1].name)
    for line in lines:
        if line.name in failed:
            yield {"how": line.name, "status": failed[line.name]}
        else:
            yield {"how": line.name, "status": "ok", **summary(taken[line.name], base)}


def turn(server: Running, texts: Sequence[str], new: int) -> Turn:
    """Asks a server for all answers at once, while the other servers are stopped.

    Raises:
        RuntimeError: it refuses, or an answer is not as long as it was to be.
    """
    server.go_on()
    before = server.cpu_seconds()
    try:
        answers = asyncio.run(_all(server, texts, new))
    finally:
        server.hold()
    if any(answer.tokens != new for answer in answers):
        raise RuntimeError(f"answers of {sorted({answer.tokens for answer in answers})} tokens, wanted {new}")
    return Turn(answers, server.cpu_seconds() - before, os.getloadavg()[0])


async def _all(server: Running, texts: Sequence[str], new: int) -> list[Answer]:
    asked = asyncio.gather(*(streamed(server, text, new) for text in texts))
    return list(await asyncio.wait_for(asked, ANSWER_SECONDS))


def summary(turns: Sequence[Turn], base: Sequence[Turn] | None) -> Row:
    """The columns of a server over its rounds.

    Args:
        turns: its rounds.
        base: the same rounds of the server to compare with.
    """
    answers = [answer for each in turns for answer in each.answers]
    first = [1e3 * (answer.pieces[0] - answer.asked) for answer in answers]
    gaps = [1e3 * (b - a) for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)]
    a_token = [1e3 * (one.pieces[-1] - one.pieces[0]) / max(1, one.tokens - 1) for one in answers]
    row: Row = {
        "tok_s": round(statistics.median(each.speed for each in turns), 1),
        "tok_s_rounds": [round(each.speed, 1) for each in turns],
        "first_ms": [round(share_of(first, share), 1) for share in (0.5, 0.99)],
        "gap_ms": [round(share_of(gaps, share), 2) for share in (0.5, 0.99)],
        "token_ms": round(statistics.median(a_token), 2),
        "tokens_a_piece": round(sum(one.tokens for one in answers) / sum(len(one.pieces) for one in answers), 2),
        "load": [round(each.load, 1) for each in turns],
    }
    if all(each.cpu for each in turns):
        row["tok_cpu_s"] = round(sum(each.tokens for each in turns) / sum(each.cpu for each in turns), 1)
    if base:
        ratios = [mine.speed / other.speed for mine, other in zip(turns, base, strict=True)]
        row["over_peer"] = round(statistics.median(ratios), 2)
        row["over_peer_rounds"] = [round(ratio, 2) for ratio in ratios]
        pairs = [
            pair
            for mine, other in zip(turns, base, strict=True)
            for pair in zip(mine.answers, other.answers, strict=True)
        ]
        same = sum(mine.text.strip() == other.text.strip() for mine, other in pairs)
        row["texts_as_peer"] = f"{same} of {len(pairs)}"
    return row


def share_of(values: Sequence[float], share: float) -> float:
    """The smallest value that such a share of all does not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
