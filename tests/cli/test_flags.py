"""The flags that shape the text: what they ask of a generator, what is refused, and how several texts are printed."""

from __future__ import annotations

import ast
import inspect
import random
import re
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import fastspec
from fastspec import FastSpecGenerator, NGram, Suffix, demo_pair
from fastspec.cli import app as cli
from fastspec.cli.app import app
from fastspec.errors import InvalidLogits
from fastspec.inputs.table import OPTIONS, Flag
from tests.cli.test_app import Stub, invoke
from tests.helpers.tokenizers import byte_tokenizer

SHAPING = (
    "--temperature 0.8 --top-k 20 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.2 --presence-penalty 0.5 "
    "--frequency-penalty -0.25 --logit-bias 5=2.5 --logit-bias 7=-inf --allowed-token-ids 5,6,7 --suppress-tokens 6 "
    "--min-new-tokens 3 --stop-string end --stop-string def --seed 7"
)


def test_every_option_has_a_flag() -> None:
    flags = set(inspect.signature(cli.generate).parameters)
    assert {row.keyword for row in OPTIONS if isinstance(row.flag, Flag)} <= flags
    assert {row.keyword for row in OPTIONS} - flags == {
        *("min_length", "do_sample", "sequence_bias", "bad_words_ids", "eos_token_id", "pad_token_id", "tokenizer"),
        *("return_dict_in_generate", "logprobs", "logprobs_mode", "prompt_logprobs", "stop_across_prompt", "session"),
    }
    assert {"verification", "proposer"} <= flags
    shown = click.unstyle(CliRunner().invoke(app, ["generate", "--help"]).stdout)
    assert all(flag in shown for flag in SHAPING.split() if flag.startswith("--"))


def test_flags_reach_generate_under_its_own_names() -> None:
    stub = Stub()
    result = invoke(stub, "generate", "--prompt", "x", *SHAPING.split())
    assert result.exit_code == 0, result.output
    (call,) = stub.calls
    del call["input_ids"], call["max_new_tokens"], call["return_dict_in_generate"]
    assert call == {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "logit_bias": {5: 2.5, 7: float("-inf")},
        "allowed_token_ids": [5, 6, 7],
        "suppress_tokens": [6],
        "min_new_tokens": 3,
        "stop_strings": ["end", "def"],
        "seed": 7,
    }


def test_grammars_are_read(tmp_path: Path) -> None:
    for name, text in {"json_schema": '{"type": "object"}', "grammar": 'start: "a"', "regex": "a+"}.items():
        stub, file = Stub(), tmp_path / name
        file.write_text(text)
        given = text if name == "regex" else str(file)
        result = invoke(stub, "generate", "--prompt", "x", "--" + name.replace("_", "-"), given)
        assert result.exit_code == 0, result.output
        assert stub.calls[0][name] == text


def test_zeros_are_passed_on() -> None:
    """A 0 that a user gave is not the checkpoint's default."""
    stub = Stub()
    zeros = "--temperature 1 --top-k 0 --top-p 0 --min-p 0 --presence-penalty 0 --min-new-tokens 0 --seed 0"
    assert invoke(stub, "generate", "--prompt", "x", *zeros.split()).exit_code == 0
    names = ("top_k", "top_p", "min_p", "presence_penalty", "min_new_tokens", "seed")
    assert [stub.calls[0][name] for name in names] == [0] * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--top-k 5 --min-p 0.1", "--top-k, --min-p: has no effect at temperature 0; give --temperature too"),
        ("--logit-bias 5", "--logit-bias: got '5', wanted ID=BIAS"),
        ("--logit-bias a=1", "--logit-bias: got 'a=1', wanted ID=BIAS"),
        ("--allowed-token-ids 1;2", "--allowed-token-ids: got '1;2', wanted token ids with commas"),
        ("--suppress-tokens x", "--suppress-tokens: got 'x'"),
        ("--max-new-tokens 0", "--max-new-tokens: must be a whole number at least 1, got 0"),
        ("--num-return-sequences -1", "--num-return-sequences: must be a whole number at least 1"),
        ("--min-new-tokens -1", "--min-new-tokens: must be a whole number at least 0, got -1"),
        ("--temperature -1", "--temperature: temperature must be a number between 0"),
        ("--temperature 1 --top-p 2", "--top-p: must be a number between 0"),
        ("--repetition-penalty 0", "--repetition-penalty: must be a number between"),
        ("--proposer eagle", "--proposer: got 'eagle', wanted ngram or suffix, or ngram:MIN:MAX"),
        ("--proposer ngram:3:2", "--proposer: NGram needs whole numbers 1 <= min_n <= max_n <= 32, got min_n=3"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(arguments: str, message: str) -> None:
    stub = Stub()
    result = invoke(stub, "generate", "--prompt", "x", *arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(click.unstyle(result.stderr).split())
    assert stub.opened == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "a\udcff"],
        ["generate", "--prompt", "x", "--stop-string", "y", "--stop-string", "\udcff"],
        ["generate", "--prompt", "x", "--regex", "\udcff"],
        ["demo", "--prompt", "\udcff"],
        ["chat", "--system", "\udcff"],
    ],
    ids=" ".join,
)
def test_bytes_that_are_no_text_are_refused_before_anything_is_loaded(arguments: list[str]) -> None:
    """Python keeps them in arguments as lone surrogates, and tokenizers end by a TypeError there."""
    stub = Stub()
    result = invoke(stub, *arguments)
    said = " ".join(click.unstyle(result.stderr).split())
    assert (result.exit_code, stub.opened) == (2, [])
    assert re.search(rf"{arguments[-2]}: character \d is '.udcff', which is no text; write it in UTF-8", said), said


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_files_that_are_no_text_are_refused_before_anything_is_loaded(flag: str, tmp_path: Path) -> None:
    stub, file = Stub(), tmp_path / "latin"
    file.write_bytes(b"\xe9")
    result = invoke(stub, "generate", "--prompt", "x", flag, str(file))
    assert (result.exit_code, stub.opened) == (2, [])
    assert "as UTF-8 text" in " ".join(click.unstyle(result.stderr).split())


