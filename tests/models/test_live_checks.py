"""A live model whose owner changed what it computes is refused by name, or its own text is what comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize, prune, spectral_norm
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from fastspec import FastSpecGenerator
from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.checkpoints import FAMILIES, make_model, refusal

PROMPT = [1, 5, 9, 11, 3, 7, 20, 30]


def twice(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 2.0


def halve(module: nn.Module, inputs: Any) -> Any:
    return tuple(each * 0.5 for each in inputs)


def doubled(self: nn.Module, *args: Any, **options: Any) -> Any:
    return type(self).forward(self, *args, **options) * 2.0


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


class Logged(nn.Parameter):
    pass


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def set_to(path: str, name: str, value: Any) -> Callable[[PreTrainedModel], Any]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def logged(model: Any) -> None:
    mlp(model).down_proj.weight = Logged(mlp(model).down_proj.weight.detach())


def other_config(model: Any) -> None:
    attention(model).config = type(model.config)(**{**model.config.to_dict(), "rms_norm_eps": 0.5})


def subclassed(model: Any) -> None:
    mlp(model).__class__ = type("LlamaMLP", (modeling_llama.LlamaMLP,), {"__module__": modeling_llama.__name__})


def dropout(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()


MLP, ATTENTION, LAYER = "model.layers.1.mlp", "model.layers.1.self_attn", "model.layers.1"
NORM = "model.layers.1.input_layernorm"
CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "hook": (lambda m: mlp(m).register_forward_hook(twice), (MLP, "forward hook", "twice", "remove()")),
    "hook on the model": (lambda m: m.register_forward_hook(twice), ("the model itself", "twice")),
    "hook of a partial": (lambda m: mlp(m).register_forward_hook(partial(twice)), (MLP, "twice")),
    "hook of an object": (lambda m: mlp(m).register_forward_hook(Double()), (MLP, "test_live_checks.Double")),
    "pre-hook": (lambda m: mlp(m).register_forward_pre_hook(halve), (MLP, "forward pre-hook", "halve")),
    "noise in training": (
        lambda m: m.train().model.embed_tokens.register_forward_hook(neftune_post_forward_hook),
        ("model.embed_tokens", "neftune"),
    ),
    "spectral norm": (lambda m: spectral_norm(mlp(m).up_proj), (MLP + ".up_proj", "SpectralNorm")),
    "pruned": (lambda m: prune.random_unstructured(mlp(m).up_proj, "weight", 0.5), (MLP + ".up_proj", "prune.remove")),
    "parametrized": (
        lambda m: parametrize.register_parametrization(mlp(m).up_proj, "weight", Double(), unsafe=True),
        (MLP + ".up_proj", "Parametrized"),
    ),
    "forward": (
        lambda m: setattr(mlp(m), "forward", MethodType(doubled, mlp(m))),
        (MLP, "method 'forward' replaced by", "doubled"),
    ),
    "forward of the model": (lambda m: setattr(m, "forward", partial(m.forward, use_cache=False)), ("model itself",)),
    "generate": (lambda m: setattr(m, "generate", doubled), ("the model itself", "'generate'")),
    "a method of a norm": (set_to(NORM, "extra_repr", str), (NORM, "'extra_repr'")),
    "a layer": (lambda m: setattr(mlp(m), "down_proj", Double()), (MLP + ".down_proj", "Double")),
    "no norm": (lambda m: setattr(m.model.layers[1], "input_layernorm", nn.Identity()), (NORM, "Identity")),
    "a subclass": (subclassed, (MLP, "config puts a LlamaMLP")),
    "a parameter's class": (logged, (MLP + ".down_proj", "'weight'", "Logged")),
    "eps": (set_to(NORM, "variance_epsilon", 0.1), (NORM, "variance_epsilon=0.1 where the config gives 1e-05")),
    "scaling": (set_to(ATTENTION, "scaling", 1.0), (ATTENTION, "scaling=1.0")),
    "a tensor for a number": (set_to(ATTENTION, "scaling", torch.ones(())), (ATTENTION, "scaling=tensor(1.)")),
    "causal": (set_to(ATTENTION, "is_causal", False), (ATTENTION, "is_causal=False")),
    "head groups": (set_to(ATTENTION, "num_key_value_groups", 2), (ATTENTION, "num_key_value_groups=2")),
    "norm of the embedding": (set_to("model.embed_tokens", "max_norm", 1.0), ("model.embed_tokens", "max_norm=1.0")),
    "config of a layer": (other_config, (ATTENTION, "a config of its own")),
    "dropout": (dropout, ("model.layers.0.self_attn", "attention_dropout=0.1", "model.eval()")),
    "accelerate": (lambda m: setattr(mlp(m), "_hf_hook", object()), (MLP, "accelerate", "remove_hook_from_module")),
    "frequencies of another shape": (
        lambda m: m.model.rotary_emb.register_buffer("inv_freq", torch.ones(5)),
        ("model.rotary_emb", "inv_freq of shape [5]"),
    ),
    "frequencies that are none": (
        lambda m: m.model.rotary_emb.register_buffer("inv_freq", torch.full((6,), torch.nan)),
        ("model.rotary_emb", "finite"),
    ),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_refused_by_name(change: Callable[[Any], Any], said: tuple[str, ...]) -> None:
    model = make_model("llama2")
    change(model)
    message = refusal(model, UnsupportedModel)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("family", "path", "name", "value"),
    [("mistral", "model.norm", "variance_epsilon", 0.1), ("qwen3", ATTENTION + ".q_norm", "variance_epsilon", 0.1)]
    + [(family, ATTENTION, "sliding_window", 2) for family in ("qwen2", "qwen3")],
)
def test_constants_of_every_family_are_compared(family: str, path: str, name: str, value: Any) -> None:
    model = make_model(family)
    setattr(model.get_submodule(path), name, value)
    message = refusal(model, UnsupportedModel)
    assert f"{path!r} has {name}={value} where" in message


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_global_hooks_are_refused(register: Callable[[Any], Any]) -> None:
    def watch(*_: Any) -> None:
        return None

    model = make_model("llama2")
    handle = register(watch)
    try:
        message = refusal(model, UnsupportedModel)
    finally:
        handle.remove()
    assert "global_forward" in message
    assert "watch" in message
    resolve(model, role="target")


def test_a_patched_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama2")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", doubled)
    message = refusal(model, UnsupportedModel)
    assert "'model.layers.0.mlp' has the class LlamaMLP, whose forward is" in message
    assert "doubled" in message


def test_attention_of_ones_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: Any, **__: Any) -> None: ...

    for table, name in ((ALL_ATTENTION_FUNCTIONS, "mine"), (ALL_MASK_ATTENTION_FUNCTIONS, "sdpa")):
        monkeypatch.setitem(table._global_mapping, name, mine)
        model = make_model("llama2")
        resolve(model, role="target") if name == "mine" else None
        model.config._attn_implementation_internal = name
        assert f"implementation {name!r}, which is" in refusal(model, UnsupportedModel)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", sdpa_mask)
    resolve(make_model("llama2"), role="target")


def test_a_hook_that_comes_after_resolve_is_refused_too() -> None:
    model = make_model("llama2")
    checkpoint = resolve(model, role="target")
    mlp(model).register_forward_hook(twice)
    with pytest.raises(UnsupportedModel, match="twice"):
        load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)


def test_a_parameter_that_comes_after_resolve_is_refused_too() -> None:
    model = make_model("llama2")
    checkpoint = resolve(model, role="target")
    attention(model).q_proj.bias = nn.Parameter(torch.ones(48))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias\) unexpected"):
        load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)


# What changes nothing is no reason to refuse


def captures_outputs(model: Any) -> None:
    model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True)
    assert any(part._forward_hooks for part in model.modules()), "transformers installs hooks here"


def wants_gradients(model: Any) -> None:
    model.enable_input_require_grads()
    assert model.model.embed_tokens._forward_hooks


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "outputs were captured": captures_outputs,
    "gradients of inputs": wants_gradients,
    "noise in training, off": lambda m: m.model.embed_tokens.register_forward_hook(neftune_post_forward_hook),
    "backward hook": lambda m: mlp(m).register_full_backward_hook(lambda *_: None),
    "state-dict hook": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "load hook": lambda m: m.register_load_state_dict_pre_hook(lambda *_: None),
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),
    "training without dropout": lambda m: m.train(),
    "frozen": lambda m: m.requires_grad_(False),
    "compiled call": lambda m: m.compile(),
    "compiled forward": lambda m: setattr(m, "forward", torch.compile(m.forward)),
    "forward bound again": lambda m: setattr(m, "forward", m.forward),
    "eager attention": lambda m: m.set_attn_implementation("eager"),
    "attention that is not installed here": lambda m: setattr(
        m.config, "_attn_implementation_internal", "flash_attention_2"
    ),
    "a note": lambda m: setattr(mlp(m), "note", "mine"),
    "the same activation": lambda m: setattr(mlp(m), "act_fn", nn.SiLU()),
    "more rows": lambda m: m.resize_token_embeddings(131),
    "a copied config": lambda m: setattr(m, "config", type(m.config).from_dict(m.config.to_dict())),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_leaves_the_text_alone_is_accepted(family: str, change: Callable[[Any], Any]) -> None:
    model = make_model(family)
    change(model)
    assert resolve(model, role="target").spec.plans


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral"])
def test_a_model_that_was_cut_to_its_first_layers_is_accepted(family: str) -> None:
    model: Any = make_model(family)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert resolve(model, role="draft").spec.num_layers == 1
    assert ours(model) == greedy(model)


# The rotary table of the module is the one that is used


def greedy(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()


def ours(model: Any) -> list[int]:
    gen = FastSpecGenerator(model, max_length=32, max_batch_size=1, device="cpu", dtype="float32", progress=False)
    out = gen.generate([PROMPT], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert isinstance(out, torch.Tensor)
    return out[0, len(PROMPT) :].tolist()


def slower(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.25)


def scaled(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def rounded(model: Any) -> None:
    model.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype is torch.bfloat16
    for parameter in model.parameters():  # so that the text is compared in fp32
        parameter.data = parameter.data.float()


@pytest.mark.parametrize("change", [slower, scaled, rounded])
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_the_text_is_that_of_the_models_own_frequencies(family: str, change: Callable[[Any], Any]) -> None:
    model = make_model(family, seed=3)
    before = resolve(model, role="target").spec
    plain = greedy(model)
    change(model)
    assert resolve(model, role="target").spec.rope != before.rope
    assert ours(model) == greedy(model)
    if change is not rounded:  # whose change may be too small to show in the text
        assert greedy(model) != plain


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_model_has_the_frequencies_of_its_config(family: str) -> None:
    from fastspec.models.config import spec_from_config

    model = make_model(family)
    assert resolve(model, role="target").spec.rope == spec_from_config(model.config).rope
    assert isinstance(model, PreTrainedModel)
    assert LlamaForCausalLM.forward.__module__ == modeling_llama.__name__
