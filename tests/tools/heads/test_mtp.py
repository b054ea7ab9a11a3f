"""An MTP layer learns from what the target leaves, is written into its checkpoint, and drafts what it learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastspec import FastSpecGenerator
from tests.helpers.head_training import prompts, trained_head
from tests.helpers.mtp import MtpDefinition
from tests.helpers.tiny_targets import VOCAB, tiny_model
from tests.tools.heads.test_corpus import folder_of, save_tokenizer, texts
from tools.heads.__main__ import main
from tools.heads.evaluate import decode, draft_with
from tools.heads.mtp import MtpHead, load_mtp, save_mtp
from tools.heads.recipe import Recipe
from tools.heads.target import LAST, Target
from tools.heads.train import History, head_shape, make_head

PLACES, NEW, LAYERS = 3, 24, 7
RECIPE = Recipe(steps=60, batch_tokens=120, lr=1e-2, warmup=5, ema=0.9, unroll=PLACES, mtp=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3", max_position_embeddings=512), LAST)


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The target's checkpoint with a layer that drafts 40 of the 48 tokens, and how its training went."""
    folder = tmp_path_factory.mktemp("mtp")
    head, history = trained_head(target, RECIPE, NEW)
    assert isinstance(head, MtpHead)
    target.model.save_pretrained(folder / "target")
    save_mtp(head, folder / "target", folder / "with")
    return folder / "with", history


def test_training_raises_the_chance_of_acceptance(trained: tuple[Path, History]) -> None:
    history = trained[1]
    assert sum(history.losses[-5:]) < 0.85 * sum(history.losses[:5])
    assert history.accepted[-1][1][0] > 1.5 * history.accepted[0][1][0]


def test_chains_from_every_position_are_those_of_the_definition(target: Target, trained: tuple[Path, History]) -> None:
    folder = trained[0]
    head = load_mtp(folder, head_shape(target, 0, RECIPE))
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    features = target.read(ids).features
    said = torch.stack(head.unroll(features, ids, target.embedding, PLACES), 2)
    at, parts = f"model.layers.{LAYERS}.", {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding"}
    parts |= {"hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
    tensors = {
        (f"{parts[module]}.weight" if (module := name.removesuffix(".weight")) in parts else f"layers.0.{name}"): value
        for name, value in ((key.removeprefix(at), value.float()) for key, value in own_tensors(folder).items())
    }
    definition = MtpDefinition.of(target.model, tensors, "nextn")
    for row, start in ((0, 0), (0, 5), (1, 3)):
        known, g = ids[row], features[row, : start + 1]
        for place in range(PLACES):
            x = definition.behind(g, known[1 : start + 2 + place])
            wanted = definition.logits(x[-1])[head.drafted]
            # float32, sums in another order
            torch.testing.assert_close(said[row, start, place], wanted, rtol=1e-4, atol=1e-4)
            g = torch.cat((g, x[-1:]))


def own_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "mtp.safetensors")


def test_fastspec_accepts_what_the_replay_of_training_accepts(target: Target, trained: tuple[Path, History]) -> None:
    folder, ids = trained[0], json.loads((trained[0] / "draft_vocab.json").read_text())
    head = load_mtp(folder, head_shape(target, 0, RECIPE))
    replayed = decode(target, draft_with(head, target), prompts(), NEW, PLACES, 0.0).accepted
    sizes = {"max_batch_size": 4, "max_length": 64, "dtype": "float32", "num_speculative_tokens": PLACES}
    with FastSpecGenerator(folder, "mtp", draft_vocab=ids, **sizes) as generator:
        drafted = generator.generate(prompts(), max_new_tokens=NEW, return_dict_in_generate=True)
        plain = generator.generate(prompts(), max_new_tokens=NEW, num_speculative_tokens=0)
    assert torch.equal(drafted.sequences, plain)
    counted = sum(map(sum, replayed))
    assert counted > 0.2 * PLACES * sum(map(len, replayed))  # the layer has learned these texts
    # the replay leaves out the step that the end of a text cuts short
    assert counted <= drafted.stats.accepted <= counted + 4 * PLACES


def test_the_checkpoint_has_deepseeks_names_and_the_target_of_before(trained: tuple[Path, History]) -> None:
    folder = trained[0]
    names = {name.removeprefix(f"model.layers.{LAYERS}.").removesuffix(".weight") for name in own_tensors(folder)}
    attention = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    outer = {"eh_proj", "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"}
    assert names == attention | outer | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    before, after = load_file(folder.parent / "target" / "model.safetensors"), load_file(folder / "target.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_second_layer_and_another_family_are_refused(target: Target, trained: tuple[Path, History]) -> None:
    head = load_mtp(trained[0], head_shape(target, 0, RECIPE))
    with pytest.raises(ValueError, match="has an MTP layer already"):
        save_mtp(head, trained[0], trained[0] / "again")
    other = Target(tiny_model("llama", attention_bias=True), LAST)
    with pytest.raises(ValueError, match="Train an EAGLE-3 head"):
        make_head(other, torch.arange(VOCAB), RECIPE)


def test_the_command_trains_writes_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tmp_path / "target", tmp_path / "with"
    tiny_model("qwen3").save_pretrained(target)
    save_tokenizer(target)
    corpus = folder_of(tmp_path / "corpus", texts(200, 40))
    common = [str(target), str(corpus), "--device", "cpu", "--dtype", "float32", "--places", "2", "--prompts", "2"]
    common += ["--prompt-length", "8", "--new-tokens", "10", "--out"]
    sizes = {"steps": 3, "unroll": 2, "own-rows": 4, "own-length": 16, "own-prompts": 4, "real-rows": 2}
    training = [f"--{name}={value}" for name, value in {**sizes, "real-length": 16, "batch-tokens": 64}.items()]
    assert main([*common, str(out), *training, "--mtp"]) == 0
    assert not (out / "draft_vocab.json").exists()  # it drafts all
    assert main([*common, str(tmp_path / "again"), "--measure", str(out)]) == 0
    reports = [json.loads((folder / "report.json").read_text()) for folder in (out, tmp_path / "again")]
    assert reports[0]["held_out"] == reports[1]["held_out"]
    with FastSpecGenerator(out, "mtp", max_batch_size=1, max_length=32, dtype="float32") as generator:
        assert "MTP head" in generator.explain()
    for option in ("--intermediate", "--mask-id"):
        with pytest.raises(SystemExit):
            main([*common, str(out), "--mtp", option, "5"])
        assert f"--mtp does not go with {option}" in capsys.readouterr().err
