"""Many requests at once: `generate` on the whole batch, handles, our server, and the server of transformers.

All have the same weights and prompts, in the same run, and as many tokens to write: no token ends a text. Servers are
processes of their own, read the checkpoints from disk and are asked over HTTP, by as many clients as there are
requests, for whole answers. What cannot take part says why in its row's `status`.

Usage: python -m perf serving --workload 8b+1b --requests 32 --prompt 64 --new 128 --drafts 2
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from fastspec import FastSpecGenerator, GenerateOutput
from perf.peers import FAILURES
from perf.records import Row, private
from perf.servers import Line, add_load, as_words, asked, ours, running, theirs, written
from perf.workload_models import open_models

ROUNDS = 3  # after one that pays for captures
ANSWER_SECONDS = 120.0
ENGINES = ("handles", "fastspec serve", "transformers", "transformers serve")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        texts, prompts: of every request, as text and as ids. new: tokens of an answer. k: drafts per step.
        target, draft: directories of the checkpoints, with a tokenizer.
        device: that all run on.
    """

    texts: list[str]
    prompts: list[list[int]]
    new: int
    k: int
    target: Path
    draft: Path
    device: str

    @property
    def max_length(self) -> int:
        """Tokens of a row."""
        return max(map(len, self.prompts)) + self.new + 32


def add_options(made: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_load(made, workload="8b+1b", new=128, drafts=2)
    made.add_argument("--engines", type=lambda text: tuple(text.split(",")), default=ENGINES, help=", ".join(ENGINES))


def command_serving(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Many requests at once: generate, handles, our server and transformers'."""
    options = {"acceptance": given.acceptance, "seed": given.seed, "device": given.device}
    about = f"{given.workload}, {given.requests} prompts of {given.prompt}, {given.new} new, k = {given.drafts}"
    with tempfile.TemporaryDirectory() as scratch, open_models(given.workload, **options) as models:
        prompts = models.prompts(given.requests, given.prompt)
        places = Path(scratch) / "target", Path(scratch) / "draft"
        target, draft = written(models.target, places[0]), written(models.draft, places[1])
        texts = as_words(prompts)
        load = Load(texts, prompts, given.new, given.drafts, target, draft, given.device)
        let_go(models)
        base: float | None = None
        for name, seconds, status in timed(load, given.engines):
            tokens = given.requests * given.new
            row: Row = {"bench": "serving", "workload": about, "how": name, "status": status}
            if seconds:
                taken = statistics.median(seconds)
                base = base or taken
                row |= {"tok_s": round(tokens / taken), "over_generate": round(base / taken, 3)}
                row["seconds"] = [round(one, 3) for one in seconds]
            yield [row]


def let_go(models: Any) -> None:
    """The live models give back their memory: everybody reads from disk."""
    for model in (models.target, models.draft):
        model.to("meta")
    _freed()


def _freed() -> None:
    """Gives back what nobody holds: the next engine may be another process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(load: Load, engines: tuple[str, ...]) -> Iterator[tuple[str, list[float], str]]:
    """Name, seconds of each round, and what went wrong, "ok" where nothing did."""
    yield from _in_process(load, handles="handles" in engines)
    _freed()
    shape: dict[str, Any] = {"rows": len(load.texts), "length": load.max_length, "device": load.device}
    for name, line in (
        ("fastspec serve", ours(load.target, load.draft, k=load.k, **shape)),
        ("transformers serve", theirs(load.target, **shape)),
    ):
        if name in engines:
            try:
                yield name, _served(line, load), "ok"
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                yield name, [], _failed(name, error)
    if "transformers" in engines:
        try:
            # a process of its own, whose end frees the device, whatever its threads still hold
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                yield "transformers, generate_batch", pool.submit(_continuous, load).result(), "ok"
        except FAILURES as error:
            yield "transformers, generate_batch", [], _failed("generate_batch", error)


def _failed(name: str, error: Exception) -> str:
    """The status of what could not take part; all that it said goes to stderr, for it may name this machine."""
    print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    status = f"failed: {str(error).splitlines()[0][:200]}"
    return status if private({"status": status}) is None else "failed"


def _in_process(load: Load, *, handles: bool) -> Iterator[tuple[str, list[float], str]]:
    options: dict[str, Any] = {"max_new_tokens": load.new, "do_sample": False, "eos_token_id": []}
    made: dict[str, Any] = {"max_batch_size": len(load.prompts), "max_length": load.max_length, "progress": False}
    made |= {"num_speculative_tokens": load.k, "draft_quantization": None, "device": load.device}
    with FastSpecGenerator(load.target, load.draft, **made) as generator:

        def batch() -> list[list[int]]:
            output = generator.generate(load.prompts, return_dict_in_generate=True, **options)
            assert isinstance(output, GenerateOutput)
            return output.new_tokens

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


def _continuous(load: Load) -> list[float]:
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


def _rounds(once: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        once()
        taken.append(time.perf_counter() - start)
    return taken[1:]


def _served(line: Line, load: Load) -> list[float]:
    with running(line) as server, ThreadPoolExecutor(len(load.texts)) as pool:
        server.wait(load.texts[0])

        def once() -> None:
            answers = pool.map(lambda text: asked(server.port, line.model, text, load.new, ANSWER_SECONDS), load.texts)
            if (counts := list(answers)) != [load.new] * len(counts):
                raise RuntimeError(f"answers of {sorted(set(counts))} tokens, wanted {load.new}")

        return _rounds(once)
