"""Tiny random hybrid models, live and as their publishers save them, and our decoder over their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.kernels.ops import TORCH_OPS
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.states import StateCache
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import UNTILED, ForwardBatch, Tiling

VOCAB = 128
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 6, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
}
# Qwen3-Next with a dense layer among those with experts
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {}),
    "next": ("Qwen3Next", {**EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5_moe": ("Qwen3_5Moe", EXPERTS),
}
SMALL: dict[str, Any] = {**SIZES, "head_dim": 16, "num_hidden_layers": 3}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 16}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_GRANITE = {
    **{"attention_multiplier": 0.6, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
    "shared_intermediate_size": 48,
}
_FACTORS = {
    **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.7, "mlp_multipliers": [0.8, 0.6], "key_multiplier": 1.3},
    **{"attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2},
    **{"ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]},
}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
}
# models with other states: class of transformers without ForCausalLM, and fields besides SMALL
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**_CONV, "conv_L_cache": 3, "block_multiple_of": 16}),
    "lfm2_moe": (
        "Lfm2Moe",
        {**_CONV, "conv_L_cache": 4, "conv_bias": True, "num_dense_layers": 1, "moe_intermediate_size": 32}
        | {"num_experts": 6, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5},
    ),
    "lfm3": (
        "Lfm3",
        {
            **{"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 8},
            **{"num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": False},
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {**_MAMBA, **_MIXED, **_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_proj_bias": True},
    ),
    "granite4_moe": (
        "GraniteMoeHybrid",
        {**_MAMBA, **_MIXED, **_GRANITE, "mamba_n_groups": 1, "position_embedding_type": "rope"}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1], "mlp_bias": True, "attention_bias": True}),
    "falcon_h1": (
        "FalconH1",
        {**_MAMBA, **_FACTORS, "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_rms_norm": True},
    ),
    "falcon_h1_plain": ("FalconH1", {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            **{"ssm_state_size": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5},
        },
    ),
    "nemotron_super": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            **{"ssm_state_size": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_latent_size": 40},
            **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5},
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **{"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_key_value_heads": 4},
            **{"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 24, "chunk_size": 16},
            **{"use_shared_attention_adapter": True, "adapter_rank": 12, "use_mem_rope": True},
            "time_step_min": 0.01,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **{
                "attn_layer_period": 3,
                "attn_layer_offset": 1,
                "mamba_d_state": 6,
                "mamba_d_conv": 3,
                "mamba_dt_rank": 5,
            },
            **{"num_experts": 6, "num_experts_per_tok": 2, "mamba_proj_bias": True},
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **_LATENT,
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_expert_group": 1},
            **{"linear_num_heads": 2, "linear_head_dim": 16, "first_k_dense_replace": 1, "topk_group": 1},
        },
    ),
    "ling": (
        "BailingHybrid",
        {
            **_LATENT,
            **{"layer_group_size": 2, "head_dim": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
            **{"n_group": 2, "topk_group": 1, "q_lora_rank": 24, "short_conv_kernel_size": 3},
        },
    ),
}


def config_of(kind: str, **changes: Any) -> Any:
    """The tiny config of one of `KINDS` or `STATES`."""
    if kind in STATES:
        name, own = STATES[kind]
        dropped = ("head_dim", "num_hidden_layers") if kind.startswith("nemotron") else ("head_dim",)
        sizes = {field: value for field, value in SMALL.items() if field not in dropped and "linear" not in field}
        more = {"head_dim": 16} if kind.startswith("nemotron") else {}
        return getattr(transformers, f"{name}Config")(**{**sizes, **more, **own, **changes})
    name, own = KINDS[kind]
    made = getattr(transformers, f"{name}Config" if kind == "next" else f"{name}TextConfig")
    return made(**{**SIZES, **own, **changes})


def make_hybrid(kind: str, seed: int = 0, std: float = 0.3, **changes: Any) -> PreTrainedModel:
    """A live model on the CPU; no weight is neutral: states decay by all rates, and norms lie around their 1."""
    model: PreTrainedModel = getattr(transformers, f"{KINDS[kind][0]}ForCausalLM")(config_of(kind, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("linear_attn.norm" in name), std, generator=generator)
            if name.endswith("A_log"):
                parameter.normal_(-1.0, 1.0, generator=generator)
    return model.eval()


def make_states(kind: str, seed: int = 0, std: float | None = None, **changes: Any) -> PreTrainedModel:
    """A live model of one of `STATES`, as `make_hybrid` makes them. Skips the test where transformers lacks it."""
    std = (0.2 if kind == "zamba2" else 0.3) if std is None else std  # its blocks multiply rounding errors
    name = f"{STATES[kind][0]}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model: PreTrainedModel = getattr(transformers, name)(config_of(kind, **changes))
    generator = torch.Generator().manual_seed(seed)
    corrections = [pair for pair in model.named_buffers() if pair[0].endswith(("correction_bias", "expert_bias"))]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            around_one = ("norm" in name and name.endswith("weight")) or name.endswith(".D")
            parameter.normal_(float(around_one), std, generator=generator)
            if name.endswith("A_log"):
                parameter.normal_(-1.0, 1.0, generator=generator)
    return model.eval()


def save_published(model: PreTrainedModel, directory: Path) -> Path:
    """The text model of Qwen3.5 as it is published: a part of a model that sees images, with a drafter beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    kind = model.config.model_type.removesuffix("_text")
    config = {
        "architectures": [f"{KINDS[kind][0]}ForConditionalGeneration"],
        "model_type": kind,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": model.config.to_dict(),
        "vision_config": {"model_type": f"{kind}_vision", "depth": 1, "hidden_size": 8, "out_hidden_size": 64},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(8)
    tensors["mtp.fc.weight"] = torch.ones(8, 8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def decoder(
    spec: ModelSpec,
    weights: DecoderWeights,
    kind: type[Decoder] = Decoder,
    *,
    rows: int = 1,
    drafts: int = 7,
    **options: Any,
) -> Decoder:
    """Our decoder of some rows with room for 64 positions each."""
    device, heads = torch.device("cpu"), spec.attention_shapes[0][1:]
    dtype = weights.norm.dtype
    states = StateCache.allocate(spec.state_rules, rows, drafts, dtype=dtype, device=device)
    cache = PagedKVCache.allocate(
        len(spec.attending), 1 + 4 * rows, 16, *heads, dtype=dtype, device=device, states=states
    )
    options = {"ops": TORCH_OPS, "max_queries": drafts + 1, **options}
    return kind(spec, weights, cache, max_positions=64, batch=rows, **options)


@torch.inference_mode()
def logits_of(model: Decoder, ids: Tensor, first: int | Tensor = 0, tiling: Tiling = UNTILED) -> Tensor:
    """fp32 logits [B, T, V] of ids [B, T] in one pass, those of row b from position first[b] on."""
    rows = len(ids)
    start = torch.as_tensor(first).expand(rows)
    at = start[:, None] + torch.arange(ids.shape[1])
    tables = 1 + torch.arange(4 * rows).view(rows, 4)
    fed = ForwardBatch(ids, at, torch.ones_like(ids, dtype=torch.bool), tables, 1, tiling, 0, torch.arange(rows))
    return model.logits(model.hidden(fed), tiling)