@pytest.mark.parametrize("command", ["demo", "chat"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--max-new-tokens 0", "--max-new-tokens: must be a whole number at least 1"),
        ("--top-p 2 --temperature 1", "--top-p: must be a number between 0"),
        ("--top-p 0.9", "--top-p: has no effect at temperature 0"),
    ],
)
def test_other_commands_refuse_the_same(command: str, arguments: str, message: str) -> None:
    if command == "demo" and "top-p" in arguments:
        return  # it has no such flag
    stub = Stub()
    result = invoke(stub, command, *arguments.split())
    assert (result.exit_code, stub.opened) == (2, [])
    assert message in " ".join(click.unstyle(result.stderr).split())


def test_flags_that_messages_name_exist() -> None:
    """A next step that is no step would be worse than none."""
    commands = vars(get_command(app))["commands"].values()
    known = {flag for one in commands for each in one.params for flag in (*each.opts, *each.secondary_opts)}
    foreign = {
        "--nproc-per-node",
        "--query-gpu",
        "--format",
        "--index-url",
        "--version",
        "--help",
        "--merge",
        "--no-deps",
        "--option",
    }  # of torchrun, nvidia-smi, pip, click, llama-gguf-split, lm-eval, llm
    named: dict[str, str] = {}
    for file in Path(fastspec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value), file.name)
    assert "--limit" in named, "the search finds some"
    assert {flag: file for flag, file in named.items() if flag not in known | foreign} == {}


def test_what_the_generator_refuses_is_one_line() -> None:
    for arguments, message in (
        ("--kv-dtype fp4", "--kv-dtype"),
        ("--max-length 200 --max-new-tokens 199 --prompt abcdefghijklm", "--max-length"),
        ("--logit-bias 99999999=1", "--logit-bias: an id must be a whole number between 0"),
    ):
        result = CliRunner().invoke(app, ["generate", "--prompt", "x", "--device", "cpu", *arguments.split()])
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr.splitlines()[-1]


def test_broken_logits_are_one_line() -> None:
    class Broken(Stub):
        def generate(self, *given: Any, **asked: Any) -> Any:
            raise InvalidLogits("no token could be chosen")

    result = invoke(Broken(), "generate", "--prompt", "x")
    assert (result.exit_code, result.stderr) == (2, "fastspec: no token could be chosen\n")


def test_the_rule_and_the_proposer_reach_the_constructor() -> None:
    stub = Stub()
    invoke(stub, "generate", "--prompt", "x", "--verification", "coupled", "--proposer", "ngram:2:5")
    invoke(stub, "generate", "t", "--prompt", "x", "--proposer", "ngram")
    (pair, first), (alone, second) = stub.opened
    assert (len([one for one in pair if one]), first["verification"]) == (2, "coupled")
    assert (first["proposer"].min_n, first["proposer"].max_n) == (2, 5)
    assert alone == ("t", None)
    assert isinstance(second["proposer"], NGram)
    assert "verification" not in second


def test_texts_for_drafts_reach_the_generator(tmp_path: Path) -> None:
    old = tmp_path / "old.py"
    old.write_text("x = 1\n" * 1000, encoding="utf-8")
    stub = Stub()
    stub.add_corpus = lambda name, text: added.append((name, text))  # type: ignore[attr-defined]
    added: list[tuple[str, str]] = []
    invoke(stub, "generate", "--prompt", "x", "--prediction", str(old))
    invoke(stub, "generate", "--prompt", "x", "--corpus", str(old), "--proposer", "suffix:3:8")
    (_, first), (_, second) = stub.opened
    assert isinstance(first["proposer"], Suffix)
    assert (first["proposer"].prediction_tokens, first["proposer"].corpus_tokens) == (6000, 0)
    assert (second["proposer"].min_n, second["proposer"].max_n, second["proposer"].corpus_tokens) == (3, 8, 6000)
    assert added == [(str(old), "x = 1\n" * 1000)]
    refused = invoke(Stub(), "generate", "--prompt", "x", "--corpus", str(old), "--proposer", "ngram")
    assert "ngram looks in the row alone; give suffix with --corpus" in refused.stderr
    empty = tmp_path / "empty.txt"
    empty.touch()
    for flag in ("--corpus", "--prediction"):
        refused = invoke(Stub(), "generate", "--prompt", "x", flag, str(empty))
        assert refused.exit_code == 2
        assert f"{empty} is empty; name a file with text, or leave {flag} out" in " ".join(refused.stderr.split())


