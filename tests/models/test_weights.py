"""Loaded weights equal the transformers model's bit for bit, and nothing that does not fit gets loaded."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.weights import Weight
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.models.layer_table import DecoderWeights, LayerWeights, tensor_shapes
from tests.helpers.checkpoints import FAMILIES, make_checkpoint, make_model

CPU = torch.device("cpu")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "model.layers.0.mlp.gate_proj.weight"


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderWeights:
    return load_weights(checkpoint, dtype=dtype, device=CPU, progress=False, **options)


def tensors_of(weights: DecoderWeights) -> dict[str, Tensor]:
    found = {"embed": weights.embed.data, "norm": weights.norm, "head": weights.head.data}
    for index, layer in enumerate(weights.layers):
        for field in fields(LayerWeights):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                found[f"{index}.{field.name}"] = tensor.data if isinstance(tensor, Weight) else tensor
    return found


def fused_from(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The fused tensors, put together with torch.cat from a transformers state dict: another way to the same."""
    found = {
        "embed": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
        "head": state["lm_head.weight"],
    }
    single = {
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "o": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
        "down": "mlp.down_proj.weight",
        "down_bias": "mlp.down_proj.bias",
    }
    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        for field, name in single.items():
            if prefix + name in state:
                found[f"{index}.{field}"] = state[prefix + name]
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if f"{prefix}self_attn.q_proj.{kind}" in state:
                parts = [state[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{index}.qkv{suffix}"] = torch.cat(parts)
            if f"{prefix}mlp.gate_proj.{kind}" in state:
                parts = [state[f"{prefix}mlp.{part}_proj.{kind}"] for part in ("gate", "up")]
                found[f"{index}.gate_up{suffix}"] = torch.cat(parts)
    return found


def assert_same(weights: DecoderWeights, state: dict[str, Tensor]) -> None:
    got, wanted = tensors_of(weights), fused_from(state, len(weights.layers))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].is_contiguous()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_load_as_transformers_loads_them(tmp_path: Path, family: str, shard: str, tied: bool) -> None:
    make_checkpoint(tmp_path, family, max_shard_size=shard, tie_word_embeddings=tied)
    assert (tmp_path / INDEX).exists() == (shard == "20KB")
    checkpoint = resolve(tmp_path, role="target")
    weights = load(checkpoint)
    assert_same(weights, AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    assert (weights.head is weights.embed) == tied


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_of_llama(tmp_path: Path, bias: str) -> None:
    make_checkpoint(tmp_path, "llama2", **{bias: True})
    weights = load(resolve(tmp_path, role="target"))
    assert_same(weights, AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    layer = weights.layers[0]
    assert (layer.qkv_bias is not None) == (layer.o_bias is not None) == (bias == "attention_bias")
    assert (layer.gate_up_bias is not None) == (layer.down_bias is not None) == (bias == "mlp_bias")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_model_gives_the_same_and_stays_as_it_was(family: str) -> None:
    model = make_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    weights = load(resolve(model, role="target"))
    assert_same(weights, before)
    for tensor in tensors_of(weights).values():
        tensor.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.requires_grad for tensor in tensors_of(weights).values())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_are_rounded_once(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=stored)
    checkpoint = resolve(tmp_path, role="target")
    assert checkpoint.spec.dtype is stored
    state = load_file(tmp_path / SINGLE)
    assert_same(load(checkpoint, wanted), {name: tensor.to(wanted) for name, tensor in state.items()})


@pytest.mark.parametrize("family", ["llama2", "llama3"])
def test_release_frees_every_parameter(family: str) -> None:
    model = make_model(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = resolve(model, role="target")
    assert_same(load(checkpoint, release_source=True), state)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(UnsupportedModel, match="released by an earlier release_source"):
        load(checkpoint)


def test_release_of_a_directory_changes_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    before = (tmp_path / SINGLE).read_bytes()
    load(resolve(tmp_path, role="target"), release_source=True)
    assert (tmp_path / SINGLE).read_bytes() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_nbytes_counts_every_parameter_once(family: str) -> None:
    model = make_model(family)
    wanted = sum(parameter.nbytes for parameter in model.parameters())
    weights = load(resolve(model, role="target"))
    assert weights.nbytes() == wanted
    assert load(resolve(model, role="target"), torch.bfloat16).nbytes() == wanted // 2


def test_progress_goes_to_stderr_and_can_be_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama2")
    checkpoint = resolve(tmp_path, role="draft")
    capsys.readouterr()
    load(checkpoint)
    assert capsys.readouterr() == ("", "")
    weights = load_weights(checkpoint, dtype=torch.float32, device=CPU)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading draft" in err
    assert "100%" in err, f"the bar's total is not the {weights.nbytes()} bytes that were loaded"


def rewrite(directory: Path, change: Any, file: str = SINGLE) -> None:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file, metadata={"format": "pt"})


MISFITS: list[tuple[str, Any, type[ValueError], str]] = [
    ("missing", lambda t: t.pop(GATE), CheckpointError, f"{GATE}) missing"),
    ("missing_head", lambda t: t.pop("lm_head.weight"), CheckpointError, "lm_head.weight) missing"),
    ("shape", lambda t: t.update({GATE: t[GATE][:-1].clone()}), CheckpointError, "has shape [79, 48], wanted [80, 48]"),
    ("transposed", lambda t: t.update({GATE: t[GATE].T.contiguous()}), CheckpointError, "has shape [48, 80]"),
    ("fp8", lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), UnsupportedModel, "stored as F8_E4M3"),
    ("int8", lambda t: t.update({GATE: t[GATE].to(torch.int8)}), UnsupportedModel, "stored as I8"),
    ("fp64", lambda t: t.update({GATE: t[GATE].double()}), UnsupportedModel, "stored as F64"),
]


@pytest.mark.parametrize(("change", "kind", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_tensors_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, change: Any, kind: type[ValueError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama2")
    good = resolve(tmp_path, role="target")
    rewrite(tmp_path, change)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated before the check"))
    with pytest.raises(kind) as early:
        resolve(tmp_path, role="target")
    with pytest.raises(kind) as late:  # a file that changed after resolve
        load(good)
    for caught in (early, late):
        assert message in str(caught.value)
        assert str(tmp_path) in str(caught.value)


def test_rewriting_alone_is_not_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for the refusals: the same tensors, saved again, load; and a good load does meet the trap on empty."""
    make_checkpoint(tmp_path, "llama2")
    rewrite(tmp_path, lambda t: None)
    checkpoint = resolve(tmp_path, role="target")
    load(checkpoint)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated before the check"))
    with pytest.raises(pytest.fail.Exception, match="allocated before"):
        load(checkpoint)


@pytest.mark.parametrize(
    "field", ["vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
)
@pytest.mark.parametrize("factor", [2, 100])
def test_a_config_larger_than_its_files_is_refused_before_allocation(
    tmp_path: Path, field: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "mistral", hidden_size=800)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw[field] *= factor
    if field == "num_key_value_heads":
        raw["num_attention_heads"] *= factor
    path.write_text(json.dumps(raw))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated before the check"))
    with pytest.raises(CheckpointError, match=r"has shape|missing"):
        resolve(tmp_path, role="target")


def test_values_beyond_float16_are_refused_not_made_infinite(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2", dtype=torch.bfloat16)
    rewrite(tmp_path, lambda t: t[GATE][0].fill_(1e6))
    checkpoint = resolve(tmp_path, role="target")
    with pytest.raises(CheckpointError, match=f"{GATE} in model.safetensors has values beyond float16"):
        load(checkpoint, torch.float16)
    assert load(checkpoint, torch.bfloat16).layers[0].gate_up.data[0, 0] > 9e5


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    with pytest.raises(UnsupportedOption, match=r"dtype=torch.float64 .* bfloat16, float16 or float32"):
        load(resolve(tmp_path, role="target"), torch.float64)


def test_shapes_follow_the_spec() -> None:
    model = make_model("qwen3", attention_bias=True)
    spec = resolve(model, role="target").spec
    assert tensor_shapes(spec) == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert "lm_head.weight" not in tensor_shapes(replace(spec, tied=True))


def test_planted_bugs_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must fail when parts are fused in the wrong order, or a tensor stays uninitialised."""
    make_checkpoint(tmp_path, "qwen2")
    checkpoint = resolve(tmp_path, role="target")
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    weight = Loader.weight
    monkeypatch.setattr(Loader, "weight", lambda self, *names, **gated: weight(self, *reversed(names), **gated))
    with pytest.raises(AssertionError, match="qkv"):
        assert_same(load(checkpoint), state)
    monkeypatch.undo()
    monkeypatch.setattr(Loader, "_fill_tensor", lambda self, names, fused, *others, **named: fused.fill_(0))
    with pytest.raises(AssertionError):
        assert_same(load(checkpoint), state)
