"""Checkpoints of models that read images or sound, too: their text model is read, natively where it can be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.generator import FastSpecGenerator
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.text_parts import TEXT_PARTS, check_whole_class, native_text_part, text_name
from tests.helpers import checkpoints, families, model_table
from tests.helpers.hosted import fill

NAMED = pytest.mark.filterwarnings("ignore:.*not used. they are for images or sound")


def saved(model_type: str, directory: Path) -> Any:
    """A tiny whole model, saved."""
    config = model_table.tiny_config(model_type)
    config.dtype = torch.float32
    model = fill(getattr(transformers, check_whole_class(config))(config).eval())
    model.save_pretrained(directory)
    return model


def texts(directory: Path, prompt: list[int], new: int) -> list[int]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_length": 64, "progress": False}
    with FastSpecGenerator(directory, directory, num_speculative_tokens=2, **options) as gen:
        out = gen.generate([prompt], max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True)
        assert out.stats.acceptance_rate == 1.0
        found: list[int] = out.new_tokens[0]
        return found


def own_text(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize(
    ("model_type", "kind"), [("mistral3", ModelSpec), ("gemma4", ModelSpec), ("gemma4_unified", HostedInfo)]
)
def test_text_is_that_of_the_whole_model(model_type: str, kind: type, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    with pytest.warns(UserWarning, match=r"tensor\(s\) \(.*not used: they are for images or sound"):
        spec = resolve(tmp_path, role="target").spec
    assert isinstance(spec, kind)
    if isinstance(spec, HostedInfo):
        assert "the text model of Gemma4UnifiedForConditionalGeneration, runs as it is" in spec.hosting
    prompt = [3, 5, 7, 9, 11] * 3
    with pytest.warns(UserWarning, match="not used"):
        assert texts(tmp_path, prompt, 16) == own_text(model, prompt, 16)


VISION = {
    **{"depth": 1, "hidden_size": 64, "embed_dim": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
}


def with_vision(model_type: str, directory: Path, expert_width: int = 24) -> Any:
    """A tiny saved model whose rope has three positions for each token."""
    partial = {"partial_rotary_factor": 0.5} if "glm" in model_type else {}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2] if partial else [2, 3, 3], **partial}
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 3, "moe_intermediate_size": expert_width, "max_position_embeddings": 256}
    config: Any = transformers.CONFIG_MAPPING[model_type](text_config={**sizes, "rope_parameters": rope})
    for name, value in VISION.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    config.dtype = config.text_config.dtype = torch.float32
    model = fill(getattr(transformers, FAMILIES[model_type].architecture)(config).eval())
    model.save_pretrained(directory)
    return model


@NAMED
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"])
def test_three_positions_for_each_token_are_one_where_all_is_text(model_type: str, tmp_path: Path) -> None:
    model = with_vision(model_type, tmp_path)
    spec = resolve(tmp_path, role="target").native
    assert spec.rope.kind == "default"
    prompt = [3, 5, 7, 9, 11] * 3
    wanted = own_text(model, prompt, 24)
    assert len(set(wanted)) > 5
    assert texts(tmp_path, prompt, 24) == wanted


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl", "mistral3", "gemma4"])
def test_sizes_of_the_text_model_are_checked_before_transformers_sees_them(model_type: str, tmp_path: Path) -> None:
    """It makes a list of as many layers as a config asks for."""
    raw = {"model_type": model_type, "text_config": {"num_hidden_layers": 5000}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    refused = checkpoints.refusal(tmp_path, CheckpointError)
    assert "text_config: num_hidden_layers=5000, wanted a whole number from 1 to 4096" in refused


@NAMED
@pytest.mark.parametrize("width", [24, 32, 64])  # of 32 and 64 the one stack and the other are square
def test_experts_that_a_publisher_stores_transposed_are_turned_back(width: int, tmp_path: Path) -> None:
    model = with_vision("qwen3_vl_moe", tmp_path, width)
    path, prompt = tmp_path / "model.safetensors", [3, 5, 7, 9, 11] * 3
    tensors = load_file(path)
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert len(experts) == 4
    turned = {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
    save_file({**tensors, **turned}, path, {"format": "pt"})
    assert texts(tmp_path, prompt, 24) == own_text(model, prompt, 24)
    save_file({**tensors, experts[0]: tensors[experts[0]][:, 1:].contiguous()}, path, {"format": "pt"})
    assert f"8 experts of width {width}, hidden_size=64" in checkpoints.refusal(tmp_path, CheckpointError)


@NAMED
def test_transposed_experts_in_fp8_are_turned_back_with_their_scales(tmp_path: Path) -> None:
    with_vision("qwen3_vl_moe", tmp_path / "meant", 48)
    shutil.copytree(tmp_path / "meant", tmp_path / "quantised")
    meant = load_file(tmp_path / "meant" / "model.safetensors")
    stored, generator = dict(meant), torch.Generator().manual_seed(0)
    for name in [each for each in meant if ".mlp.experts." in each]:
        codes = meant[name].transpose(1, 2).to(torch.float8_e4m3fn)
        scales = torch.rand(8, codes.shape[1] // 16, codes.shape[2] // 16, generator=generator) + 0.5
        values = codes.float() * scales.repeat_interleave(16, 1).repeat_interleave(16, 2)
        stored[name], stored[f"{name}_scale_inv"] = codes.contiguous(), scales
        meant[name] = values.transpose(1, 2).contiguous()
    save_file(meant, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    save_file(stored, tmp_path / "quantised" / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    checkpoints.edit(tmp_path / "quantised" / "config.json", quantization_config=settings)
    prompt = [3, 5, 7, 9, 11] * 3
    assert texts(tmp_path / "quantised", prompt, 16) == texts(tmp_path / "meant", prompt, 16)


@NAMED
def test_ministral_3_is_read_under_old_names_out_of_a_mistral3(tmp_path: Path) -> None:
    """As it is published: a text model with yarn and growing queries under the names of the whole."""
    text = families.make_family("ministral3", tie_word_embeddings=False)
    whole = transformers.Mistral3Config(text_config=text.config.to_dict(), tie_word_embeddings=False)
    whole.architectures, whole.dtype = ["Mistral3ForConditionalGeneration"], torch.float32
    whole.save_pretrained(tmp_path)
    tensors = {f"language_model.{name}": value.contiguous() for name, value in text.state_dict().items()}
    save_file({**tensors, "vision_tower.ln.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    spec = resolve(tmp_path, role="target").spec
    assert isinstance(spec, ModelSpec)
    assert spec == resolve(text, role="target").spec
    assert spec.rope.query_beta
    prompt = list(range(5, 30))
    assert texts(tmp_path, prompt, 24) == own_text(text, prompt, 24)


@NAMED
def test_what_is_wrong_is_refused_in_words(tmp_path: Path) -> None:
    saved("mistral3", tmp_path / "native")
    saved("gemma4_unified", tmp_path / "hosted")
    for each in ("native", "hosted"):
        config = tmp_path / each / "config.json"
        named = json.loads(config.read_text())["architectures"]
        checkpoints.edit(config, architectures=["OtherForCausalLM"])
        refused = checkpoints.refusal(tmp_path / each, UnsupportedModel)
        assert "architectures=['OtherForCausalLM'] is not supported, wanted ['" in refused
        checkpoints.edit(config, architectures=named)
    checkpoints.edit(tmp_path / "hosted" / "config.json", quantization_config={"quant_method": "fp8"})
    assert "quantised text parts are read for native families" in checkpoints.refusal(
        tmp_path / "hosted", UnsupportedModel
    )
    stored = load_file(tmp_path / "native" / "model.safetensors")
    del stored["language_model.model.layers.1.mlp.up_proj.weight"]  # transformers saves this type by its old names
    save_file(stored, tmp_path / "native" / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in checkpoints.refusal(tmp_path / "native", CheckpointError)


def test_a_live_whole_model_is_refused_with_what_to_do() -> None:
    config = model_table.tiny_config("gemma4")
    model = transformers.Gemma4ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModel, match="reads more than text; save it and pass the directory"):
        resolve(model, role="target")


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.layers.0.mlp.up_proj.weight", None),
        ("multi_modal_projector.linear.weight", None),
    ],
)
def test_names_of_the_text_model(stored: str, wanted: str | None) -> None:
    assert text_name(stored) == wanted


def test_every_type_is_of_transformers_and_no_family_of_its_own() -> None:
    assert list(TEXT_PARTS) == sorted(set(TEXT_PARTS))
    assert not set(TEXT_PARTS).intersection(FAMILIES)
    assert native_text_part(model_table.tiny_config("gemma4_unified")) is None
