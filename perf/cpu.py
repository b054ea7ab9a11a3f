"""Decoding on the CPU beside transformers, in seconds of the CPU: any model, a few real prompts, one prompt at a time.

All ways take turns on each prompt, so that a busy machine slows all of them. Rows have tokens per second of the CPU,
and the ratio to transformers' plain generate in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastspec
from perf.experiment import Experiment, say
from perf.records import Row

CODE = "def add(a, b):\n    return a + b\n\n\ndef scale(values, by):\n    return [value * by for value in values]\n"
TASKS = (
    f"Rewrite this Python file with a docstring in every function:\n{CODE}",
    "Tell a short story about a fox and a river.",
    "Copy this list twice: apple, pear, plum, cherry, fig, grape, melon, lemon, lime, date.",
)
FILLER = "The quick brown fox jumps over the lazy dog, and the river runs on. "
BASE = "transformers plain"
LOOKED_UP = 10  # drafts of a step by lookup at most, here and there
COLUMNS = (
    "engine", "workload", "dtype", "threads", "prompt", "new", "tok_cpu_s", "over_plain", "text_equal", "load_s",
    "status",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of the CPU of each prompt, and the new tokens of each."""

    seconds: list[float]
    text: list[list[int]]


def add_options(made: argparse.ArgumentParser) -> None:
    """The options of `command_cpu`."""
    made.add_argument("--target", required=True, help="a model: a directory or a name of the Hub")
    made.add_argument("--name", help="name of the target in the rows; default: the last part of its path")
    made.add_argument("--draft", help="a draft model, for draft and assisted generation")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    made.add_argument("--new", type=int, default=64, help="new tokens of a prompt")
    made.add_argument("--long", type=int, default=0, help="tokens of one long prompt, in place of the short ones")
    made.add_argument("--rounds", type=int, default=2, help="the fastest of each prompt counts")
    made.set_defaults(columns=COLUMNS, device="cpu")


def command_cpu(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Decoding on the CPU beside transformers, in tokens per second of the CPU."""
    torch.set_num_threads(given.threads)
    prompts = _prompts(given)
    arms, loads = _arms(given)

    def measure(arm: Callable[[torch.Tensor], list[int]], _: int) -> Sample:
        seconds, text = [], []
        for prompt in prompts:
            start = time.process_time()
            text.append(arm(prompt))
            seconds.append(time.process_time() - start)
        return Sample(seconds, text)

    with torch.no_grad():
        found = Experiment(arms, measure, rounds=given.rounds, mirrored=True).run(say)
    workload = given.name or Path(given.target).name
    rate = {name: _rate(samples) for name, samples in found.items()}
    for name, samples in found.items():
        yield [
            {
                "bench": "cpu", "engine": name, "workload": workload, "dtype": given.dtype, "status": "ok",
                "threads": given.threads, "prompt": sum(prompt.shape[1] for prompt in prompts) // len(prompts),
                "new": given.new, "tok_cpu_s": round(rate[name], 2), "over_plain": round(rate[name] / rate[BASE], 3),
                "text_equal": sum(map(_equal, samples[0].text, found[BASE][0].text)), "load_s": loads.get(name),
            }
        ]  # fmt: skip


def _equal(one: list[int], other: list[int]) -> bool:
    return one == other


def _rate(samples: list[Sample]) -> float:
    """Tokens per second of the CPU, with the fastest round of each prompt."""
    fastest = [min(times) for times in zip(*(sample.seconds for sample in samples), strict=True)]
    return sum(map(len, samples[0].text)) / math.fsum(fastest)


def _prompts(given: argparse.Namespace) -> list[torch.Tensor]:
    tokenizer: Any = AutoTokenizer.from_pretrained(given.target)
    if given.long:
        ids = tokenizer(FILLER * given.long, return_tensors="pt").input_ids
        return [ids[:, : given.long]]
    texts = list(TASKS)
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


def _arms(given: argparse.Namespace) -> tuple[dict[str, Callable[[torch.Tensor], list[int]]], dict[str, float]]:
    """The ways of decoding by name, and seconds of the CPU that making their generator took."""
    dtype, new = getattr(torch, given.dtype), given.new
    loads: dict[str, float] = {}

    def made(name: str, **options: Any) -> Callable[..., Callable[[torch.Tensor], list[int]]]:
        start = time.process_time()
        generator = fastspec.FastSpecGenerator(
            given.target, dtype=given.dtype, device="cpu", progress=False, prefix_cache=False, **options
        )
        loads[name] = round(time.process_time() - start, 2)

        def with_k(k: int | str | None = None) -> Callable[[torch.Tensor], list[int]]:
            def run(prompt: torch.Tensor) -> list[int]:
                mask = torch.ones_like(prompt)
                out = generator.generate(
                    prompt, attention_mask=mask, max_new_tokens=new, num_speculative_tokens=k,
                    return_dict_in_generate=True,
                )  # fmt: skip
                return out.new_tokens[0]

            return run

        return with_k

    model: Any = AutoModelForCausalLM.from_pretrained(given.target, dtype=dtype).eval()

    def peer(**options: Any) -> Callable[[torch.Tensor], list[int]]:
        def run(prompt: torch.Tensor) -> list[int]:
            mask = torch.ones_like(prompt)
            out = model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)
            return [int(token) for token in out[0][prompt.shape[1] :]]

        return run

    lookup = made("fastspec plain", proposer=fastspec.NGram(), num_speculative_tokens=LOOKED_UP)
    arms = {BASE: peer(), "fastspec plain": lookup(0)}
    if given.long:
        return arms, loads
    arms |= {f"fastspec lookup, k = {k}": lookup(k) for k in (4, 8)} | {"fastspec lookup, auto": lookup("auto")}
    arms["transformers prompt lookup"] = peer(prompt_lookup_num_tokens=LOOKED_UP)
    arms["fastspec plain, exact=False"] = made("fastspec plain, exact=False", exact=False)()
    if given.draft:
        assistant: Any = AutoModelForCausalLM.from_pretrained(given.draft, dtype=dtype).eval()
        drafted = made("fastspec draft", draft=given.draft, num_speculative_tokens=4)
        arms |= {"fastspec draft, k = 4": drafted(4), "fastspec draft, auto": drafted("auto")}
        arms["transformers assistant"] = peer(assistant_model=assistant)
    return arms, loads
