"""Live modules: only plain, whole transformers models on one device."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.checkpoints import make_model, refusal


def test_other_modules_are_refused_by_class_name() -> None:
    class PeftModelForCausalLM(nn.Module):
        pass

    assert "class PeftModelForCausalLM is not supported; merge adapters" in refusal(
        PeftModelForCausalLM(), UnsupportedModel
    )
    assert "class DataParallel is not supported" in refusal(nn.DataParallel(make_model("llama2")), UnsupportedModel)
    assert "class LlamaModel is not supported" in refusal(make_model("llama2").model, UnsupportedModel)


def test_a_subclass_may_compute_anything_and_is_refused() -> None:
    model = make_model("llama2")
    model.__class__ = type("ScaledLlama", (type(model),), {})
    assert "class ScaledLlama is not supported" in refusal(model, UnsupportedModel)


def test_quantised_or_adapted_layers_are_refused_by_class_name() -> None:
    class Linear4bit(nn.Linear):
        pass

    model = make_model("llama2")
    model.model.layers[1].mlp.up_proj = Linear4bit(48, 80, bias=False)
    message = refusal(model, UnsupportedModel)
    assert "'model.layers.1.mlp.up_proj'" in message
    assert "Linear4bit" in message


def test_layers_that_the_models_own_module_imports_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' model files import layers of others: Nemotron-H has Zamba2's norm in one version."""
    model = make_model("llama2")
    model.model.layers[1].input_layernorm = MistralRMSNorm(48)
    assert "merge adapters" in refusal(model, UnsupportedModel)
    monkeypatch.setattr(modeling_llama, "MistralRMSNorm", MistralRMSNorm, raising=False)
    assert "where its config puts a LlamaRMSNorm" in refusal(model, UnsupportedModel), "a known layer in a wrong place"


def test_a_quantised_live_config_is_refused() -> None:
    model = make_model("llama2")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantization_config" in refusal(model, UnsupportedModel)


def test_a_module_over_several_devices_is_refused() -> None:
    model = make_model("llama2")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": "cpu"}
    assert "spread over ['0', '1', 'cpu']" in refusal(model, UnsupportedModel)
    model.hf_device_map = {"": "cpu"}
    resolve(model, role="target")
    model.model.layers[1].to("meta")
    assert "spread over ['cpu', 'meta']" in refusal(model, UnsupportedModel)
    assert "on the meta device" in refusal(make_model("llama2").to("meta"), UnsupportedModel)


def test_a_live_model_that_left_its_config_is_refused() -> None:
    model = make_model("llama2")
    model.model.layers.append(model.model.layers[0])
    assert "unexpected" in refusal(model)
    model = make_model("llama2")
    model.lm_head = nn.Linear(48, 98, bias=False)
    assert "lm_head.weight in LlamaForCausalLM has shape [98, 48], wanted [97, 48]" in refusal(model)
    assert "stored as torch.float64" in refusal(make_model("llama2").double(), UnsupportedModel)
