"""Configs with the fields of published checkpoints, their sizes made small: each loads strictly and in silence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from tests.helpers.checkpoints import write_tokenizer

ALL: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**ALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "eos_token_id": 2}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
QWEN2 = {
    **{**ALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "eos_token_id": 3},
    **{"attention_dropout": 0.0, "num_key_value_heads": 2, "max_window_layers": 2, "rope_theta": 1000000.0},
    **{"use_sliding_window": False, "torch_dtype": "bfloat16", "tie_word_embeddings": False},
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "attention_bias": False}
QWEN3 = {**QWEN3, "rope_scaling": None, "sliding_window": None, "max_position_embeddings": 40960}
OLD = {"tie_word_embeddings": False, "torch_dtype": "float16", "rope_scaling": None, "pretraining_tp": 1}
LLAMA3 = {
    **{"rope_theta": 500000.0, "torch_dtype": "bfloat16", "num_key_value_heads": 2, "attention_bias": False},
    **{"max_position_embeddings": 8192, "attention_dropout": 0.0, "pretraining_tp": 1, "tie_word_embeddings": False},
}
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_scaling(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {**SCALED, "factor": factor, "rope_type": "llama3"}, "max_position_embeddings": 131072}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-1": {**LLAMA, "max_sequence_length": 2048, "pad_token_id": -1, "torch_dtype": "float16"},
    "llama-2": {**LLAMA, **OLD, "max_position_embeddings": 4096, "num_key_value_heads": 4},
    "llama-2-70b": {**LLAMA, **OLD, "max_position_embeddings": 4096, "num_key_value_heads": 1},
    "codellama": {**LLAMA, "rope_theta": 1000000, "max_position_embeddings": 16384, "torch_dtype": "bfloat16"},
    "vicuna": {**LLAMA, **OLD, "pad_token_id": 0, "transformers_version": "4.31.0"},
    "tinyllama": {**LLAMA, **OLD, "num_key_value_heads": 2, "attention_bias": False, "rope_theta": 10000.0},
    "yi": {**LLAMA, **OLD, "num_key_value_heads": 1, "rope_theta": 5000000.0, "pad_token_id": 0},
    "llama-3": {**LLAMA, **LLAMA3},
    "llama-3.1": {**LLAMA, **LLAMA3, **llama3_scaling(8.0), "eos_token_id": [3, 4, 5], "mlp_bias": False},
    "llama-3.2": {**LLAMA, **LLAMA3, **llama3_scaling(32.0), "tie_word_embeddings": True, "head_dim": 8},
    "r1-distill-llama": {**LLAMA, **LLAMA3, **llama3_scaling(8.0), "mlp_bias": False, "transformers_version": "4.47"},
    "smollm2": {
        **{**LLAMA, "tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False},
        **{"num_key_value_heads": 1, "rope_theta": 100000, "transformers.js_config": {"dtype": "q4"}},
        **{"torch_dtype": "bfloat16", "pad_token_id": 2, "max_position_embeddings": 8192, "num_attention_heads": 2},
    },
    "no defaults written": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral-0.1": {**MISTRAL, "sliding_window": 4096, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "mistral-0.2": {**MISTRAL, "sliding_window": None, "rope_theta": 1000000.0, "attention_dropout": 0.0},
    "mistral-0.3": {**MISTRAL, "sliding_window": None, "max_position_embeddings": 32768, "tie_word_embeddings": False},
    "mistral-nemo": {**MISTRAL, "sliding_window": None, "head_dim": 16, "max_position_embeddings": 1024000},
    "zephyr": {**MISTRAL, "sliding_window": 4096, "pad_token_id": 2, "dtype": "bfloat16"},
    "qwen2": {**QWEN2, "sliding_window": 131072, "max_position_embeddings": 131072},
    "qwen2-tied": {**QWEN2, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False},
    "qwen2.5": {**QWEN2, "sliding_window": None, "max_position_embeddings": 32768, "pad_token_id": 3},
    "qwen2.5-bos": {
        **QWEN2,
        "sliding_window": 4096,
        "use_mrope": False,
        "bos_token_id": 4,
        "transformers_version": "4.44",
    },
    "qwen2 with windows": {**QWEN2, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True, "max_window_layers": 28},
    "qwen3-embedding": {**QWEN3, "tie_word_embeddings": True},
}


def published(directory: Path, config: dict[str, Any], *, prefix: bool = True) -> Path:
    """A checkpoint of random weights beside `config` as its publisher wrote it."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**SMALL, **config}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).to(torch.bfloat16)
    if model.generation_config.pad_token_id == -1:  # "none" in oldest files; older transformers do not save it
        model.generation_config.pad_token_id = None
    model.save_pretrained(directory / "saved")
    tensors = load_file(directory / "saved" / "model.safetensors")
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_loads_in_silence_and_whole(tmp_path: Path, shape: str) -> None:
    directory = published(tmp_path / "model", SHAPES[shape], prefix=shape != "qwen3-embedding")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint = resolve(directory, role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert weights.nbytes() == sum(parameter.nbytes for parameter in model.parameters())
    assert torch.equal(weights.head.data, model.lm_head.weight)
    for mine, theirs in zip(weights.layers, model.model.layers, strict=True):
        assert torch.equal(mine.o.data, theirs.self_attn.o_proj.weight)
        assert torch.equal(mine.gate_up.data, torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]))
    # the live model of the same files is the same to us
    live = resolve(model, role="target").spec
    spec = checkpoint.spec
    assert (live.rope, live.plans, live.tied, live.rms_eps) == (spec.rope, spec.plans, spec.tied, spec.rms_eps)
    assert checkpoint.generation_config is not None
    settings = model.generation_config.to_dict()
    settings["pad_token_id"] = None if settings["pad_token_id"] == -1 else settings["pad_token_id"]
    assert checkpoint.generation_config.to_dict() == settings


def test_there_are_many_of_them() -> None:
    assert len(SHAPES) == 26
    assert {shape["model_type"] for shape in SHAPES.values()} == {"llama", "mistral", "qwen2", "qwen3"}


def test_embeddings_may_have_more_rows_than_the_tokenizer_has_ids(tmp_path: Path) -> None:
    directory = published(tmp_path / "model", SHAPES["qwen3-tied"])
    write_tokenizer(directory, [f"w{i}" for i in range(90)])
    checkpoint = resolve(directory, role="target")
    assert checkpoint.spec.vocab_size == 96
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert len(tokenizer) == 90
