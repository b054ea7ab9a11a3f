"""Servers in turn under one load: our own, with drafts and without, and that of transformers.

As many clients as there are requests ask at the same moment for answers of the same length, greedily, and read them
as they are streamed. Every round has prompts of its own, which each server gets; all that is measured begins after a
round that is not. A server that is not on turn is stopped, so that it takes no time from the others. What cannot take
part says why in its row's `status`.

Usage: python -m perf servers --workload shipped --requests 32 --prompt 64 --new 64 --drafts 4 --cpus 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.records import Row, private
from perf.servers import Line, Running, add_load, as_words, copied, ours, running, theirs, written
from perf.serving import let_go
from perf.workload_models import SHIPPED, Models, open_models

ANSWER_SECONDS = 300.0
LONGEST_LINE = 2**20  # bytes of an event


@dataclass(frozen=True, slots=True)
class Answer:
    """What one client saw.

    Attributes:
        asked: when the request was sent. pieces: when each piece of text came. All in seconds of one clock.
        text, tokens: of the answer.
    """

    asked: float
    pieces: list[float]
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """All answers of one server in one round.

    Attributes:
        answers: in the order of the prompts. cpu: seconds that the server computed.
        load: of the machine at its end, as the mean number of runnable threads in a minute.
    """

    answers: list[Answer]
    cpu: float
    load: float

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        """From the first request to the last piece."""
        return max(answer.pieces[-1] for answer in self.answers) - min(answer.asked for answer in self.answers)

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together."""
        return self.tokens / self.seconds


def add_options(made: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_load(made, workload=SHIPPED, new=64, drafts=4)
    made.add_argument("--rounds", type=int, default=4, help="that are measured")
    made.add_argument("--cpus", type=_cpus, default=(), help="that each server is bound to, such as 0,1")
    made.add_argument("--peer-python", default=sys.executable, help="interpreter that has transformers[serving]")


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def command_servers(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Our server and transformers' in turn, under many streaming clients at once."""
    options = {"acceptance": given.acceptance, "seed": given.seed, "device": given.device}
    about = f"{given.workload}, {given.requests} prompts of {given.prompt}, {given.new} new, greedy, streamed"
    with tempfile.TemporaryDirectory() as scratch, open_models(given.workload, **options) as models:
        prompts = models.prompts(given.requests * (given.rounds + 1), given.prompt)
        target, draft = checkpoints(models, Path(scratch))
        texts = texts_of(models, prompts, target)
        let_go(models)
        shape: dict[str, Any] = {"rows": given.requests, "device": given.device}
        shape["length"] = given.prompt * 2 + given.new + 32  # a text may come back as more tokens than it was made of
        lines = [ours(target, None, k=0, **shape)]
        lines += [ours(target, draft, k=given.drafts, **shape)] if given.drafts else []
        lines += [theirs(target, python=given.peer_python, **shape)]
        rounds = [texts[start : start + given.requests] for start in range(0, len(texts), given.requests)]
        for row in compared(lines, rounds, given.new, given.cpus):
            threads = {"threads": len(given.cpus)} if given.cpus else {}
            yield [{"bench": "servers", "workload": about, **row, **threads}]


def checkpoints(models: Models, scratch: Path) -> tuple[Path, Path]:
    """Target and draft on disk, with tokenizers, and with no token that ends a text."""
    places = scratch / "target", scratch / "draft"
    if models.directories:
        made = [copied(each, place) for each, place in zip(models.directories, places, strict=True)]
    else:
        made = [written(each, place) for each, place in zip((models.target, models.draft), places, strict=True)]
    return made[0], made[1]


def texts_of(models: Models, prompts: Sequence[list[int]], target: Path) -> list[str]:
    """What the prompts are as texts."""
    if models.workload != SHIPPED:
        return as_words(prompts)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    return [str(tokenizer.decode(prompt)) for prompt in prompts]


def compared(lines: Sequence[Line], rounds: Sequence[list[str]], new: int, cpus: Sequence[int]) -> Iterator[Row]:
    """One row a server, the last one being what the others are compared with.

    Args:
        rounds: prompts of each; the first is not measured.
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
                failed[server.line.name] = _told(server.line.name, error)
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
                    failed[name] = _told(name, error)
    taken = {name: found[1:] for name, found in turns.items() if name not in failed}
    base = taken.get(lines[-1].name)
    for line in lines:
        if line.name in failed:
            yield {"how": line.name, "status": failed[line.name]}
        else:
            yield {"how": line.name, "status": "ok", **summary(taken[line.name], base)}


def _told(name: str, error: Exception) -> str:
    """The status of what could not take part; all that it said goes to stderr, for it may name this machine."""
    print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    status = f"failed: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
    return status if private({"status": status}) is None else "failed"


def turn(server: Running, texts: Sequence[str], new: int) -> Turn:
    """Asks a server for all answers at once.

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
    asked = asyncio.gather(*(_one(server, text, new) for text in texts))
    return list(await asyncio.wait_for(asked, ANSWER_SECONDS))


async def _one(server: Running, text: str, new: int) -> Answer:
    line = server.line
    body = {"model": line.model, "prompt": text, "max_tokens": new, "temperature": 0.0, "stream": True, **line.fields}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=LONGEST_LINE)
    try:
        asked = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {(await reader.read())[-300:]!r}")
        events: list[tuple[float, bytes]] = []
        while told := await reader.readline():
            if told.startswith(b"data: {"):
                events.append((time.perf_counter(), told[len(b"data: ") :]))
    finally:
        writer.close()
    return answer_of(asked, events)


def answer_of(asked: float, events: Sequence[tuple[float, bytes]]) -> Answer:
    """What the events of an answer came to.

    Args:
        events: when each came, and its JSON.

    Raises:
        RuntimeError: one tells an error, or none has text.
    """
    pieces, text, tokens = [], "", 0
    for at, data in events:
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        piece = "".join(choice.get("text") or "" for choice in event["choices"])
        if piece:
            pieces.append(at)
        text += piece
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not pieces:
        raise RuntimeError("an answer without text")
    return Answer(asked, pieces, text, tokens)


def summary(turns: Sequence[Turn], base: Sequence[Turn] | None) -> Row:
    """Figures of a server over its rounds.

    Args:
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
