"""Servers that speak OpenAI's protocol, each a process of its own on a free port: start, ask, hold, end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from perf.experiment import say
from perf.models import Models
from perf.records import private

READY_SECONDS = 300.0  # for a server to answer its first request
PAGE = 256  # tokens of a page of the peer's cache
LONGEST_LINE = 2**20  # bytes of an event
CLOCK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Line:
    """The command line of a server, and the fields of its requests.

    Attributes:
        name: of the server in rows. arguments: of `python`.
        model: name of the model in requests.
        python: the interpreter.
        fields: further fields of a streamed request.
    """

    name: str
    arguments: list[str]
    model: str
    python: str = sys.executable
    fields: dict[str, Any] = field(default_factory=dict)


def ours(target: Path, draft: Path | None, *, k: int, rows: int, length: int, device: str) -> Line:
    """`fastspec serve`, with a draft model or without."""
    line = ["-m", "fastspec.cli", "serve", str(target), "--device", device, "--name", "model"]
    line += ["--max-batch-size", str(rows), "--max-length", str(length), "--access-log", "off"]
    line += ["--draft", str(draft), "--num-speculative-tokens", str(k)] if draft else ["--num-speculative-tokens", "0"]
    name = f"fastspec serve, {k} drafts a step" if draft else "fastspec serve, no drafts"
    return Line(name, line, "model", fields={"stream_options": {"include_usage": True}})


def theirs(target: Path, *, rows: int, length: int, device: str, python: str = sys.executable) -> Line:
    """`transformers serve` with continuous batching, which alone answers several requests at once."""
    line = ["-m", "perf.peer_server", "serve", str(target), "--continuous-batching", "--device", device]
    # its pages are all that is left of memory, unless they are counted: one more for each row than are needed
    line += ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(rows * (length // PAGE + 2))]
    return Line("transformers serve", line, str(target), python)


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer as its client saw it.

    Attributes:
        asked: time at which the request was sent. pieces: times at which pieces of text came. Seconds of one clock.
        text, tokens: of the answer.
    """

    asked: float
    pieces: list[float]
    text: str
    tokens: int


class Running:
    """A server that was started.

    Args:
        process: its process. port: its port. line: its command line. told: its output.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, line: Line, told: IO[bytes]) -> None:
        self.process, self.port, self.line = process, port, line
        self._told = told

    def wait(self, text: str) -> None:
        """Waits until the server answers `text`.

        Raises:
            RuntimeError: the server ended, refuses, or does not answer; with the end of its output.
        """
        end, error = time.monotonic() + READY_SECONDS, "no answer"
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(self._with_words(f"it ended with {self.process.returncode}"))
            try:
                asked(self.port, self.line.model, text, 2, end - time.monotonic())
            except (OSError, http.client.HTTPException) as found:
                error = repr(found)
                time.sleep(0.2)
            except RuntimeError as found:
                raise RuntimeError(self._with_words(str(found))) from found
            else:
                return
        raise RuntimeError(self._with_words(f"not ready within {READY_SECONDS:.0f} s: {error}"))

    def _with_words(self, error: str) -> str:
        self._told.seek(0)
        return f"{error}\nit said: {self._told.read().decode(errors='replace')[-3000:]}"

    def hold(self) -> None:
        """Stops the process, so that it takes no time from others."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets a stopped process go on."""
        self.process.send_signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads so far; 0 if the system does not tell."""
        told = Path(f"/proc/{self.process.pid}/stat")
        if not told.is_file():
            return 0.0
        user, system = told.read_text().rsplit(") ", 1)[1].split()[11:13]
        return (int(user) + int(system)) / CLOCK


@contextmanager
def running(line: Line, cpus: Sequence[int] = ()) -> Iterator[Running]:
    """Starts a server; ends it when the context is left.

    Args:
        line: its command line.
        cpus: cores that it is bound to, with as many threads of torch; empty: any.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(len(cpus))} if cpus else {})}
    with tempfile.TemporaryFile() as told:
        command = [line.python, *line.arguments, "--port", str(port)]
        with subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, env=environment) as process:
            if cpus:
                os.sched_setaffinity(process.pid, cpus)
            made = Running(process, port, line, told)
            try:
                yield made
            finally:
                made.go_on()
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def asked(port: int, model: str, text: str, new: int, seconds: float) -> int:
    """Asks for a whole answer; returns its number of tokens.

    Raises:
        ConnectionError: the models are loading.
        RuntimeError: the server refuses.
    """
    body = {"model": model, "prompt": text, "max_tokens": new, "temperature": 0.0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
    finally:
        connection.close()
    if answer.status == http.client.SERVICE_UNAVAILABLE:
        raise ConnectionError(f"{answer.status}: {told[:300]!r}")
    if answer.status != http.client.OK:
        raise RuntimeError(f"{answer.status}: {told[:300]!r}")
    return int(json.loads(told)["usage"]["completion_tokens"])


async def streamed(server: Running, text: str, new: int) -> Answer:
    """Asks for one answer and reads it as it is streamed.

    Raises:
        RuntimeError: the server refuses.
    """
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
    """The answer that events make up.

    Args:
        asked: time of the request.
        events: time and JSON of each.

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


def words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose token i is the word "t<i>", so that any engine can be asked by text."""
    model = WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0")
    made = Tokenizer(model)
    made.pre_tokenizer = WhitespaceSplit()
    made.decoder = WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0")


def as_words(prompts: Sequence[list[int]]) -> list[str]:
    """Prompts as texts that such a tokenizer takes apart into the same ids."""
    return [" ".join(f"t{token}" for token in prompt) for prompt in prompts]


def copied(checkpoint: Path, place: Path) -> Path:
    """A copy of a checkpoint in which no token ends a text."""
    shutil.copytree(checkpoint, place)
    for file in (place / "config.json", place / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    return place


def written(model: PreTrainedModel, place: Path) -> Path:
    """A checkpoint of a live model in one file, with `words` as its tokenizer; no token ends a text."""
    place.mkdir(parents=True)
    tied = model.config.tie_word_embeddings
    weights = {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, place / "model.safetensors", {"format": "pt"}
    )
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "eos_token_id": None}
    (place / "config.json").write_text(json.dumps(config, default=str))
    GenerationConfig(do_sample=False, pad_token_id=0).save_pretrained(place)
    words(model.config.vocab_size).save_pretrained(place)
    return place


def checkpoints(models: Models, scratch: Path) -> tuple[Path, Path | None]:
    """Target and draft on disk, with tokenizers, and with no token that ends a text. Gives back their live weights."""
    places = [scratch / "target", scratch / "draft"]
    if models.directories:
        made = [each and copied(each, place) for each, place in zip(models.directories, places, strict=True)]
    else:
        made = [written(each, place) for each, place in zip(models.live, places, strict=True)]
    models.let_go()
    assert made[0] is not None
    return made[0], made[1]


def texts_of(models: Models, prompts: Sequence[list[int]], target: Path) -> list[str]:
    """The prompts as texts of the target's tokenizer."""
    if not models.directories:
        return as_words(prompts)
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    return [str(tokenizer.decode(prompt)) for prompt in prompts]


def status_of(name: str, error: Exception) -> str:
    """The status of a server that could not take part. All that it said goes to stderr: it may name this machine."""
    say(f"{name}: {error!r}")
    status = f"failed: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
    return status if private({"status": status}) is None else "failed"
