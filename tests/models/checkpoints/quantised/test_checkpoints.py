"""Quantised checkpoints, as their tools write them: every value is the one that was meant, and so is the text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fastspec import CheckpointError, FastSpecGenerator, UnsupportedModel
from fastspec.kernels.common.codes import Codes
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers import quantised
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.damage import damaged_value
from tests.helpers.fuzzing import CI

CPU = torch.device("cpu")
SMALL = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
KINDS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "fp8 channel": lambda: quantised.compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8 tensor": lambda: quantised.compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8 block": lambda: quantised.compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "int8": lambda: quantised.compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int4": lambda: quantised.compressed("pack-quantized", symmetric=True, **INT4),
    "int4 with zeros": lambda: quantised.compressed("pack-quantized", symmetric=False, **INT4),
    "int8 packed": lambda: quantised.compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "nvfp4": lambda: quantised.compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": lambda: quantised.compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "fp8 of DeepSeek": lambda: (FP8, quantised.fp8_blocks),
    "fp8 static": lambda: ({"quant_method": "fp8", "activation_scheme": "static"}, quantised.fp8_tensor),
    "fp8 of transformers": lambda: ({"quant_method": "fp8"}, quantised.fp8_of_transformers),
    "awq": lambda: (AWQ, quantised.awq(32)),
    "gptq": lambda: (GPTQ, quantised.gptq(4, 32, symmetric=True, v2=False)),
    "gptq with zeros": lambda: ({**GPTQ, "sym": False}, quantised.gptq(4, 32, symmetric=False, v2=False)),
    "gptq v2": lambda: (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        quantised.gptq(4, 32, symmetric=False, v2=True),
    ),
    "gptq 8 bits": lambda: ({**GPTQ, "bits": 8}, quantised.gptq(8, 32, symmetric=True, v2=False)),
    "modelopt": lambda: (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.down_proj"]},
        quantised.modelopt_fp4,
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "model"
    return make_checkpoint(path, "llama3", tie_word_embeddings=False, **SMALL)


def made(plain: Path, path: Path, kind: str) -> dict[str, torch.Tensor]:
    settings, pack = KINDS[kind]()
    keep = ("down_proj",) if "ignore" in settings else ()
    return quantised.write(plain, path, settings, pack, keep=keep)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_text_are_those_that_were_meant(plain: Path, tmp_path: Path, kind: str) -> None:
    meant = made(plain, tmp_path / "quantised", kind)
    shutil.copytree(plain, tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    weights = [
        load_weights(resolve(tmp_path / each, role="target"), dtype=torch.float32, device=CPU, progress=False)
        for each in ("quantised", "meant")
    ]
    for one, other in zip(weights[0].layers, weights[1].layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(one, name).unpack(), getattr(other, name).unpack()), name
    original = load_file(plain / "model.safetensors")
    assert not torch.equal(weights[0].layers[0].o.unpack(), original["model.layers.0.self_attn.o_proj.weight"])
    ids = torch.arange(5, 25)[None] % 97
    texts = [
        FastSpecGenerator(tmp_path / each, tmp_path / "quantised", dtype=torch.float32, device="cpu", max_length=128)
        .generate(ids, max_new_tokens=40, num_speculative_tokens=3)
        for each in ("quantised", "meant")
    ]  # fmt: skip
    assert torch.equal(*texts)


def test_what_is_stored_is_told(plain: Path, tmp_path: Path) -> None:
    made(plain, tmp_path / "q", "int4")
    told = FastSpecGenerator(tmp_path / "q", dtype=torch.float32, device="cpu", max_length=64).explain()
    assert "12 matrices in int4 in groups of 32" in told  # down_proj is left as it is
    assert "gives other text" in told


def test_a_config_beside_the_model_is_read(plain: Path, tmp_path: Path) -> None:
    """ModelOpt's own file, where config.json says nothing."""
    meant = quantised.write(plain, tmp_path / "q", {}, quantised.modelopt_fp4)
    algorithm = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
    (tmp_path / "q" / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithm}))
    weights = load_weights(resolve(tmp_path / "q", role="target"), dtype=torch.float32, device=CPU, progress=False)
    assert torch.equal(weights.layers[1].down.unpack(), meant["model.layers.1.mlp.down_proj.weight"])


def test_rules_of_single_modules(plain: Path, tmp_path: Path) -> None:
    """GPTQ's dynamic: one layer left out, one in 8 bits."""
    settings = {**GPTQ, "dynamic": {"-:.*layers\\.0\\..*": {}, "+:.*layers\\.1\\.mlp.*": {"bits": 8}}}

    def pack(weight: torch.Tensor) -> quantised.Written:
        bits = 8 if 160 in weight.shape else 4
        return quantised.gptq(bits, 32, symmetric=True, v2=False)(weight)

    meant = quantised.write(plain, tmp_path / "q", settings, pack, keep=("layers.0.",))
    checkpoint = resolve(tmp_path / "q", role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=False)
    assert "4 matrices in int4 in groups of 32, 3 matrices in int8 in groups of 32" in checkpoint.stored
    assert torch.equal(weights.layers[1].down.unpack(), meant["model.layers.1.mlp.down_proj.weight"])


