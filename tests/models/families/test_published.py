"""Configs of dense families with the fields of publishers, sizes made small: each loads strictly, in silence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.families import decoder, logits_of
from tests.helpers.hosted import fill

SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 128},
}
ALL: dict[str, Any] = {"initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "bos_token_id": 1}


def made(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **ALL, **fields}


def code_beside(name: str) -> dict[str, Any]:
    """As publishers say that code of theirs lies beside, from before transformers had their classes."""
    classes = {"AutoConfig": f"configuration_x.{name}Config", "AutoModelForCausalLM": f"modeling_x.{name}ForCausalLM"}
    return {"auto_map": {**classes, "AutoTokenizer": "Xenova/gpt-4o"}}


LLAMA3 = {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
GEMMA = {
    **GEMMA,
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
}
PHI = {
    **made("Phi3ForCausalLM", "phi3", rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, hidden_act="silu"),
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False, "tie_word_embeddings": False},
    **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "eos_token_id": 3, "pad_token_id": 3},
}
COHERE = {
    **{"attention_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-5, "pad_token_id": 0, "eos_token_id": 6},
    **{"rope_scaling": None, "torch_dtype": "bfloat16"},
}
GLM4 = made(
    *("Glm4ForCausalLM", "glm4"),
    **{"attention_bias": False, "eos_token_id": [3, 4], "head_dim": 16, "hidden_act": "silu", "pad_token_id": 5},
    **{"max_position_embeddings": 32768, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
)
GRANITE: dict[str, Any] = {
    **{"attention_bias": False, "hidden_act": "silu", "eos_token_id": 0, "pad_token_id": 0, "rms_norm_eps": 1e-5},
    **{"rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    "max_position_embeddings": 131072,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-2-2b": made(
        *("Gemma2ForCausalLM", "gemma2"),
        **{**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"max_position_embeddings": 8192, "rope_theta": 10000.0, "sliding_window": 8, "torch_dtype": "float32"},
        **{"sliding_window_size": 8},
    ),
    "gemma-3-1b-it": made(
        *("Gemma3ForCausalLM", "gemma3_text"),
        **{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 10000},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 8, "sliding_window_pattern": 2},
        **{"max_position_embeddings": 32768, "torch_dtype": "bfloat16"},
    ),
    "rnj-1": made(
        *("Gemma3ForCausalLM", "gemma3_text"),
        **{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 30.0, "rope_local_base_freq": 10000.0},
        **{"rope_scaling": {**YARN, "attn_factor": 1.0, "extrapolation_factor": 1.0, "rope_type": "yarn"}},
        **{"layer_types": ["full_attention"] * 4, "rope_theta": 10000.0, "sliding_window": 32768},
        **{"max_position_embeddings": 32768, "tie_word_embeddings": False, "sliding_window_pattern": 1},
    ),
    "qwen2 stretched while it runs": made(
        *("Qwen2ForCausalLM", "qwen2"),
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False},
        **{"rope_scaling": {"type": "dynamic", "factor": 6.0}, "max_position_embeddings": 32768},
        **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 4},
    ),
    "phi-3-mini-4k": {**PHI, **code_beside("Phi3"), "sliding_window": 8, "num_key_value_heads": 4},
    "phi-4": {**PHI, "sliding_window": None, "max_position_embeddings": 16384, "rope_theta": 250000},
    "phi-4-mini": {
        **{**PHI, **code_beside("Phi3"), "full_attn_mod": 1, "interpolate_factor": 1, "tie_word_embeddings": True},
        **{"partial_rotary_factor": 0.75, "sliding_window": 262144, "max_position_embeddings": 131072},
        "rope_scaling": {"long_factor": [1.0 + i for i in range(6)], "short_factor": [1.0] * 6, "type": "longrope"},
    },
    "olmo-2-7b": made(
        *("Olmo2ForCausalLM", "olmo2"),
        **{"attention_bias": False, "eos_token_id": 5, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5e5},
        **{"max_position_embeddings": 4096, "pad_token_id": 6, "rope_scaling": None, "tie_word_embeddings": False},
    ),
    "olmo-3-7b": made(
        *("Olmo3ForCausalLM", "olmo3"),
        **{"attention_bias": False, "eos_token_id": 5, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5e5},
        **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 8, "pad_token_id": 6},
        **{"rope_scaling": {**YARN, "attention_factor": 1.2079441541679836, "rope_type": "yarn"}},
        **{"max_position_embeddings": 65536, "tie_word_embeddings": False},
    ),
    "glm-4-9b-0414": GLM4,
    "glm-4 stretched as its page says": {
        **GLM4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "glm-4-9b-chat-hf": {
        **GLM4,
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "attention_bias": True,
    },
    "granite-3.3-8b": made(
        *("GraniteForCausalLM", "granite"),
        **{**GRANITE, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
        **{"residual_multiplier": 0.22, "mlp_bias": False},
    ),
    "granite-4.0-1b": made(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        **{**GRANITE, "attention_multiplier": 0.015625, "embedding_multiplier": 12, "logits_scaling": 8},
        **{
            "residual_multiplier": 0.263,
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "init_method": "mup",
        },
        **{"num_experts_per_tok": 0, "position_embedding_type": "rope", "shared_intermediate_size": 80},
        **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_head": 16, "mamba_n_heads": 8},
        **{"normalization_function": "rmsnorm", "router_aux_loss_coef": 0.01, "output_router_logits": False},
    ),
    "smollm3": made(
        *("SmolLM3ForCausalLM", "smollm3"),
        **{"attention_bias": False, "eos_token_id": 2, "hidden_act": "silu", "layer_types": ["full_attention"] * 4},
        **{"max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4},
        **{"no_rope_layers": [1, 1, 1, 0], "pad_token_id": 3, "pretraining_tp": 2, "rms_norm_eps": 1e-6},
        **{"rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False},
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": False},
    ),
    "exaone-4.0-32b": made(
        *("Exaone4ForCausalLM", "exaone4"),
        **{"eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "pad_token_id": 0, "rms_norm_eps": 1e-5},
        **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window_pattern": "LLLG"},
        **{"rope_scaling": {**LLAMA3, "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": 8},
        **{"max_position_embeddings": 131072, "tie_word_embeddings": False},
    ),
    "seed-oss": made(
        *("SeedOssForCausalLM", "seed_oss"),
        **{
            "attention_bias": True,
            "attention_out_bias": False,
            "eos_token_id": 2,
            "head_dim": 24,
            "hidden_act": "silu",
        },
        **{"max_position_embeddings": 524288, "mlp_bias": False, "rms_norm_eps": 1e-6, "residual_dropout": 0.1},
        **{"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False},
    ),
    "hunyuan-7b": made(
        *("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
        **{"attention_bias": False, "attention_head_dim": 16, "cla_share_factor": 2, "dense_list": [4096, 0]},
        **{"eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "mlp_bias": False, "norm_type": "rms"},
        **{"num_experts": 1, "org_vocab_size": 128, "pad_id": 4, "pad_token_id": 4, "rms_norm_eps": 1e-5},
        **{"rope_theta": 10000.0, "use_qk_norm": True, "use_cla": False, "max_position_embeddings": 32768},
        **{"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"}},
        **{"tie_word_embeddings": False},
    ),
    "starcoder2-3b": made(
        *("Starcoder2ForCausalLM", "starcoder2"),
        **{"attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "residual_dropout": 0.1, "eos_token_id": 0},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "mlp_type": "default"},
        **{"norm_type": "layer_norm", "rope_theta": 999999.4420358813, "sliding_window": 8, "use_bias": True},
        **{"max_position_embeddings": 16384, "scale_attention_softmax_in_fp32": True},
    ),
    "aya-expanse-8b": made(
        *("CohereForCausalLM", "cohere"),
        **{**COHERE, "logit_scale": 0.125, "max_position_embeddings": 8192, "rope_theta": 10000, "use_qk_norm": False},
        **{"model_max_length": 8192},
    ),
    "command-r7b": made(
        *("Cohere2ForCausalLM", "cohere2"),
        **{**COHERE, "head_dim": 16, "logit_scale": 0.25, "layer_switch": 4, "rotary_pct": 1.0, "sliding_window": 8},
        **{"sliding_window_pattern": 4, "order_of_interleaved_layers": "local_attn_first", "rope_theta": 50000},
        **{"position_embedding_type": "rope_gptj", "use_gated_activation": True, "use_parallel_block": True},
        **{"max_position_embeddings": 132096, "cache_implementation": "hybrid"},
    ),
    "ernie-4.5-0.3b": made(
        *("Ernie4_5ForCausalLM", "ernie4_5"),
        **{"eos_token_id": 2, "hidden_act": "silu", "head_dim": 16, "pad_token_id": 0, "rms_norm_eps": 1e-5},
        **{"rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": True, "use_bias": False},
        **{"max_position_embeddings": 131072, "use_cache": False},
    ),
    "helium-1-2b": made(
        *("HeliumForCausalLM", "helium"),
        **{"attention_bias": False, "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "mlp_bias": False},
        **{"max_position_embeddings": 4096, "pad_token_id": 3, "rms_norm_eps": 1e-8, "rope_theta": 20000.0},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_loads_in_silence_and_has_the_logits_of_transformers(tmp_path: Path, shape: str) -> None:
    raw = {**SMALL, **SHAPES[shape]}
    (tmp_path / "config.json").write_text(json.dumps({name: raw[name] for name in raw if name != "auto_map"}))
    config = AutoConfig.from_pretrained(tmp_path)
    model = fill(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval())
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint = resolve(tmp_path, role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    ids = torch.arange(5, 30)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    # fp32 sums in another order; logits of some are factors of hundreds
    torch.testing.assert_close(logits_of(decoder(checkpoint.native, weights), ids), expected, rtol=2e-4, atol=2e-4)
