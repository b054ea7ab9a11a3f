"""What a drafter is: by tensors and config; its relatives, and heads of other targets, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import CheckpointError, FastSpecGenerator, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.eagle3_spec import Eagle3Spec
from fastspec.models.heads.spec import (
    NORMED,
    as_layers,
    asked_boundaries,
    default_boundaries,
    plain_name,
    readings_of,
    recognise,
)
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, write_eagle3, write_speculators


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama3", num_hidden_layers=LAYERS)


def spec_of(target: Path, head: Path, feature_layers: list[int] | None = None) -> Eagle3Spec:
    _, found = resolve_pair(target, head, (None, None), (None, None), feature_layers)
    assert isinstance(found, HeadCheckpoint)
    assert isinstance(found.spec, Eagle3Spec)
    return found.spec


def refused(
    target: Path, head: Path, kind: type[Exception] | tuple[type[Exception], ...] = CheckpointError, **options: Any
) -> str:
    with pytest.raises(kind) as caught:
        resolve_pair(target, head, (None, None), (None, options.pop("quantization", None)), **options)
    return str(caught.value)


EAGLE3 = ["fc.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight", "d2t"]
DFLASH = ["fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"]
MODEL = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"]


def test_heads_are_recognised_by_tensors_and_layouts_by_config() -> None:
    speculators = {"speculators_model_type": "eagle3"}
    assert str(recognise({"architectures": ["LlamaForCausalLM"]}, EAGLE3)).startswith("EAGLE-3 head (layout of EAGLE")
    assert str(recognise(speculators, ["layers.0.hidden_norm.weight", "fc.weight"])).endswith("(layout of speculators)")
    assert str(recognise({"dflash_config": {}}, DFLASH)) == "DFlash head (layout of z-lab)"
    assert str(recognise({"speculators_model_type": "dflash"}, DFLASH)) == "DFlash head (layout of speculators)"
    assert str(recognise({"architectures": ["DFlash2DraftModel"]}, DFLASH)) == "DFlash2 head (layout of z-lab)"
    markov = [*DFLASH, "markov_head.markov_w1.weight"]
    assert str(recognise({"architectures": ["DFlashDraftModel"]}, markov)) == "DSpark head (layout of DeepSpec)"
    said = {"speculators_model_type": "dspark"}
    assert str(recognise(said, DFLASH)) == "DSpark head (layout of speculators)", "its markov_rank may be 0"
    assert str(recognise({}, [*EAGLE3, "mask_hidden"])).startswith("P-EAGLE head (layout of EAGLE")
    assert recognise({"architectures": ["LlamaForCausalLM"]}, MODEL) is None
    assert plain_name("model.midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert plain_name("aux_norm_mid.weight") == "fc_norm.1.weight"


@pytest.mark.parametrize(
    ("raw", "tensors", "named"),
    [
        ({"speculators_model_type": "xpress"}, DFLASH, "xpress"),
        ({"speculators_model_type": "mtp"}, MODEL, "mtp.*give that checkpoint as target, with draft='mtp'"),
        ({"dspark_block_size": 5}, MODEL, "DSpark in the checkpoint of its target"),
        ({"medusa_num_heads": 4}, ["0.0.linear.weight"], "Medusa"),
        ({}, ["fc.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight"], "EAGLE-1"),
        ({"draft_vocab_size": 8}, ["mtp.fc.weight"], "MTP"),
        ({"model_type": "qwen3_next"}, ["mtp.fc.weight", "mtp.norm.weight"], "MTP.*with draft='mtp'; put the layer's"),
        ({"model_type": "deepseek_v3"}, ["model.layers.61.eh_proj.weight"], "MTP.*with draft='mtp'"),
    ],
)
def test_relatives_are_refused_by_name(raw: dict[str, Any], tensors: list[str], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        recognise(raw, tensors)


def test_a_model_with_layers_for_drafting_stays_a_model() -> None:
    assert recognise({"model_type": "qwen3"}, [*MODEL, "mtp.fc.weight"]) is None
    for embedding in ("backbone.embeddings.weight", "model.word_embeddings.weight"):  # of Nemotron, and of Ling
        assert recognise({"model_type": "any"}, [embedding, "mtp.layers.0.eh_proj.weight"]) is None
    assert recognise({"model_type": "glm4"}, [*MODEL, "model.layers.1.eh_proj.weight"]) is None


def test_what_a_config_leaves_out_is_what_its_engine_takes(target: Path, tmp_path: Path) -> None:
    ours = spec_of(target, write_eagle3(tmp_path / "a", eagle3_tensors()))
    theirs = spec_of(target, write_speculators(tmp_path / "b", eagle3_tensors()))
    for spec in (ours, theirs):
        assert spec.readings == ((2, LAYERS // 2, LAYERS - 3),)
        assert (spec.norm_before_residual, spec.norm_output, spec.norm_before_fc, spec.fc_norm) == (False,) * 4
        assert spec.max_length == 512 != 24, "the target's context, not that of the trainer's texts"
        assert spec.family in (str(spec.found),)


def test_ids_are_boundaries_or_outputs(target: Path, tmp_path: Path) -> None:
    tensors, ids = eagle3_tensors(), [1, 3, 4]
    written = write_eagle3(tmp_path / "a", tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert spec_of(target, written).readings == ((2, 4, 5), (1, 3, 4))
    top = write_eagle3(tmp_path / "b", tensors, eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert spec_of(target, top).readings == ((2, 4, 6),), "7 is not there"
    assert spec_of(target, write_speculators(tmp_path / "c", tensors, boundaries=ids)).readings == ((1, 3, 4),)
    assert spec_of(target, written, [0, 6, 3]).readings == ((0, 6, 3),)
    both = {"eagle_aux_hidden_state_layer_ids": ids, "layer_ids": [2, 4, 5]}
    named_twice = write_eagle3(tmp_path / "e", tensors, eagle_config=both)
    assert spec_of(target, named_twice).readings == ((2, 4, 5),), "only one reading fits both names"
    both["layer_ids"] = ids
    assert len(spec_of(target, write_eagle3(tmp_path / "f", tensors, eagle_config=both)).readings) == 2
    final = eagle3_tensors(read=1)
    normed = write_eagle3(tmp_path / "d", final, eagle_config={"use_aux_hidden_state": False})
    assert spec_of(target, normed).readings == ((NORMED,),)
    assert as_layers((NORMED, 0, 6), 6) == (6, -1, 5)
    assert default_boundaries(32) == (2, 16, 29)
    assert readings_of([24, 30, 36], 36, 1, (0,)) == ((24, 30, 36),)


def test_feature_layers_are_checked(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors())
    assert "7 is not one of the target's boundaries 0 to 6" in refused(
        target, head, ValueError, feature_layers=[1, 2, 7]
    )
    assert "has 2 entries, and the head reads 3" in refused(target, head, ValueError, feature_layers=[1, 2])
    assert "is for learned drafters only" in refused(target, target, UnsupportedOption, feature_layers=[1, 2, 3])
    with pytest.raises(ValueError, match="True"):
        asked_boundaries([True], 6, None)


def test_pickled_weights_are_refused_with_the_line_that_converts_them(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors())
    stored = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(stored, head / "pytorch_model.bin")
    message = refused(target, head)
    assert "pickled and never loaded" in message
    line = message[message.index('python -c "') + len('python -c "') : -1]
    here = line.replace("'pytorch_model.bin'", repr(str(head / "pytorch_model.bin")))
    exec(compile(here.replace("'model.safetensors'", repr(str(head / "model.safetensors"))), "line", "exec"), {})
    assert spec_of(target, head).found.kind == "eagle3"


def _other_hidden(head: Path) -> None:
    edit(head / "config.json", target_hidden_size=HIDDEN + 8)


def _other_vocab(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    stored["t2d"] = torch.zeros(VOCAB + 9, dtype=torch.bool)
    save_file(stored, head / "model.safetensors")


def _ids_beyond(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    stored["d2t"][-1] = VOCAB
    save_file(stored, head / "model.safetensors")


def _ids_twice(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    stored["d2t"][1] = stored["d2t"][0] - 1
    save_file(stored, head / "model.safetensors")


def _no_table(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    del stored["d2t"]
    save_file(stored, head / "model.safetensors")


def _odd_width(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    stored["fc.weight"] = stored["fc.weight"][:, :-8].contiguous()
    save_file(stored, head / "model.safetensors")


def _stray(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    stored["gate.weight"] = torch.zeros(3, 3)
    save_file(stored, head / "model.safetensors")


def _lacking(head: Path) -> None:
    stored = load_file(head / "model.safetensors")
    del stored["norm.weight"]
    save_file(stored, head / "model.safetensors")


def _deep(head: Path) -> None:
    edit(head / "config.json", eagle_aux_hidden_state_layer_ids=[2, 40, 60])


def _both_norms(head: Path) -> None:
    edit(head / "config.json", norm_before_fc=True, fc_norm=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_other_hidden, "target with hidden_size=72"),
        (_other_vocab, "target with vocab_size=110"),
        (_ids_beyond, "made for another target"),
        (_ids_twice, "different ids"),
        (_no_table, "has no tensor d2t"),
        (_odd_width, "a multiple of the target's hidden_size"),
        (_stray, "gate.weight"),
        (_lacking, "norm.weight"),
        (_deep, "made for another target"),
        (_both_norms, "wanted one of them"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    change: Any, named: str, target: Path, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors())
    change(head)
    message = refused(target, head)
    assert message.startswith("draft: ")
    assert named in message


def test_a_recorded_verifier_must_be_of_the_targets_kind(target: Path, tmp_path: Path) -> None:
    head = write_speculators(tmp_path, eagle3_tensors(), verifier="Qwen3ForCausalLM")
    assert "somebody/target (Qwen3ForCausalLM)" in refused(target, head)


def test_what_cannot_be_shared_is_refused(target: Path, tmp_path: Path) -> None:
    assert "is missing" in refused(target, write_eagle3(tmp_path / "a", eagle3_tensors(own_head=False, drafted=VOCAB)))
    narrow = write_eagle3(tmp_path / "b", eagle3_tensors(own_embed=False))
    assert "cannot use that of" in refused(target, narrow)


def test_a_head_may_tie_its_own_embedding(target: Path, tmp_path: Path) -> None:
    tied = write_eagle3(tmp_path / "a", eagle3_tensors(own_head=False, drafted=VOCAB), tie_word_embeddings=True)
    assert spec_of(target, tied).tied_head
    stored = write_eagle3(tmp_path / "b", eagle3_tensors(drafted=VOCAB), tie_word_embeddings=True)
    assert not spec_of(target, stored).tied_head, "a stored output matrix is used"
    inner = {"tie_word_embeddings": True}
    theirs = write_speculators(
        tmp_path / "c", eagle3_tensors(hidden=HIDDEN, own_head=False, drafted=VOCAB), inner=inner
    )
    assert not spec_of(target, theirs).tied_head, "that is said of the target"
    fewer = write_eagle3(tmp_path / "d", eagle3_tensors(own_head=False), tie_word_embeddings=True, draft_vocab_size=40)
    assert "the head drafts 40 ids with an embedding of 101" in refused(target, fewer)


def test_options_that_heads_do_not_have(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors())
    assert "draft_quantization='int3'" in refused(target, head, UnsupportedOption, quantization="int3")
    with pytest.raises(ValueError, match="compile=True is for draft models"):
        FastSpecGenerator(target, head, compile=True, exact=False, device="cpu", progress=False)


def test_the_config_is_read_strictly(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, eagle3_tensors())
    for field, value in (("norm_output", "yes"), ("draft_vocab_size", -1), ("hidden_act", "gelu")):
        before = json.loads((head / "config.json").read_text())
        edit(head / "config.json", **{field: value})
        assert field in refused(target, head, (CheckpointError, UnsupportedModel))
        (head / "config.json").write_text(json.dumps(before))


def test_settings_that_are_not_known_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    """Those of NVIDIA's ModelOpt are known, with the values that published heads have."""
    of_modelopt = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    of_modelopt |= {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}
    assert spec_of(target, write_eagle3(tmp_path / "a", eagle3_tensors(), eagle_config=of_modelopt)).fc
    for name, value in (("use_mtp_layernorm", True), ("parallel_draft_step", 2), ("gate_norm", 1)):
        head = write_eagle3(tmp_path / name, eagle3_tensors(), eagle_config={**of_modelopt, name: value})
        said = refused(target, head, UnsupportedModel)
        assert f"eagle_config.{name}={value} in the config of this EAGLE-3 head is not known" in said
    at_the_top = write_speculators(tmp_path / "top", eagle3_tensors(), draft_gating="soft")
    assert "draft_gating='soft'" in refused(target, at_the_top, UnsupportedModel)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_hub_id_is_looked_up_once(kind: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config, then the weights and the further chat templates of that commit; whatever it turns out to be."""
    draft = write_eagle3(tmp_path / "a", eagle3_tensors()) if kind == "head" else make_checkpoint(tmp_path, "llama3")
    asked: list[str] = []

    def fake(repo: str, **options: object) -> str:
        asked.append(repo)
        return str(draft)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    _, found = resolve_pair(target, "owner/draft", (None, None), (None, None))
    assert asked == ["owner/draft"] * 3
    assert found is not None
    assert found.name == "owner/draft"
    assert isinstance(found, HeadCheckpoint) == (kind == "head")
