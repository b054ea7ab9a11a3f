"""`generate` in place of transformers' loop: the same text, weights copied once or again, and refusals by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

from fastspec import UnsupportedOption
from fastspec.integrations import transformers as integration
from fastspec.integrations.transformers import generate
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import make_family

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
IDS = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7], [0, 9, 8, 7, 6]])
MASK = (IDS != 0).long()
GIVEN: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 24, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    made = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "target", "llama2"), dtype=torch.float32)
    made.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=1)
    yield made
    kept = vars(made).get("_fastspec")
    if kept is not None and kept.generator is not None:
        kept.generator.close()


@pytest.fixture
def draft(tmp_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path / "draft", "llama2", seed=1), dtype=torch.float32
    )


def both(model: Any, **more: Any) -> tuple[Any, Any]:
    """(the text of transformers, ours)."""
    ours = {name: more.pop(name) for name in ("draft", "generator_options") if name in more}
    given = {**GIVEN, **more}
    return model.generate(IDS, **given), model.generate(IDS, custom_generate=generate, **given, **ours)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_new_tokens": None, "max_length": 21},
        {"repetition_penalty": 1.4},
        {"suppress_tokens": [5, 9]},
        {"eos_token_id": [40, 41]},
        {"min_new_tokens": 9},
        {"use_cache": False},
    ],
    ids=str,
)
def test_greedy_text_is_that_of_transformers(more: dict[str, Any], model: Any, draft: Any) -> None:
    theirs, ours = both(model, draft=draft, **more)
    assert torch.equal(theirs, ours)


def test_every_row_is_decoded_with_drafts(model: Any) -> None:
    seen = []
    original = integration.FastSpecGenerator.generate

    def watched(*given: Any, **more: Any) -> Any:
        seen.append(original(*given, **more))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration.FastSpecGenerator, "generate", watched)
        theirs, ours = both(model, draft=model, return_dict_in_generate=True)
    assert torch.equal(theirs.sequences, ours.sequences)
    assert seen[0].stats.acceptance_rate == 1.0
    assert len(seen[0].stats.rows) == 3


def test_sampled_rows_of_one_prompt_differ(model: Any) -> None:
    torch.manual_seed(3)
    more = {"do_sample": True, "num_return_sequences": 4, "top_k": 0, "temperature": 1.5}
    found = model.generate(IDS, custom_generate=generate, **{**GIVEN, **more})
    assert found.shape[0] == 12
    assert len({tuple(row.tolist()) for row in found}) == 12


def test_the_generator_stays_until_more_room_is_needed(model: Any) -> None:
    both(model)
    first = vars(model)["_fastspec"].generator
    both(model, max_new_tokens=30)
    assert vars(model)["_fastspec"].generator is first
    more = IDS.repeat(2, 1)
    model.generate(more, custom_generate=generate, **{**GIVEN, "attention_mask": MASK.repeat(2, 1)})
    second = vars(model)["_fastspec"].generator
    assert second is not first
    both(model)
    assert vars(model)["_fastspec"].generator is second
    assert vars(copy.deepcopy(model))["_fastspec"].generator is None
    assert vars(pickle.loads(pickle.dumps(model)))["_fastspec"].generator is None


@pytest.mark.parametrize("which", ["target", "draft"])
def test_weights_that_training_has_changed_are_copied_again(which: str, model: Any, draft: Any) -> None:
    theirs, ours = both(model, draft=draft)
    assert torch.equal(theirs, ours)
    kept = vars(model)["_fastspec"].generator
    with torch.no_grad():
        for parameter in (model if which == "target" else draft).parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    changed, ours = both(model, draft=draft)
    assert torch.equal(changed, ours)
    assert torch.equal(changed, theirs) is (which == "draft")
    assert vars(model)["_fastspec"].generator is kept
    output = kept.generate(IDS, MASK, return_dict_in_generate=True, max_new_tokens=4, pad_token_id=0)
    assert output.stats.weight_version == int(which == "target")


class Twice(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * 2


class Never(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "processor": ({"logits_processor": LogitsProcessorList([Twice()])}, "logits_processor: Twice is not supported"),
    "criterion": ({"stopping_criteria": [Never()]}, "stopping_criteria: Never is not supported"),
    "prefixes": ({"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]}, "PrefixConstrainedLogitsProcessor is not"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True is not supported"),
    "beams": ({"num_beams": 2}, "num_beams=2 is not supported"),
    "time": ({"max_time": 1.0}, "MaxTimeCriteria is not supported"),
    "positions": ({"position_ids": torch.arange(5).repeat(3, 1) + 7}, "position_ids are not those of attention_mask"),
    "embeddings": ({"inputs_embeds": torch.zeros(3, 5, 48)}, "inputs_embeds"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_does_not_carry_is_refused_by_name(kind: str, model: Any) -> None:
    more, message = REFUSED[kind]
    with pytest.raises(UnsupportedOption, match=message):
        model.generate(IDS, custom_generate=generate, **{**GIVEN, **more})


def test_two_drafts_are_refused(model: Any) -> None:
    given: Any = (model, IDS, LogitsProcessorList(), [], GenerationConfig())
    with pytest.raises(UnsupportedOption, match="two names of one argument"):
        generate(*given, draft="a", assistant_model="b")


def test_a_family_with_experts() -> None:
    model = make_family("qwen3_moe")
    theirs, ours = both(model, max_new_tokens=8)
    assert torch.equal(theirs, ours)