@pytest.fixture(scope="module")
def demo() -> Any:
    with FastSpecGenerator(*demo_pair(), device="cpu", max_length=256, max_batch_size=3, progress=False) as made:
        yield made


class Opened:
    """Opens the same generator again and again."""

    def __init__(self, generator: FastSpecGenerator) -> None:
        self._generator = generator

    def __call__(self, *sources: Any, **options: Any) -> Opened:
        return self

    def __enter__(self) -> FastSpecGenerator:
        return self._generator

    def __exit__(self, *details: object) -> None:
        return None


PROMPT = "class Stack:\n    def push("


def printed(demo: FastSpecGenerator, *arguments: str) -> str:
    result = CliRunner().invoke(
        app, ["generate", "--prompt", PROMPT, "--max-new-tokens", "40", *arguments], obj=Opened(demo)
    )
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_text_ends_with_the_stop_string(demo: FastSpecGenerator) -> None:
    """Streamed or not, as the output's own `texts`: without what its last token holds beyond."""
    assert demo.tokenizer is not None
    ids = [demo.tokenizer(PROMPT)["input_ids"]]
    whole, cut = printed(demo), 0
    rng = random.Random(0)
    for _ in range(12):
        at = rng.randrange(len(whole) - 3)
        stop = whole[at : at + rng.randint(1, 3)]
        out: Any = demo.generate(ids, max_new_tokens=40, stop_strings=[stop], return_dict_in_generate=True)
        for mode in ("--stream", "--no-stream"):
            assert printed(demo, mode, "--stop-string", stop) == f"{out.texts[0]}\n"
        cut += demo.tokenizer.decode(out.new_tokens[0]) != out.texts[0]
    assert cut > 0, "no token held more than its stop string: the cut was not tested"


def test_a_special_token_between_is_text_to_the_command_line_as_it_is_to_rows() -> None:
    """The row goes on, for its text holds no such string; so does what is printed."""
    tokenizer = byte_tokenizer()
    a, stop, b = tokenizer("s")["input_ids"], [tokenizer.eos_token_id], tokenizer(". and more")["input_ids"]

    class Between(Stub):
        def generate(self, input_ids: Any, streamer: Any, **options: Any) -> Any:
            out = super().generate(input_ids, Seen(), **options)
            streamer.put(torch.tensor(input_ids))
            for token in [*a, *stop, *b]:
                streamer.put(torch.tensor([token]))
            streamer.end()
            return out

    class Seen:
        def put(self, value: object) -> None: ...

        def end(self) -> None: ...

    shown = [invoke(Between(), "generate", "--prompt", "x", *more).stdout for more in ([], ["--stop-string", "s."])]
    assert shown == ["s. and more\n"] * 2


def test_several_texts_are_printed_apart(demo: FastSpecGenerator) -> None:
    drawn = ("--temperature", "1", "--seed", "3", "--num-return-sequences", "3")
    found = printed(demo, *drawn).split("--- ")
    assert found[0] == ""
    assert [one.split("\n", 1)[0] for one in found[1:]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert demo.tokenizer is not None
    ids = [demo.tokenizer(PROMPT)["input_ids"]]
    out: Any = demo.generate(
        ids, max_new_tokens=40, do_sample=True, seed=3, num_return_sequences=3, return_dict_in_generate=True
    )
    prompt = demo.tokenizer.decode(ids[0])
    for text, tokens in zip(found[1:], out.new_tokens, strict=True):
        assert prompt + text.split("\n", 1)[1][:-1] == demo.tokenizer.decode(
            ids[0] + tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert len(set(found)) == 4


def test_the_drafts_format_reaches_every_generator() -> None:
    stub = Stub()
    invoke(stub, "generate", "--prompt", "x", "--draft-quantization", "auto")
    invoke(stub, "demo", "--draft-quantization", "int4", "--repeats", "1", "--max-new-tokens", "4")
    invoke(stub, "chat", "--draft-quantization", "fp8", "--target-quantization", "int8")
    assert stub.opened[-1][1]["target_quantization"] == "int8"
    invoke(stub, "generate", "--prompt", "x", "--kv-dtype", "fp8")
    asked = stub.opened.pop()[1]
    assert asked["kv_dtype"] == "fp8"
    assert "draft_quantization" not in asked
    invoke(stub, "generate", "--prompt", "x", "--draft-quantization", "none")
    assert stub.opened.pop()[1]["draft_quantization"] is None
    asked = [options.get("draft_quantization") for _, options in stub.opened]
    assert asked == ["auto", "int4", None, "fp8"]  # the demo's second one has no draft
