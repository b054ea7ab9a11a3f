"""A published head is trained further: it is read as fastspec drafts with it, and written back as it was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastspec import CheckpointError
from fastspec.models.checkpoints.pair import resolve_pair
from tests.helpers.heads import eagle3_tensors, peagle_tensors, write_eagle3, write_speculators
from tests.helpers.heads_definition import Definition
from tests.helpers.tiny_targets import VOCAB, tiny_model
from tests.tools.heads.test_corpus import folder_of, save_tokenizer, texts
from tools.heads.__main__ import main
from tools.heads.published import read_published, save_like
from tools.heads.recipe import CONTINUED, Recipe
from tools.heads.target import Target

READ = [1, 3, 5]
SIZES: dict[str, Any] = {"target_hidden": 32, "hidden": 32, "vocab": VOCAB, "drafted": 20, "std": 0.3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_model("llama", max_position_embeddings=512).save_pretrained(path)
    save_tokenizer(path)
    return path


def ours(path: Path, **options: Any) -> Path:
    return write_speculators(
        path, eagle3_tensors(**SIZES | options), vocab=VOCAB, boundaries=READ, inner={"vocab_size": VOCAB}
    )


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "EAGLE-3.1": ({"fc_norm": True, "qk_norm": True}, {"fc_norm": True, "norm_output": True}),
    "others": (
        {"norm_before_fc": True, "fc_bias": True, "hidden": 48},
        {"norm_before_fc": True, "norm_before_residual": True, "logit_scale": 0.5},
    ),
    "shared": ({"own_embed": False, "own_head": False, "drafted": VOCAB}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_are_the_definition(variant: str, target: Path, tmp_path: Path) -> None:
    made, fields = VARIANTS[variant]
    tensors = eagle3_tensors(**SIZES | made)
    ids = {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in READ], "layer_ids": READ}
    path = write_eagle3(tmp_path, tensors, vocab=VOCAB, eagle_config=ids, **fields)
    published, live = read_published(str(path), target, None), Target(tiny_model("llama"), READ)
    assert published.readings == (tuple(READ),)
    head = published.head(live.head)
    flags = {name: value for name, value in fields.items() if name in ("norm_before_residual", "norm_output")}
    scale = fields.get("logit_scale", 1.0)
    definition = Definition(tensors, embed=live.embedding, lm_head=live.head, scale=scale, **flags)
    text = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    features = live.read(text).features
    said = head.unroll(features, text, live.embedding, 3)
    for start in (0, 4):
        known = features[0, : start + 1].view(start + 1, len(READ), -1)
        g, following = definition.condense(known), text[0, 1 : start + 2]
        for place in range(3):
            x = definition.behind(g, following)[-1:]
            torch.testing.assert_close(said[place][0, start], definition.logits(x)[0], rtol=1e-4, atol=1e-4)
            g = torch.cat((g, definition.feature(x)))
            following = torch.cat((following, text[0, start + 2 + place : start + 3 + place]))


def test_a_head_is_written_as_it_was_published(target: Path, tmp_path: Path) -> None:
    path = ours(tmp_path / "head")
    published = read_published(str(path), target, None)
    head = published.head(torch.zeros(VOCAB, 32))
    with torch.no_grad():
        head.midlayer.mlp.up_proj.weight.add_(1.0)
    save_like(head, published, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (path / "config.json").read_bytes()
    before, after = (load_file(each / "model.safetensors") for each in (path, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["layers.0.mlp.up_proj.weight"]
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: each.dtype for name, each in after.items()}


def test_training_raises_what_the_target_accepts(target: Path, tmp_path: Path) -> None:
    """And every figure is there, before and after, of text that was held out."""
    corpus = folder_of(tmp_path / "corpus", texts(200, 40))
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}  # of two meanings, which are tried
    path, out = (
        write_eagle3(tmp_path / "head", eagle3_tensors(**SIZES), vocab=VOCAB, eagle_config=ids),
        tmp_path / "out",
    )
    small = "--steps 45 --batch-tokens 256 --lr 5e-3 --warmup 5 --ema 0.9 --unroll 2 --own-rows 32 --own-length 24"
    small += " --own-prompts 4 --own-temperatures 0 1 --own-batch 16 --real-rows 4 --real-length 16 --prompts 4"
    small += " --prompt-length 6 --new-tokens 16 --places 2 --device cpu --dtype float32"
    assert main([str(target), str(corpus), "--out", str(out), "--from", str(path), *small.split()]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["continued"] == str(path)
    assert report["held_out_before"].keys() == report["held_out"].keys()
    drafted = "head, temperature 1.0"
    before, after = (report[name][drafted]["accepted_at_least"] for name in ("held_out_before", "held_out"))
    assert len(before) == len(after) == 2
    assert after[0] > 1.3 * before[0]
    assert report["boundaries"] in ([2, 3, 5], [1, 2, 4])
    _, found = resolve_pair(target, out, (None, None), (None, None))
    assert found is not None
    assert found.spec.family.startswith("EAGLE-3 head")
    assert CONTINUED.lr < Recipe().lr


def test_what_cannot_be_trained_here_is_refused(target: Path, tmp_path: Path) -> None:
    wide = {"read": 3, **SIZES}
    parallel = write_eagle3(tmp_path / "a", peagle_tensors(**wide), vocab=VOCAB, mask_token_id=3)
    with pytest.raises(ValueError, match=r"is a P-EAGLE head .*; --from continues EAGLE-3 heads alone"):
        read_published(str(parallel), target, READ)
    with pytest.raises(ValueError, match="has 2 layers: not trained here"):
        read_published(str(ours(tmp_path / "b", layers=2)), target, None)
    with pytest.raises(CheckpointError, match="was made for a target with"):
        read_published(str(ours(tmp_path / "c", target_hidden=48)), tiny_saved(tmp_path), None)


def tiny_saved(path: Path) -> Path:
    """Another target, with another vocabulary."""
    tiny_model("llama", vocab_size=VOCAB + 2).save_pretrained(path / "other")
    return path / "other"
