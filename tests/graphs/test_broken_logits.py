"""Logits that are NaN or infinite inside a captured step: their row ends, named; the others are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, GenerateOutput, InvalidLogits
from fastspec.shapes import FULL, GREEDY
from tests.helpers.checkpoints import make_model
from tests.helpers.devices import devices
from tests.helpers.tiny import capture_all, tiny_engine
from tests.scheduling.test_sampler_scheduler import ROWS, options, poisoned, prompts, run, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the models have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
BAD = 51  # a token whose embedding is NaN


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_replayed_step_ends_the_broken_row_alone(value: float, sampler: str) -> None:
    rows = [options()] * 5 if sampler == GREEDY else [ROWS[0], ROWS[2], ROWS[1], ROWS[4], ROWS[5]]
    given = [[50 + index, *prompt] for index, prompt in enumerate(prompts(5, seed=8))]
    made: dict[str, Any] = {"batch": 3, "device": "cuda", "graphs": True, "same": True, "depth": 2}
    whole = tiny_engine(**made)
    capture_all(whole, {0, 4}, sampler)
    expected = run(whole, rows, given, sampler=sampler)
    for place in (0, 3, 17):
        position = len(given[1]) + place
        bad = poisoned(tiny_engine(**made), 51, position, value)
        capture_all(bad, {0, 4}, sampler)
        got = run(bad, rows, given, sampler=sampler)
        assert (got[1].finish_reason, got[1].invalid_at) == ("error", position)
        assert got[1].new_tokens == expected[1].new_tokens[: len(got[1].new_tokens)]
        assert [texts(got)[index] for index in (0, 2, 3, 4)] == [texts(expected)[index] for index in (0, 2, 3, 4)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two targets that differ in one token's embedding, which is NaN in the second."""
    model, root = make_model("llama2"), tmp_path_factory.mktemp("targets")
    assert not model.config.tie_word_embeddings, "the head would be NaN too"
    model.save_pretrained(root / "whole")
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    model.save_pretrained(root / "broken")
    return root / "whole", root / "broken"


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("k", [0, 4])
def test_a_token_that_is_not_a_number(directories: tuple[Path, Path], k: int, sampled: bool, device: str) -> None:
    """By weights alone: the row whose prompt holds the token fails at its first place, with prompt and position."""
    given = [[3, 1, 4], [9, BAD, 2, 6], [5, 5]]
    asked: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "suppress_tokens": [BAD], "seed": [1, 2, 3]}
    asked |= {"do_sample": sampled, "num_speculative_tokens": k, "return_dict_in_generate": True}
    whole, invalid = (
        FastSpecGenerator(
            directory, directories[0], max_length=64, max_batch_size=4, device=device, dtype="float32", progress=False
        )
        for directory in directories
    )
    with whole, invalid:
        expected = whole.generate(given, **asked)
        assert isinstance(expected, GenerateOutput)
        for _ in range(2):  # the generator stays usable
            with pytest.raises(
                InvalidLogits, match="prompt 1, position 4: the target's logits there are NaN"
            ) as caught:
                invalid.generate(given, **asked)
            output = caught.value.output
            assert isinstance(output, GenerateOutput)
            assert output.finish_reasons == ["length", "error", "length"]
            assert output.new_tokens == [expected.new_tokens[0], [], expected.new_tokens[2]]
        good = [given[0], given[2]]
        two = asked | {"seed": [1, 3]}
        assert invalid.generate(good, **two).new_tokens == whole.generate(good, **two).new_tokens  # type: ignore
