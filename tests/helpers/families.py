"""Tiny random models of the families whose layers are not Llama's, and our decoder over their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.kernels.ops import TORCH_OPS
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import UNTILED, ForwardBatch, Tiling

VOCAB = 128
POSITIONS = 64  # of `decoder`
COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, **MIXED}
# name -> (class of transformers without ForCausalLM, fields): each family with every part that it can have
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            **{**GEMMA, "attention_bias": True, "final_logit_softcapping": 0.3},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.3}),
    "gemma4": (
        "Gemma4",
        {
            **{"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2, "sliding_window": 8},
            **{
                "num_key_value_heads": 4,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "attention_k_eq_v": True,
            },
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "attention_bias": True},
            "final_logit_softcapping": 0.3,
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.75, "sliding_window": 20}),
    "phi3-long": (
        "Phi3",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256},
                **{
                    "short_factor": [1.0, 1.1, 1.2, 1.4, 2.0, 3.0, 4.0, 5.0],
                    "long_factor": [1.0 + i for i in range(8)],
                },
            },
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo3": (
        "Olmo3",
        {
            **MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm4": ("Glm4", {"head_dim": 24}),
    "glm": ("Glm", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            **{"logits_scaling": 0.5, "mlp_bias": True},
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
            **{
                "logits_scaling": 0.5,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "layer_types": ["attention"] * 2,
            },
            **{"shared_intermediate_size": 96, "mamba_n_heads": 4, "position_embedding_type": "rope"},
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    "exaone4": ("Exaone4", MIXED),
    "ministral": ("Ministral", {**MIXED, "head_dim": 24}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4, "factor": 1.0},
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere2": ("Cohere2", {"logit_scale": 0.5, **MIXED}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 8, "norm_topk_prob": True, "head_dim": 24, "num_hidden_layers": 3}
        | {"mlp_only_layers": [2]},
    ),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 80}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 20}),
    "glm4_moe": (
        "Glm4Moe",
        {**EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8, "swiglu_limit": 1.0},
    ),
}
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "gpt_oss")  # of experts
FAMILIES = tuple(CONFIGS)
# which together have every kind of norm, rope, attention and mixture
VARIED = {"gemma2", "gemma4", "phi3-long", "olmo2", "smollm3", "cohere2", "granite4", "qwen2_moe", "gpt_oss"}


def daily() -> list[Any]:
    """Every family as a parameter of a test of something that their layers share. All but `VARIED` are slow."""
    return [pytest.param(each, marks=[] if each in VARIED else pytest.mark.slow) for each in FAMILIES]


def config_of(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The tiny config of one of `FAMILIES`."""
    name, fields = CONFIGS[family]
    kind = getattr(transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4") else f"{name}Config")
    config: transformers.PretrainedConfig = kind(**{**COMMON, **fields, **changes})
    return config


def make_family(family: str, seed: int = 0, std: float = 0.3, **changes: Any) -> PreTrainedModel:
    """A live model on the CPU; no weight is neutral: norms lie around 1 (Gemma 2, 3: around 0), biases around 0."""
    config = config_of(family, **changes)
    model: PreTrainedModel = getattr(transformers, f"{CONFIGS[family][0]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        stored = ("correction_bias", "layer_scalar")  # of routers, and of Gemma 4's layers
        buffers = [pair for pair in model.named_buffers() if pair[0].endswith(stored)]
        for name, parameter in [*model.named_parameters(), *buffers]:
            around_one = "norm" in name and name.endswith("weight") and family not in ("gemma2", "gemma3")
            around_one = around_one or name.endswith("layer_scalar")
            # of Gemma small: its head is the embedding, which would else give back the token that was fed
            deviation = 0.02 if "embed" in name and "gemma" in family else std
            parameter.normal_(1.0 if around_one else 0.0, deviation, generator=generator)
    model.set_attn_implementation("eager")  # which knows every family's softcap
    return model.eval()


def as_configured(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the limit of its config on gates of experts: gpt-oss of older transformers has 7 always."""
    limit = getattr(model.config, "swiglu_limit", None)
    for part in model.modules() if limit is not None else ():
        if hasattr(part, "limit"):
            part.limit = limit
    return model


def decoder(spec: ModelSpec, weights: DecoderWeights, kind: type[Decoder] = Decoder, **options: Any) -> Decoder:
    """Our decoder of one row with room for `POSITIONS`, in torch's ops unless `options` say otherwise."""
    heads = [(kv_heads, dim) for _, kv_heads, dim in spec.attention_shapes]
    cache = PagedKVCache.for_heads(heads, 5, 16, dtype=torch.float32, device=torch.device("cpu"))
    options = {"ops": TORCH_OPS, **options}
    return kind(spec, weights, cache, max_positions=POSITIONS, batch=1, max_queries=8, **options)


@torch.inference_mode()
def logits_of(model: Decoder, ids: Tensor, first: int = 0, tiling: Tiling = UNTILED) -> Tensor:
    """fp32 logits [1, T, V] of ids [1, T] in one pass, the first of them at position `first`."""
    at = torch.arange(first, first + ids.shape[1])[None]
    batch = ForwardBatch(ids, at, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[1, 2, 3, 4]]), 1, tiling)
    return model.logits(model.hidden(batch), tiling)
