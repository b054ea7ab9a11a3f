"""Configs of DFlash heads as they are published: what they come to, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.heads.checkpoint import HeadTensors, check_head_tensors
from fastspec.models.heads.dflash_spec import DFlashSpec, dflash_spec
from fastspec.models.heads.spec import StoredHead, TargetSizes, recognise
from tests.helpers.dflash import WRITERS, Head

HEAD = Head(32, 128)
TARGET = TargetSizes("target", layers=3, hidden_size=32, vocab_size=128, max_length=512, dtype=torch.float32)
SLIDES = ("sliding_attention", "full_attention")


def read(path: Path, target: TargetSizes = TARGET, feature_layers: tuple[int, ...] | None = None) -> DFlashSpec:
    """The spec of a written checkpoint, whose tensors are checked."""
    config = path / "config.json"
    raw, tensors = json.loads(config.read_text()), HeadTensors(path)
    found = recognise(raw, load_file(path / "model.safetensors"))
    assert found is not None
    assert found.kind == "dflash"
    made = dflash_spec(StoredHead(found, raw, tensors.infos(), target, feature_layers, config))
    check_head_tensors(tensors, made)
    return made


def spec(path: Path, layout: str = "z-lab", target: TargetSizes = TARGET, **changes: Any) -> DFlashSpec:
    return read(WRITERS[layout](path, replace(HEAD, **changes)), target)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_both_layouts_say_the_same(tmp_path: Path, layout: str) -> None:
    """z-lab names layers, speculators boundaries: the same hidden states."""
    found = spec(tmp_path, layout, ids=(0, 2), draft_vocab=40)
    assert found.found.layout == layout
    assert found.readings == ((1, 3),)
    assert (found.block_size, found.max_drafts, found.mask_id) == (8, 7, 5)
    assert (found.rows(7), found.rows(3)) == (8, 4)
    assert (found.num_layers, found.vocab_size, found.own_head, found.own_embed) == (2, 40, True, False)
    assert found.causal == (False, False)
    assert found.windows == (None, None)
    assert found.decoder.rope.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8))
    wide = spec(tmp_path / "whole", layout, own_embedding=True)
    assert (wide.vocab_size, wide.own_head, wide.own_embed) == (128, False, True)


@pytest.mark.parametrize(
    ("layout", "changes", "windows", "causal"),
    [
        ("z-lab", {"layer_types": SLIDES, "sliding_window": 9}, (9, None), (True, False)),
        ("z-lab", {"layer_types": SLIDES, "sliding_window": 9, "top": {"is_causal": False}}, (9, None), (False, False)),
        ("z-lab", {"more": {"causal": True}}, (None, None), (True, True)),
        ("z-lab", {"more": {"use_swa": True, "swa_window_size": 7}}, (7, 7), (False, False)),
        (
            "z-lab",
            {"layer_types": SLIDES, "sliding_window": 9, "more": {"swa_window_size": 7}},
            (7, None),
            (True, False),
        ),
        ("speculators", {"layer_types": SLIDES, "sliding_window": 9}, (9, None), (True, False)),
        (
            "speculators",
            {"layer_types": SLIDES, "sliding_window": 9, "more": {"sliding_window_non_causal": True}},
            (10, None),
            (False, False),
        ),
    ],
)
def test_windows_and_causality(
    tmp_path: Path, layout: str, changes: dict[str, Any], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    found = spec(tmp_path, layout, **changes)
    assert (found.windows, found.causal) == (windows, causal)


def test_the_masks_token_has_many_names(tmp_path: Path) -> None:
    assert spec(tmp_path / "a", top={"pard_token": 9}).mask_id == 5
    for name in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"):
        path = WRITERS["z-lab"](tmp_path / name, HEAD)
        raw = json.loads((path / "config.json").read_text())
        del raw["dflash_config"]["mask_token_id"]
        raw |= {"ptd_token_id": 3, name: 7}
        (path / "config.json").write_text(json.dumps(raw))
        assert read(path).mask_id == 7


def test_flags_of_the_config_reach_the_spec(tmp_path: Path) -> None:
    more = {"sample_from_anchor": True, "attention_value_scale": 0.5, "input_embedding_scale": 3.0}
    found = spec(tmp_path, more=more | {"output_multiplier": 0.25, "final_logit_softcapping": 30.0})
    assert (found.max_drafts, found.rows(8)) == (8, 8)
    scales = found.decoder.scales
    assert (found.value_scale, found.embed_scale, scales.logits, scales.softcap) == (0.5, 3.0, 0.25, 30.0)
    assert spec(tmp_path / "sinks", sinks=True, more={"attention_sink_bias": True}).sinks
    assert spec(tmp_path / "bias", bias=True).decoder.qkv_bias


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"top": {"is_neox_style": False}}, "is_neox_style=False"),
        ({"more": {"projector_type": "domino"}}, "projector_type='domino'"),
        ({"more": {"shift_label": True}}, "shift_label=True"),
        ({"top": {"use_heterogeneous_kv": True}}, "use_heterogeneous_kv=True"),
        ({"top": {"hidden_act": "relu"}}, "hidden_act='relu'"),
        ({"more": {"mask_token_id": 128}}, "mask_token_id=128.*from 0 to 127"),
        ({"more": {"mask_token_id": None}}, "mask_token_id=None"),
        ({"more": {"target_layer_ids": "1"}}, "target_layer_ids='1'"),
        ({"more": {"target_layer_ids": None}}, "target_layer_ids=None.*feature_layers"),
        ({"more": {"causal": 1}}, "causal=1.*true or false"),
        ({"more": {"attention_value_scale": -1}}, "attention_value_scale=-1.*positive"),
        ({"block_size": 1}, "block_size=1"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("linear_attention",) * 2}, "layer_types"),
        ({"layer_types": SLIDES}, "swa_window_size=None"),
        ({"top": {"num_hidden_layers": "2"}}, "num_hidden_layers"),
        ({"top": {"dflash_config": [1]}}, "dflash_config is list"),
    ],
)
def test_settings_without_sense_or_meaning_here_are_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises((UnsupportedModel, CheckpointError), match=match):
        spec(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ids": (0, 3)}, r"layers \[0, 3\], and the target has 3 layers: it was made for another target"),
        ({"hidden": 48}, "the head is 48 wide, .* target, which is 32"),
        ({"top": {"num_hidden_layers": 3, "layer_types": None}}, "9 tensor.* missing|11 tensor.* missing"),
        ({"more": {"attention_sink_bias": True}}, "attention_sink_bias.* missing"),
        (
            {"top": {"draft_vocab_size": 40}},
            r"lm_head.weight is missing, .* \[128, 32\] does not fit \[40, 32\]",
        ),
        ({"top": {"intermediate_size": 64}}, r"gate_proj.weight in .* has shape \[48, 32\], wanted \[64, 32\]"),
    ],
)
def test_heads_of_another_target_or_config_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        spec(tmp_path, **changes)


def test_a_head_of_another_width_needs_all_of_its_own(tmp_path: Path) -> None:
    wide = replace(TARGET, hidden_size=16)
    with pytest.raises(CheckpointError, match="the head is 32 wide"):
        spec(tmp_path, target=wide)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 tensor.*attention_sink_bias.*unexpected"):
        spec(tmp_path, sinks=True)


def test_the_callers_layers_count_before_the_configs(tmp_path: Path) -> None:
    path = WRITERS["z-lab"](tmp_path, HEAD)
    assert read(path, feature_layers=(0, 3)).readings == ((0, 3),)
    with pytest.raises(ValueError, match="0 to 3"):
        read(path, feature_layers=(0, 4))
    with pytest.raises(CheckpointError, match=r"fc.weight .* wanted \[32, 96\]"):
        read(path, feature_layers=(0, 1, 2))


def test_an_embedding_of_the_mask_is_converted_by_the_line_that_the_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WRITERS["z-lab"](tmp_path, HEAD)
    vector = torch.randn(32)
    torch.save({"embedding": vector[None], "mask_token_id": 5}, path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match="pickled and never loaded here") as refused:
        read(path)
    words = shlex.split(str(refused.value).split("trust it: ")[1])
    assert words[:5] == ["cd", str(path), "&&", "python", "-c"]
    monkeypatch.chdir(path)
    exec(words[5])
    found = read(path)
    assert found.mask_file is not None
    assert torch.equal(load_file(found.mask_file)["mask_embedding"], vector)


@pytest.mark.parametrize(
    ("layout", "changes", "tensor", "match"),
    [
        ("speculators", {"top": {"speculators_model_type": "xpress"}}, None, "xpress"),
        ("z-lab", {}, "medusa_head.0.weight", "Medusa"),
    ],
)
def test_relatives_are_refused_by_name(
    tmp_path: Path, layout: str, changes: dict[str, Any], tensor: str | None, match: str
) -> None:
    path = WRITERS[layout](tmp_path, replace(HEAD, **changes))
    if tensor is not None:
        tensors = load_file(path / "model.safetensors")
        save_file(tensors | {tensor: torch.zeros(4, 4)}, path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"(?s)not supported.*{match}"):
        read(path)
