"""Random tiny Hugging Face checkpoints of every supported family, with no weight left at a neutral value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fastspec.errors import CheckpointError
from fastspec.models.checkpoints.resolve import resolve

COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}
# Each family once with another head layout: MHA, GQA and MQA, head_dim from hidden_size or on its own.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_key_value_heads": 4},
    "llama3": {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "vocab_size": 103,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "sliding_window": 8,
    },
    "qwen2": {
        "vocab_size": 113,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
CLASSES = {"llama2": "Llama", "llama3": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES = tuple(CONFIGS)


def make_model(
    family: str,
    *,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A live transformers model with random weights on the CPU.

    Matrices are normal with deviation `std`, norm weights lie around 1 and biases around 0 with the same
    deviation, so that leaving out any one of them changes the output.
    """
    config = getattr(transformers, CLASSES[family] + "Config")(**{**COMMON, **CONFIGS[family], **config_overrides})
    model: PreTrainedModel = getattr(transformers, CLASSES[family] + "ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    model.config.dtype = dtype
    model = model.eval()
    for parameter in model.parameters():  # not model.to(dtype): that would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    return model


def make_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Saves `make_model(...)` as safetensors under `path`, in several files if max_shard_size is small."""
    model = make_model(family, seed=seed, std=std, dtype=dtype, **config_overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def write_tokenizer(path: Path, texts: Sequence[str], added: Sequence[str] = ()) -> Path:
    """Writes a word-level tokenizer: id i is texts[i], then the added special tokens with the next ids."""
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=texts[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.save_pretrained(path)
    return path


def edit(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON file."""
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, **fields}))


def refusal(source: Any, kind: type[Exception] | tuple[type[Exception], ...] = CheckpointError, **options: Any) -> str:
    """The message with which resolve refuses a source."""
    with pytest.raises(kind) as caught:
        resolve(source, role="draft", **options)
    assert str(caught.value).startswith("draft: ")
    return str(caught.value)
