"""Learned drafters on hosted targets: drafts of the whole text, the text of plain decoding, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastspec import FastSpecGenerator, UnsupportedModel
from fastspec.models.hosted import admission
from fastspec.models.hosted.model import HostedModel
from fastspec.models.hosted.streams import LayerStreams, layers_in
from fastspec.proposers.heads import Eagle3Drafts
from tests.helpers import quantised
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import eagle3_tensors, engine_with, write_eagle3
from tests.helpers.hosted import make_model
from tests.helpers.model_table import tiny_config
from tests.proposers.test_eagle3 import Seen, Truth, uneven, watched, wrong_drafts
from tests.scheduling.test_scheduler import prompts, run, texts

GIVEN, CAPS, READ = [*prompts(3, seed=5), [7] * 65], [14, 9, 12, 7], [1, 2]
SIZES = {"target_hidden": 32, "read": len(READ), "std": 0.5}
SHARED = {"hidden": 32, "own_embed": False, "own_head": False, "drafted": 101}
COMMON: dict[str, Any] = {"max_batch_size": 2, "max_length": 120, "device": "cpu", "progress": False}

pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning")


def saved(path: Path, name: str, **options: Any) -> Path:
    model: PreTrainedModel = make_model(name, **options)
    model.save_pretrained(path)
    return path


def eagle(path: Path, **options: Any) -> Path:
    ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READ], "layer_ids": READ}
    return write_eagle3(path, eagle3_tensors(**{**SIZES, **options}), eagle_config=ids, num_aux_hidden_states=2)


@pytest.mark.parametrize(("name", "shares"), [("qwen3_moe", True), ("deepseek_v3", False)])
def test_drafts_are_those_of_the_whole_text(name: str, shares: bool, tmp_path: Path) -> None:
    """Experts and latent attention; with and without the target's own matrices."""
    target = saved(tmp_path / "target", name, num_hidden_layers=3)
    head = eagle(tmp_path / "head", **(SHARED if shares else {"hidden": 48}))
    seen: list[Seen] = []
    engine = engine_with(target, head)
    assert isinstance(engine.modules.target, HostedModel)
    assert isinstance(engine.modules.proposer, Eagle3Drafts)
    plain = texts(run(engine, GIVEN, CAPS, k=0))
    assert texts(run(watched(engine, seen), GIVEN, CAPS, k=uneven)) == plain
    assert len(seen) > 10
    truth = Truth(target, head, READ)
    if shares:
        truth.head.embed = truth.model.get_input_embeddings().weight.detach()
        truth.head.lm_head = truth.model.get_output_embeddings().weight.detach()
    assert wrong_drafts(truth, seen) == 0
    engine.modules.proposer.read((0, 1))  # the layer before each
    found: list[Seen] = []
    assert texts(run(watched(engine, found), GIVEN, CAPS, k=uneven)) == plain
    assert wrong_drafts(truth, found) > 2, "other layers are seen"


def test_a_block_of_masks_drafts_for_a_hosted_target(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "qwen3_moe", num_hidden_layers=3)
    head = write_z_lab(tmp_path / "head", Head(32, 101, ids=(0, 1), mask_id=9))
    with FastSpecGenerator(target, head, num_speculative_tokens=5, verification="coupled", **COMMON) as made:
        for options in ({}, {"do_sample": True, "seed": 3, "temperature": 0.9}):
            plain, *drafted = (
                made.generate([[5, 6, 7], [9, 8]], max_new_tokens=9, num_speculative_tokens=k, **options)
                for k in (0, 1, 5)
            )
            assert all(torch.equal(each, plain) for each in drafted)
        assert "a DFlash head" in made.explain()


def test_a_quantised_hosted_target_takes_a_head(tmp_path: Path) -> None:
    """Hidden states are those of the quantised layers: the drafts are those beside the values that are meant."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 3}
    plain = saved(tmp_path / "plain", "stablelm", max_position_embeddings=256, **sizes)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    meant = quantised.write(plain, tmp_path / "q", settings, quantised.fp8_tensor)
    shutil.copytree(plain, tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    head, drafts = eagle(tmp_path / "head", hidden=48, target_hidden=128), []
    for name in ("q", "meant"):
        seen: list[Seen] = []
        engine = engine_with(tmp_path / name, head)
        assert isinstance(engine.modules.target, HostedModel)
        assert texts(run(watched(engine, seen), GIVEN, CAPS, k=uneven)) == texts(run(engine, GIVEN, CAPS, k=0))
        drafts.append([each.drafts for each in seen])
    assert drafts[0] == drafts[1]
    assert sum(map(len, drafts[0])) > 20


def test_what_has_no_such_stream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers_in(["layers.0.attn", "layers.1.attn", "layers.1.cross"]) == ("layers.0", "layers.1")
    assert layers_in(["layers.0.attn", "layers.2.attn"]) == ()
    assert layers_in(["a.0.attn", "b.1.attn"]) == ()
    assert layers_in(["attn"]) == ()
    scaled = saved(tmp_path / "scaled", "gemma4_unified_text")
    own = eagle(tmp_path / "own", hidden=48)
    FastSpecGenerator(scaled, own, **COMMON).close()
    with pytest.raises(UnsupportedModel, match=r"changes its embeddings before the first layer"):
        FastSpecGenerator(scaled, eagle(tmp_path / "shared", **SHARED), **COMMON).generate([[1]], max_new_tokens=1)
    with pytest.raises(UnsupportedModel, match=r"MTP layers run as layers of a native family, and .* is hosted; use"):
        FastSpecGenerator(scaled, "mtp", **COMMON)
    hybrid = tmp_path / "hybrid"
    AutoModelForCausalLM.from_config(tiny_config("olmo_hybrid")).save_pretrained(hybrid)
    for head in (own, "mtp"):
        with pytest.raises(UnsupportedModel, match=r"'olmo_hybrid' .* only native families keep a state for each"):
            FastSpecGenerator(hybrid, head, **COMMON)
    original = LayerStreams.__init__

    def misnamed(self: LayerStreams, base: nn.Module, names: tuple[str, ...]) -> None:
        original(self, base, names[::-1])

    monkeypatch.setattr(LayerStreams, "__init__", misnamed)
    plain = saved(tmp_path / "plain", "stablelm", num_hidden_layers=3)
    with pytest.raises(UnsupportedModel, match=r"is not the hidden state that .* reports there"):
        FastSpecGenerator(plain, own, **COMMON).generate([[1]], max_new_tokens=1)
    assert admission.TRIAL_PROMPT > 1
