"""Tiny models of the sizes of Gemma 4, with random weights, stored by the names that Google publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.families import make_family

VOCAB = 128
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
# of small sizes: layers with inputs of their own, the last of which share keys and have a wide MLP
SMALL: dict[str, Any] = {"attention_k_eq_v": False, "attention_bias": False}
# of large ones: keys are values in global layers
LARGE: dict[str, Any] = {
    **{"attention_bias": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "use_double_wide_mlp": False,
}
SIZES = {"small": SMALL, "large": LARGE, "every part": {}}


def make_gemma4(size: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A live text model. Its head is the embedding, which is small, so that texts are no repeats of one token."""
    return make_family("gemma4", seed=seed, **{"final_logit_softcapping": 30.0, **SIZES[size], **changes})


def write_gemma4(path: Path, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a text model as Google does: as a part of one that also reads images and sound."""
    path.mkdir(parents=True, exist_ok=True)
    text: Any = model.config
    fields = {**text.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    for own in list(fields.pop("per_layer_config", {}).values())[:1]:  # older versions have fields for these
        fields |= {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": fields,
        "tie_word_embeddings": True,
        "dtype": fields["dtype"],
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **{"vision_config": None, "audio_config": None},
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    stored = {
        name.replace("model.", "model.language_model.", 1): value.detach().to(dtype).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    shared = range(text.num_hidden_layers - text.num_kv_shared_layers, text.num_hidden_layers)
    for layer in shared:  # stored although no layer reads them
        stored[f"model.language_model.layers.{layer}.self_attn.k_proj.weight"] = torch.zeros(4, 4, dtype=dtype)
    stored["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(2, dtype=dtype)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


@torch.inference_mode()
def greedy_text(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """Greedy text of transformers, which keeps its cache."""
    ids: Tensor = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    whole: Any = model
    found: list[int] = whole.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return found


def known_version() -> str:
    """The version of transformers, for messages of skipped tests."""
    return f"transformers {transformers.__version__} has no Gemma 4; 5.20 has"
