"""Servers that speak OpenAI's protocol, each a process of its own on a free port: started, asked, held, ended."""

from __future__ import annotations

import argparse
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
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from perf.workloads import WORKLOADS

READY_SECONDS = 300.0  # for a server to answer its first request
PAGE = 256  # tokens of a page of the peer's cache
CLOCK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Line:
    """How a server is started, and asked.

    Attributes:
        name: of what is measured. arguments: of `python`.
        model: what its requests call it.
        python: the interpreter.
        fields: of a streamed request, besides what all have.
    """

    name: str
    arguments: list[str]
    model: str
    python: str = sys.executable
    fields: dict[str, Any] = field(default_factory=dict)


def ours(target: Path, draft: Path | None, *, k: int, rows: int, length: int, device: str) -> Line:
    """`fastspec serve`, with a draft model or without."""
    line = ["-m", "fastspec.cli", "serve", str(target), "--device", device, "--name", "model"]
    line += ["--max-batch-size", str(rows), "--max-length", str(length)]
    line += ["--draft", str(draft), "--num-speculative-tokens", str(k)] if draft else ["--num-speculative-tokens", "0"]
    name = f"fastspec serve, {k} drafts a step" if draft else "fastspec serve, no drafts"
    return Line(name, line, "model", fields={"stream_options": {"include_usage": True}})


def theirs(target: Path, *, rows: int, length: int, device: str, python: str = sys.executable) -> Line:
    """`transformers serve` with continuous batching, which alone answers several requests at once."""
    line = ["-m", "perf.peer_server", "serve", str(target), "--continuous-batching", "--device", device]
    # its pages are all that is left of memory, unless they are counted: one more for each row than are needed
    line += ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(rows * (length // PAGE + 2))]
    return Line("transformers serve", line, str(target), python)


class Running:
    """A server that was started.

    Args:
        process: of it. port: that it listens on. line: it was started with. told: what it writes.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, line: Line, told: IO[bytes]) -> None:
        self.process, self.port, self.line = process, port, line
        self._told = told

    def wait(self, text: str) -> None:
        """Waits for its answer to `text`.

        Raises:
            RuntimeError: it ended, refuses, or does not answer; with the last of what it said.
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
        """It takes no more time of the machine until it goes on."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of `hold`."""
        self.process.send_signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """What all its threads have computed so far; 0 where the system does not tell."""
        told = Path(f"/proc/{self.process.pid}/stat")
        if not told.is_file():
            return 0.0
        user, system = told.read_text().rsplit(") ", 1)[1].split()[11:13]
        return (int(user) + int(system)) / CLOCK


@contextmanager
def running(line: Line, cpus: Sequence[int] = ()) -> Iterator[Running]:
    """Starts a server, to be waited for; it ends when the context is left.

    Args:
        cpus: that it is bound to, with as many threads of torch; none: any.
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
    """Tokens of a whole answer.

    Raises:
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
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {told[:300]!r}")
    return int(json.loads(told)["usage"]["completion_tokens"])


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


def add_load(made: argparse.ArgumentParser, *, workload: str, new: int, drafts: int) -> None:
    """Options of a command that asks for many answers at once, with the defaults that differ."""
    made.add_argument("--workload", choices=sorted(WORKLOADS), default=workload)
    made.add_argument("--acceptance", type=float, default=0.78, help="of a planted pair")
    made.add_argument("--seed", type=int, default=0, help="of a planted pair")
    made.add_argument("--requests", type=int, default=32, help="at once")
    made.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=new, help="tokens of an answer")
    made.add_argument("--drafts", type=int, default=drafts, help="per step; 0 leaves drafting out")


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
