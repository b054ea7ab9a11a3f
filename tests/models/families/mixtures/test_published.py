"""Configs of mixtures with the fields that publishers write, sizes made small: each loads strictly and in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.families import decoder, logits_of
from tests.models.test_published_shapes import ALL, published

COMMON = {
    **ALL,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_scaling": None,
    "attention_dropout": 0.0,
}
ROUTER = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
QWEN = {
    **{**COMMON, **ROUTER, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 24},
    **{"use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_key_value_heads": 2},
    **{"num_experts": 8, "eos_token_id": 3, "max_window_layers": 2, "num_experts_per_tok": 4},
}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **{**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16},
        **{"attention_bias": False, "norm_topk_prob": True, "sliding_window": None, "max_position_embeddings": 40960},
    },
    "qwen3-coder-30b-a3b": {
        **{**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16},
        **{"attention_bias": False, "norm_topk_prob": True, "sliding_window": None, "max_position_embeddings": 262144},
        **{"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "router_aux_loss_coef": 0.0},
    },
    "qwen1.5-moe": {
        **{**QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "norm_topk_prob": False},
        **{"shared_expert_intermediate_size": 40, "sliding_window": 32768, "max_position_embeddings": 8192},
    },
    "mixtral-8x7b": {
        **{**COMMON, **ROUTER, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rms_norm_eps": 1e-5},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2, "rope_theta": 1000000.0},
        **{"sliding_window": None, "max_position_embeddings": 32768, "eos_token_id": 2},
    },
    "olmoe": {
        **{**COMMON, **ROUTER, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "rms_norm_eps": 1e-5},
        **{"clip_qkv": None, "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 4, "pad_token_id": 1},
        **{"attention_bias": False, "rope_theta": 10000.0, "num_key_value_heads": 4, "eos_token_id": 50},
        **{"max_position_embeddings": 4096},
    },
    "glm-4.5-air": {
        **{**COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "rms_norm_eps": 1e-5},
        **{"attention_bias": True, "head_dim": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
        **{"norm_topk_prob": True, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "use_qk_norm": False},
        **{"rope_theta": 1000000, "routed_scaling_factor": 1.0, "eos_token_id": [4, 5], "pad_token_id": 4},
        **{"max_position_embeddings": 131072, "num_key_value_heads": 2},
    },
    "gpt-oss": {
        **{**COMMON, **ROUTER, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5},
        **{"attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 8},
        **{"head_dim": 16, "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"]},
        **{"rope_scaling": {**YARN, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000, "pad_token_id": 5},
        **{"sliding_window": 128, "swiglu_limit": 7.0, "eos_token_id": 6, "max_position_embeddings": 131072},
        **{"num_key_value_heads": 2},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_loads_in_silence_and_whole(tmp_path: Path, shape: str) -> None:
    directory = published(tmp_path / "model", SHAPES[shape])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpoint = resolve(directory, role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    held = sum(each.nbytes for name, each in model.state_dict().items())
    assert weights.nbytes() == held
    ids = torch.arange(5, 30)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    # fp32 sums in another order
    torch.testing.assert_close(logits_of(decoder(checkpoint.native, weights), ids), expected, rtol=1e-4, atol=1e-5)
    assert resolve(model, role="target").native.plans == checkpoint.native.plans
