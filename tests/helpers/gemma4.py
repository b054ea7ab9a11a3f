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


def make_assistant(target: PreTrainedModel, *, centroids: int = 16, seed: int = 3, **changes: Any) -> PreTrainedModel:
    """A live assistant for a target of `make_gemma4`; centroids: 0 for one that scores all ids."""
    own: Any = target.config
    heads = {layer: own.per_layer_config[layer] for layer in (0, 2)}
    sizes = {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "layer_types": TYPES, "sliding_window": own.sliding_window},
        **{"num_key_value_heads": heads[0].num_key_value_heads, "head_dim": heads[0].head_dim},
        **{"num_global_key_value_heads": heads[2].num_key_value_heads, "global_head_dim": heads[2].head_dim},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "attention_k_eq_v": True},
        "max_position_embeddings": own.max_position_embeddings,
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**{**sizes, **changes}),
        backbone_hidden_size=own.hidden_size,
        use_ordered_embeddings=bool(centroids),
        num_centroids=centroids or 16,
        centroid_intermediate_top_k=5,
    )
    model: PreTrainedModel = transformers.Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(VOCAB, generator=generator))
            elif "rotary" not in name and "embed_scale" not in name:
                around_one = "norm" in name or name.endswith("layer_scalar")
                tensor.normal_(1.0 if around_one else 0.0, 0.3, generator=generator)
    return model


def write_assistant(path: Path, target: PreTrainedModel, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Writes an assistant by the names that Google publishes."""
    path.mkdir(parents=True, exist_ok=True)
    model = make_assistant(target, **options)
    whole: Any = model.config
    fields = whole.to_dict()
    text = fields["text_config"]
    for own in list(text.pop("per_layer_config", {}).values())[:1]:
        text |= {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
    fields |= {"architectures": ["Gemma4AssistantForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(fields, indent=2))
    stored = {
        name: value.detach().to(dtype if value.is_floating_point() else value.dtype).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
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
