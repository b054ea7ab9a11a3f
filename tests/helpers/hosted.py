"""Tiny random models of families that have no decoder of their own, and how each differs from the others."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
}
# model_type: class without "ForCausalLM", and what its config needs besides COMMON
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoX", {}),
    "gemma3n_text": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": 101,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    **{name: (kind, GEMMA4) for name, kind in (("gemma4_text", "Gemma4"), ("gemma4_unified_text", "Gemma4Unified"))},
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", {**EXPERTS, "sliding_window": 8}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "stablelm": ("StableLm", {}),
    "phi": ("Phi", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 8, "kv_lora_rank": 8},
            **{
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "num_key_value_heads": 4,
            },
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 24},
        },
    ),
    "diffllama": ("DiffLlama", {}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 24, "do_layer_norm_before": True}),
}
STD = 0.25


def config_of(name: str, **changes: Any) -> Any:
    """The tiny config of a model type."""
    kind, fields = MODELS[name]
    return getattr(transformers, CONFIGS.get(kind, kind + "Config"))(**{**COMMON, **fields, **changes})


CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3n", "Gemma4", "Gemma4Unified")}
CLASSES = {"GPT2": "GPT2LMHeadModel"}


def fill(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Random weights, none at a neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            around = 1.0 if "norm" in label and label.endswith("weight") else 0.0
            parameter.normal_(around, STD, generator=generator)
    return model


def make_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A live model with random weights, none at a neutral value."""
    kind = MODELS[name][0]
    config = config_of(name, **changes)
    model: PreTrainedModel = getattr(transformers, CLASSES.get(kind, kind + "ForCausalLM"))(config)
    fill(model, seed)
    model.config.dtype = dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


LONG: dict[str, Any] = {
    **{"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
    "original_max_position_embeddings": 64,
}
# what cannot be hosted: config class, fields besides COMMON, and why
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "interface": ("BloomConfig", {}, "does not go through transformers' AttentionInterface"),
    "falcon": ("FalconConfig", {"head_dim": None}, "does not go through transformers' AttentionInterface"),
    "recurrent": ("MambaConfig", {}, "keeps recurrent state"),
    "hybrid": ("Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"]}, "keeps recurrent state"),
    "mamba2": (
        "GraniteMoeHybridConfig",
        {
            **{"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
            **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 32},
        },
        "only native families keep a state for each draft",
    ),
    "mask": ("DogeConfig", {}, "layer 'model.layers.0.self_attn.*': the model changes its attention mask"),
    "chunks": (
        "Llama4TextConfig",
        {"num_local_experts": 2, "attention_chunk_size": 16},
        "layer 'model.layers.0.self_attn': its mask .* chunked",
    ),
    "rope": (
        "StableLmConfig",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **LONG}},
        "rope_type='longrope'",
    ),
    "encoder": ("T5Config", {}, "encoder-decoder"),
    "vision": ("PaliGemmaConfig", {}, r"vision_config, and its language model \(gemma\) .*not causal"),
    "vision and chunks": (
        "Llama4Config",
        {},
        r"vision_config, and its language model \(llama4_text\) cannot be hosted by itself either: .*chunked",
    ),
    "no_causal": ("DistilBertConfig", {}, "no causal language model"),
}


def refused_config(name: str) -> tuple[Any, str]:
    """The config, and the reason as a regular expression."""
    kind, fields, reason = REFUSED[name]
    own = name in ("vision", "vision and chunks", "no_causal")
    given = {} if own else {name: value for name, value in {**COMMON, **fields}.items() if value is not None}
    return getattr(transformers, kind)(**given), reason