def test_scales_of_the_cache_are_read_and_said_not_to_be_used(plain: Path, tmp_path: Path) -> None:
    settings, pack = KINDS["int8"]()
    settings["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantised.write(plain, tmp_path / "q", settings, pack, keep=("down_proj",))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for layer in range(2):
        stored[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.25 + layer)
        stored[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.5])
    save_file(stored, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="K and V stay in 16 bits") as said:
        checkpoint = resolve(tmp_path / "q", role="target")
    assert len(said) == 1
    assert checkpoint.cache_scales == {0: ((0.25,), (0.5,)), 1: ((1.25,), (0.5,))}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "compressed-tensors, AWQ or GPTQ"),
        ({"quant_method": "gguf"}, "pass the .gguf file itself"),
        ({"quant_method": "hqq", "nbits": 4}, "compressed-tensors"),
        ({"quant_method": "exl3", "bits": 4}, "AWQ"),
        ({"quant_method": "torchao"}, "compressed-tensors"),
        ({"quant_method": "something"}, "supported are"),
        ({**GPTQ, "desc_act": True}, "desc_act=false"),
        ({**GPTQ, "bits": 3}, "wanted 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'gptq'"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "regular expression"),
        ({**GPTQ, "group_size": 0}, "whole number"),
        ({**AWQ, "version": "gemv"}, "'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**FP8, "weight_block_size": [128]}, "rows and columns"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'NVFP4'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "wanted an object"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized",
             "config_groups": {"a": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}}},
            "order of activations",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
             "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}},
            "format",
        ),
    ],
)  # fmt: skip
def test_other_ways_are_refused_by_name(plain: Path, tmp_path: Path, said: dict[str, Any], wanted: str) -> None:
    shutil.copytree(plain, tmp_path / "q")
    edit(tmp_path / "q" / "config.json", quantization_config=said)
    with pytest.raises(UnsupportedModel, match=r"not supported|wanted") as refused:
        resolve(tmp_path / "q", role="draft")
    assert wanted in str(refused.value)
    assert "draft: " in str(refused.value)


DAMAGE: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scale": ("int4", "weight_scale", lambda scale: None, "missing"),
    "no scale of fp8": ("fp8 channel", "weight_scale", lambda scale: None, "missing"),
    "scale of other shape": ("int4", "weight_scale", lambda scale: scale[:, :1], "wanted F32"),
    "codes of other dtype": ("int8", "weight", lambda codes: codes.float(), "wanted I8"),
    "codes of other shape": ("awq", "qweight", lambda codes: codes[:, :2], "wanted I32"),
    "infinite scale": ("int4", "weight_scale", lambda scale: scale / 0, "not finite"),
    "other shape said": ("int4", "weight_shape", lambda shape: shape + 1, "weight_shape says"),
    "order of activations": ("gptq", "g_idx", lambda order: order.flip(0), "act-order"),
    "8 bits with zeros": ("gptq 8 bits", "qzeros", lambda zeros: zeros + 1, "symmetric"),
    "fp8 NaN": ("fp8 channel", "weight", lambda codes: torch.full_like(codes, torch.nan), "NaN"),
    "left out": ("int4", "weight_packed", lambda codes: codes, "leave it out"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parts_are_refused_in_words(plain: Path, tmp_path: Path, damage: str) -> None:
    kind, part, change, wanted = DAMAGE[damage]
    made(plain, tmp_path / "q", kind)
    file, name = tmp_path / "q" / "model.safetensors", f"model.layers.1.mlp.up_proj.{part}"
    stored = load_file(file)
    changed = change(stored.pop(name))
    save_file(stored | ({} if changed is None else {name: changed.contiguous()}), file, metadata={"format": "pt"})
    if damage == "left out":
        config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
        edit(tmp_path / "q" / "config.json", quantization_config={**config, "ignore": ["re:.*up_proj"]})
    with pytest.raises((CheckpointError, UnsupportedModel), match=wanted) as refused:
        load_weights(resolve(tmp_path / "q", role="target"), dtype=torch.float32, device=CPU)
    assert "up_proj" in str(refused.value)


def test_one_matrix_at_a_time_is_dequantised(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are asked for when their weight is filled, and let go then."""
    made(plain, tmp_path / "q", "int4")
    alive: list[int] = []
    count = [0]
    original = Codes.dequantise_into

    def watched(self: Codes, place: torch.Tensor) -> None:
        count[0] += 1
        alive.append(count[0])
        original(self, place)
        count[0] -= 1

    monkeypatch.setattr(Codes, "dequantise_into", watched)
    load_weights(resolve(tmp_path / "q", role="target"), dtype=torch.bfloat16, device=CPU)
    assert len(alive) == 12
    assert max(alive) == 1


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("written")
    for kind in ("int4", "gptq", "awq", "fp8 of DeepSeek", "modelopt"):
        made(plain, root / kind, kind)
    return {path.name: path for path in root.iterdir()}


@settings(CI, max_examples=200)
@given(data=st.data())
def test_any_change_of_the_settings_is_survived(written: dict[str, Path], data: st.DataObject) -> None:
    """They are read or refused in words, with the field's name."""
    directory = written[data.draw(st.sampled_from(sorted(written)))]
    config, whole = json.loads((directory / "config.json").read_text()), (directory / "config.json").read_bytes()
    said = data.draw(damaged_value(json.dumps(config["quantization_config"]).encode()))
    edit(directory / "config.json", quantization_config=json.loads(said))
    try:
        with suppress(CheckpointError, UnsupportedModel):
            resolve(directory, role="target")
    finally:
        (directory / "config.json").write_bytes(whole)
