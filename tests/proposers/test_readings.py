"""A head whose config can be read in two ways reads what it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, NGram
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.heads import LAYERS, VOCAB, eagle3_tensors, write_eagle3
from tests.helpers.heads_definition import Definition, learn
from tests.helpers.hybrid import KINDS, make_hybrid, make_states

IDS = [0, 0, 1]  # low ones: further up the hidden states of neighbouring layers are alike
AS_BOUNDARIES, AS_OUTPUTS = (0, 0, 1), (1, 1, 2)
TEXT = [index * 7919 % VOCAB for index in range(64)]  # what is tried without a tokenizer
COMMON = {"max_batch_size": 1, "num_speculative_tokens": 2, "max_length": 80, "device": "cpu", "progress": False}


@pytest.fixture(scope="module", params=["llama3", "qwen3_5", "nemotron_h"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers attend, or some have recurrent states."""
    path = tmp_path_factory.mktemp("target")
    if request.param == "llama3":
        return make_checkpoint(path, "llama3", num_hidden_layers=LAYERS, std=0.8)
    make = make_hybrid if request.param in KINDS else make_states
    make(request.param, vocab_size=VOCAB).save_pretrained(path)
    return path


def trained(target: Path, boundaries: tuple[int, ...], path: Path) -> Path:
    """A head that knows the target's picks in that text by heart, from these hidden states."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([TEXT]), output_hidden_states=True)
    features = torch.stack([found.hidden_states[boundary][0, :-1] for boundary in boundaries], 1)
    picks = found.logits[0, 1:].argmax(-1)
    tensors = eagle3_tensors(drafted=VOCAB, layers=1)
    head = Definition(tensors)
    tensors["embed_tokens.weight"].zero_()  # so that it has to look at the hidden states
    tensors["midlayer.input_layernorm.weight"].zero_()
    learn(head, [(features, torch.tensor(TEXT[1:]), picks)])
    return write_eagle3(path, tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": IDS})


@pytest.mark.parametrize("boundaries", [AS_BOUNDARIES, AS_OUTPUTS], ids=["as boundaries", "as outputs"])
def test_the_better_reading_is_taken_and_named(boundaries: tuple[int, ...], target: Path, tmp_path: Path) -> None:
    head = trained(target, boundaries, tmp_path)
    named = ", ".join(map(str, boundaries))
    with pytest.warns(UserWarning, match=rf"Boundaries {named} are read"):
        generator = FastSpecGenerator(target, head, **COMMON)
    with generator:
        assert f"reads boundaries {named} of" in generator.explain()
    with (
        pytest.warns(UserWarning, match=rf"Boundaries {named} are read"),
        FastSpecGenerator(target, head, proposer=NGram(), **COMMON) as behind_lookup,
    ):
        assert f"reads boundaries {named} of" in behind_lookup.explain()


@pytest.mark.filterwarnings("error")
def test_who_says_it_is_believed(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors(), eagle_config={"eagle_aux_hidden_state_layer_ids": IDS})
    with FastSpecGenerator(target, head, feature_layers=[0, 2, 4], **COMMON) as generator:
        assert "reads boundaries 0, 2, 4 of" in generator.explain()
        assert generator.generate([[5, 6, 7]], max_new_tokens=4).shape == (1, 7)
