"""The sampler's options from the caller's side: against transformers' generate, in batches, and refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, GenerateOutput, UnsupportedOption, demo_pair
from fastspec.errors import InvalidLogits
from fastspec.inputs.options import derive_seed
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [2, 6, 5]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama2", seed=0)


@pytest.fixture(scope="module")
def gen(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    draft = make_checkpoint(tmp_path_factory.mktemp("draft"), "llama2", seed=1, num_hidden_layers=1)
    with FastSpecGenerator(
        directory, draft, max_batch_size=2, max_length=200, dtype="float32", device="cpu", progress=False
    ) as made:
        yield made


def full(gen: FastSpecGenerator, prompts: Any = None, **options: Any) -> GenerateOutput:
    options = {"max_new_tokens": 20, "eos_token_id": None, "return_dict_in_generate": True, **options}
    out = gen.generate(PROMPTS if prompts is None else prompts, **options)
    assert isinstance(out, GenerateOutput)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"sequence_bias": [[[3], 2.0], [[8], -5.0]], "repetition_penalty": 1.2},
        {"bad_words_ids": [[4], [17], [60]]},
        {"suppress_tokens": list(range(0, 90, 2))},
        {"min_new_tokens": 9, "eos_token_id": list(range(40))},
        {"min_length": 12, "eos_token_id": list(range(40))},
    ],
    ids=str,
)
def test_greedy_text_equals_transformers(gen: FastSpecGenerator, directory: Path, options: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    given = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given)
        for k in (0, 4):
            assert torch.equal(gen.generate(ids, num_speculative_tokens=k, **given), theirs)  # type: ignore[arg-type]


def test_greedy_text_with_presence_and_frequency_equals_a_plain_loop(gen: FastSpecGenerator, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = full(gen, presence_penalty=[0.5, 0.0, 1.5], frequency_penalty=[0.0, 0.75, -0.25])
    for prompt, presence, frequency, got in zip(
        PROMPTS, (0.5, 0.0, 1.5), (0.0, 0.75, -0.25), out.new_tokens, strict=True
    ):
        new: list[int] = []
        while len(new) < 20:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + new])).logits[0, -1]
            for token in set(new):
                logits[token] -= presence + frequency * new.count(token)
            new.append(int(logits.argmax()))
        assert got == new


def test_lists_give_each_prompt_its_own(gen: FastSpecGenerator) -> None:
    columns: dict[str, list[Any]] = {
        "repetition_penalty": [1.0, 1.5, 1.2],
        "presence_penalty": [0.5, 0.0, 0.0],
        "frequency_penalty": [0.0, 0.0, 0.3],
        "logit_bias": [{7: 3.0}, None, {5: -math.inf}],
        "allowed_token_ids": [None, list(range(30)), None],
        "bad_words_ids": [[[1]], None, None],
        "suppress_tokens": [None, [3, 4], None],
        "min_new_tokens": [0, 6, 3],
        "temperature": [0.0, 1.0, 0.7],
        "top_k": [0, 10, 0],
        "top_p": [1.0, 0.9, 0.8],
        "min_p": [0.0, 0.0, 0.1],
        "num_speculative_tokens": [4, 0, 2],
        "seed": [1, 2, 3],
    }
    common = {"do_sample": True, "eos_token_id": [11, 12]}
    together = full(gen, **common, **columns)
    for row, prompt in enumerate(PROMPTS):
        own = {name: values[row] for name, values in columns.items() if values[row] is not None}
        alone = full(gen, [prompt], **common, **{**own, "seed": [own["seed"]]})
        assert alone.new_tokens[0] == together.new_tokens[row], row
    assert together.stats.rows[1].drafted == 0
    assert set(together.new_tokens[1]) <= set(range(30)) - {3, 4}
    assert len(together.new_tokens[1]) >= 6
    for name, values in columns.items():
        with pytest.raises(ValueError, match=name):
            full(gen, **common, **{name: values[:2]})


def test_several_sequences_a_prompt(gen: FastSpecGenerator) -> None:
    options = {"do_sample": True, "top_k": 0, "seed": 4}
    out = full(gen, num_return_sequences=3, **options)
    assert out.sequences.shape[0] == 9
    assert len({tuple(tokens) for tokens in out.new_tokens}) == 9
    for index in range(9):
        prompt, copy = divmod(index, 3)
        assert out.sequences[index, 5 - len(PROMPTS[prompt]) : 5].tolist() == PROMPTS[prompt]
        seed = derive_seed(4, prompt, copy)
        assert full(gen, [PROMPTS[prompt]], **{**options, "seed": [seed]}).new_tokens[0] == out.new_tokens[index]
    first = full(gen, **options)
    assert first.new_tokens == out.new_tokens[::3], "the first of each is the only one of a call for one"
    listed = full(gen, num_return_sequences=2, do_sample=True, seed=[1, 2, 3, 4, 5, 1]).new_tokens
    assert listed[0] != listed[1]
    padded = torch.tensor([[0, 3, 1], [9, 9, 2]])
    twice = gen.generate(padded, torch.tensor([[0, 1, 1], [1, 1, 1]]), num_return_sequences=2, **options)
    assert isinstance(twice, torch.Tensor)
    assert twice[:, :3].tolist() == [[0, 3, 1], [0, 3, 1], [9, 9, 2], [9, 9, 2]]
    with pytest.raises(ValueError, match="would be equal"):
        full(gen, num_return_sequences=2)
    with pytest.raises(ValueError, match=r"seed has 3 values for 6 rows \(3 prompts times"):
        full(gen, num_return_sequences=2, do_sample=True, seed=[1, 2, 3])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be a number between"),
        ({"repetition_penalty": math.nan}, ValueError, "repetition_penalty"),
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be a number between -2.0 and 2.0, got 2.5"),
        ({"frequency_penalty": "x"}, ValueError, "frequency_penalty"),
        ({"logit_bias": {10**6: 1.0}}, ValueError, "logit_bias: an id must be a whole number between 0"),
        ({"logit_bias": {"5": 1.0}}, ValueError, "logit_bias: an id must be a whole number between 0 and"),
        ({"logit_bias": {3: math.inf}}, ValueError, "logit_bias"),
        ({"logit_bias": {3: None}}, ValueError, "logit_bias must map ids to numbers"),
        ({"logit_bias": [3]}, ValueError, "logit_bias has 1 values for 3 prompts"),
        ({"logit_bias": 3}, ValueError, "logit_bias must be a dict"),
        ({"allowed_token_ids": []}, ValueError, "prompt 0: its options ban every token"),
        ({"allowed_token_ids": [-1]}, ValueError, "allowed_token_ids"),
        ({"allowed_token_ids": 3}, ValueError, "allowed_token_ids must be a list of token ids, got 3"),
        ({"allowed_token_ids": [3], "suppress_tokens": [3]}, ValueError, "ban every token"),
        (
            {"allowed_token_ids": [3], "eos_token_id": 3, "min_new_tokens": 1},
            ValueError,
            "stop ids before min_new_tokens",
        ),
        ({"bad_words_ids": [[3, 4]]}, UnsupportedOption, "a sequence of 2 ids; only single ids are supported"),
        ({"bad_words_ids": [3]}, ValueError, "bad_words_ids must be a list of lists"),
        ({"bad_words_ids": [[]]}, ValueError, "non-empty"),
        ({"sequence_bias": [[[3, 4], 1.0]]}, UnsupportedOption, "sequence_bias"),
        ({"sequence_bias": [[3, 1.0]]}, ValueError, "sequence_bias must be a list of"),
        ({"suppress_tokens": [10**6]}, ValueError, "suppress_tokens"),
        ({"min_new_tokens": 21}, ValueError, "min_new_tokens=21 is more than the 20 new tokens"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences"),
        ({"num_speculative_tokens": [4, 5, 0]}, ValueError, "num_speculative_tokens=5, but the generator was made for"),
        ({"num_speculative_tokens": [4, -1, 0]}, ValueError, "num_speculative_tokens"),
        ({"stop_strings": ["x", ""]}, ValueError, "stop_strings must be a non-empty text"),
        ({"stop_strings": 3}, ValueError, "stop_strings"),
        ({"stop_strings": "x"}, ValueError, "stop_strings need a tokenizer"),
    ],
    ids=str,
)
def test_refusals_name_what_was_got_and_wanted(
    gen: FastSpecGenerator, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        full(gen, **options)


@pytest.mark.parametrize("sampled", [False, True])
def test_broken_logits_raise_with_row_and_position(
    gen: FastSpecGenerator, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"do_sample": sampled, "seed": 1}
    expected = full(gen, **options).new_tokens
    engine = gen._open().engine
    assert engine is not None
    state, plain = engine.state, engine.modules.target.logits

    def spoilt(hidden: torch.Tensor, tiling: Any) -> torch.Tensor:
        logits = plain(hidden, tiling)
        at = state.lengths[: len(logits), None] + torch.arange(logits.shape[1])
        hit = (state.tokens[: len(logits), :1] == PROMPTS[1][0]) & (at == 7)
        return torch.where(hit[..., None], math.nan, logits)

    monkeypatch.setattr(engine.modules.target, "logits", spoilt)
    with pytest.raises(InvalidLogits, match="prompt 1, position 7: the target's logits there are NaN") as caught:
        full(gen, **options)
    output = caught.value.output
    assert isinstance(output, GenerateOutput)
    assert output.finish_reasons == ["length", "error", "length"]
    assert [output.new_tokens[0], output.new_tokens[2]] == [expected[0], expected[2]]
    assert len(output.new_tokens[1]) <= 5
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def consume() -> None:
        for emitted in gen.stream(PROMPTS, max_new_tokens=20, eos_token_id=None, **options):
            for index, tokens in emitted.items():
                streamed[index] += tokens

    with pytest.raises(InvalidLogits, match="prompt 1, position 7"):
        consume()
    assert [streamed[0], streamed[2]] == [expected[0], expected[2]]
    monkeypatch.undo()
    assert full(gen, **options).new_tokens == expected


@pytest.fixture(scope="module")
def demo() -> Iterator[FastSpecGenerator]:
    with FastSpecGenerator(*demo_pair(), device="cpu", max_length=256, max_batch_size=4, progress=False) as made:
        yield made


def test_stop_strings_cut_ids_as_transformers_and_texts_behind_the_string(demo: FastSpecGenerator) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(demo_pair()[0], dtype=torch.float32)
    ids = tokenizer("def push(self, item):\n", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False, "pad_token_id": 0}
    whole = demo.generate(ids, **options)
    assert isinstance(whole, torch.Tensor)
    text = tokenizer.decode(whole[0, ids.shape[1] :])
    for string in (text[5:8], text[20:23], text[31:32], [text[40:44], text[12:14]]):
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), stop_strings=string, tokenizer=tokenizer, **options
        )
        out = full(demo, ids, **{**options, "stop_strings": string})
        assert out.sequences.tolist() == theirs.tolist()
        assert out.finish_reasons == ["stop"]
        assert out.texts is not None
        strings = [string] if isinstance(string, str) else string
        assert any(out.texts[0].endswith(one) for one in strings)
        assert tokenizer.decode(out.new_tokens[0]).startswith(out.texts[0])
        assert not any(one in tokenizer.decode(out.new_tokens[0][:-1]) for one in strings)
    unstopped = full(demo, ids, **options, stop_strings="no such text \x00")
    assert unstopped.finish_reasons == ["length"]
    assert unstopped.texts == [text]
    assert full(demo, ids, **options).texts is None


def test_stop_strings_end_their_own_rows(demo: FastSpecGenerator) -> None:
    """Each row of a batch where it would end alone; log-probabilities and streams end there too."""
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    prompts = tokenizer(["import os\n", "class Stack:\n    def", "def main():\n", "x = "])["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 40, "stop_strings": ["self", "\n\n", "return"], "logprobs": True}
    together = full(demo, prompts, **options)
    assert "stop" in together.finish_reasons
    streamed: dict[int, list[int]] = {index: [] for index in range(4)}
    given = {"max_new_tokens": 40, "stop_strings": options["stop_strings"], "eos_token_id": None}
    for emitted in demo.stream(prompts, **given, tokenizer=tokenizer):
        for index, tokens in emitted.items():
            streamed[index] += tokens
    for index, prompt in enumerate(prompts):
        alone = full(demo, [prompt], **options)
        assert alone.new_tokens[0] == together.new_tokens[index] == streamed[index]
        assert together.logprobs is not None
        assert len(together.logprobs[index]) == len(together.new_tokens[index])
