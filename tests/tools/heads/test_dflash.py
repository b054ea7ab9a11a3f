"""A DFlash head learns from what the target leaves, is written as published heads are, and drafts what it learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastspec import FastSpecGenerator
from tests.helpers import dflash_definition
from tests.helpers.dflash import Head
from tests.helpers.head_training import prompts, trained_head
from tests.helpers.tiny_targets import VOCAB, tiny_model
from tools.heads.evaluate import decode, draft_with
from tools.heads.export import load, save
from tools.heads.recipe import Recipe
from tools.heads.target import Target
from tools.heads.train import History

MASKS, MASK_ID, LAYERS, READ, NEW = 3, 7, 2, (2, 4, 6), 24
RECIPE = Recipe(
    steps=60, batch_tokens=120, lr=1e-2, warmup=5, ema=0.9, unroll=MASKS, dflash_layers=LAYERS, mask_id=MASK_ID
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", max_position_embeddings=512), READ)


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The folder of a head that drafts 40 of the 48 tokens, and how its training went."""
    folder = tmp_path_factory.mktemp("dflash")
    head, history = trained_head(target, RECIPE, NEW)
    save(head, target.model.config, READ, folder)
    return folder, history


def by_hand(target: Target, tensors: dict[str, Tensor], features: Tensor, token: Tensor) -> Tensor:
    """Logits [masks, draft_vocab] of the block after features [context, boundaries * hidden], by the definition."""
    sizes = Head(32, VOCAB, layers=LAYERS, heads=4, kv_heads=2, dim=8)
    block = target.embedding[torch.tensor([int(token), *[MASK_ID] * MASKS])].double()
    plain = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
    rules, known = dflash_definition.full(sizes), features.double().unflatten(1, (len(READ), -1))
    return dflash_definition.logits(sizes, rules, plain, known, block, plain["lm_head.weight"])[1:]


def test_training_raises_the_chance_of_acceptance(trained: tuple[Path, History]) -> None:
    history = trained[1]
    assert sum(history.losses[-5:]) < 0.85 * sum(history.losses[:5])
    assert history.accepted[-1][1][0] > 1.5 * history.accepted[0][1][0]


def test_blocks_from_every_position_are_those_of_the_definition(
    target: Target, trained: tuple[Path, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash_definition, "THETA", 5000.0)
    head, boundaries = load(trained[0])
    assert boundaries == READ
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    features = target.read(ids).features
    said = torch.stack(head.unroll(features, ids, target.embedding, MASKS), 2)
    tensors = load_file(trained[0] / "model.safetensors")
    for row, start in ((0, 0), (0, 5), (1, 3)):
        wanted = by_hand(target, tensors, features[row, : start + 1], ids[row, start + 1])
        # float32 against float64, over two layers of small numbers
        torch.testing.assert_close(said[row, start].double(), wanted, rtol=1e-4, atol=1e-4)


def test_more_drafts_than_masks_are_refused(target: Target, trained: tuple[Path, History]) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="4 drafts of a block of 4 tokens: it has 3"):
        load(trained[0])[0].unroll(target.read(ids).features, ids, target.embedding, MASKS + 1)


def test_fastspec_accepts_what_the_replay_of_training_accepts(
    target: Target, trained: tuple[Path, History], tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path)
    replayed = decode(target, draft_with(load(trained[0])[0], target), prompts(), NEW, MASKS, 0.0).accepted
    sizes = {"max_batch_size": 4, "max_length": 64, "dtype": "float32"}
    with FastSpecGenerator(tmp_path, trained[0], num_speculative_tokens=MASKS, **sizes) as generator:
        drafted = generator.generate(prompts(), max_new_tokens=NEW, return_dict_in_generate=True)
        plain = generator.generate(prompts(), max_new_tokens=NEW, num_speculative_tokens=0)
    assert torch.equal(drafted.sequences, plain)
    counted = sum(map(sum, replayed))
    assert counted > 0.2 * MASKS * sum(map(len, replayed))  # the head has learned these texts
    # the replay leaves out the step that the end of a text cuts short
    assert counted <= drafted.stats.accepted <= counted + 4 * MASKS


def test_its_config_is_that_of_z_lab(trained: tuple[Path, History]) -> None:
    config = json.loads((trained[0] / "config.json").read_text())
    assert {name: config[name] for name in ("architectures", "model_type", "num_hidden_layers", "block_size")} == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "block_size": MASKS + 1,
    }
    assert config["dflash_config"] == {"mask_token_id": MASK_ID, "target_layer_ids": [1, 3, 5]}
    assert (config["num_target_layers"], config["draft_vocab_size"], config["rope_theta"]) == (7, 40, 5000.0)
