"""A type checker finds a misspelt option in a user's code, and nothing in code that is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = """
import asyncio

import torch
from transformers import GenerationConfig

from fastspec import FastSpecGenerator, GenerateOptions, Handle, MemoryPlan, NGram, Suffix


def main() -> None:
    with FastSpecGenerator("target", "draft", proposer=NGram(), num_speculative_tokens="auto") as generator:
        batch = generator.tokenizer(["one", "two"], return_tensors="pt", padding=True)
        sequences = generator.generate(**batch, max_new_tokens=8)
        ids = generator.generate([[1, 2], [3]], max_new_tokens=8, temperature=[0.5, None], seed=torch.tensor([1, 2]))
        print(ids.shape, generator.tokenizer.decode(ids[0]), sequences)
        output = generator.generate([[1, 2]], return_dict_in_generate=True, do_sample=True, top_p=0.9, logprobs=3)
        print(output.stats.acceptance_rate, output.new_tokens[0], output.texts)
        print(generator.generate([[1]], None, GenerationConfig(max_new_tokens=3), stop_strings=["end"], regex="a+"))
        drawn: GenerateOptions = {"do_sample": True, "temperature": [0.5, 1.0]}
        print(generator.generate([[1], [2]], **drawn).shape)
        for new in generator.stream([[1, 2]], num_speculative_tokens="auto", logit_bias={3: 1.5}):
            print(new.get(0, []))
        handle: Handle = generator.submit([1, 2, 3], json_schema={"type": "object"}, eos_token_id=[])
        print(list(handle), handle.result(timeout=1.0).finish_reasons)

        async def answer() -> list[int]:
            return [token async for token in generator.submit([1], bad_words_ids=[[5]], min_new_tokens=2)]

        repeated = generator.generate([[1], [2]], predictions=["old", None], session="a", return_dict_in_generate=True)
        print(repeated.stats.accepted_per_position)
        print(asyncio.run(answer()), generator.calibrate([[1, 2]], max_new_tokens=16).best)
    plan: MemoryPlan = FastSpecGenerator.plan("target", proposer=Suffix(corpus_tokens=8, remember="all"))
    print(plan)
"""
WRONG = """
from fastspec import FastSpecGenerator
from fastspec import FastSpecGeneratr
from fastspec.text import TextStraem


def main(generator: FastSpecGenerator) -> None:
    generator.generate([[1]], max_new_token=3)
    generator.stream([[1]], temprature=1.0)
    generator.submit([1], seeds=3)
    generator.calibrate([[1]], topp=0.5)
    generator.generate([[1]], top_k="many")
    generator.generate([[1]]).new_tokens
    generator.generate([[1]], return_dict_in_generate=True).shape
"""


@pytest.mark.long
def test_a_type_checker_finds_what_is_misspelt_and_nothing_else(tmp_path: Path) -> None:
    files = {tmp_path / "right.py": RIGHT, tmp_path / "wrong.py": WRONG}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert [line for line in errors if "wrong.py" not in line] == [], checked.stdout + checked.stderr
    found = {int(line.split(":")[1]) for line in errors}
    wrong = ("    generator.", "from fastspec import FastSpecGeneratr", "from fastspec.text import TextStraem")
    assert found == {number for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith(wrong)}
