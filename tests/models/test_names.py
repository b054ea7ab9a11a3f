"""Tensors under other names, tied heads and leftovers: what is loaded is what transformers loads of the same files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.parameter_names import COMPARED_ROWS, RenamedTensors
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.updates import GivenTensors
from fastspec.models.layer_table import EMBED, HEAD, DecoderWeights
from tests.helpers.checkpoints import edit, make_checkpoint, make_model, refusal

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def rewritten(directory: Path, family: str, change: Change, file: str = SINGLE, **config: object) -> Path:
    if not directory.is_dir():
        make_checkpoint(directory, family, **config)  # type: ignore[arg-type]
    tensors = load_file(directory / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file, {"format": "pt"})
    return directory


def loaded(source: object) -> DecoderWeights:
    checkpoint = resolve(source, role="target")  # type: ignore[arg-type]
    return load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)


def assert_as_transformers(weights: DecoderWeights, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(weights.embed.data, model.model.embed_tokens.weight)
    assert torch.equal(weights.head.data, model.lm_head.weight)
    assert (weights.head is weights.embed) == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert torch.equal(weights.norm, model.model.norm.weight)
    for mine, theirs in zip(weights.layers, model.model.layers, strict=True):
        parts = [theirs.self_attn.q_proj.weight, theirs.self_attn.k_proj.weight, theirs.self_attn.v_proj.weight]
        assert torch.equal(mine.qkv.data, torch.cat(parts))
        assert torch.equal(mine.down.data, theirs.mlp.down_proj.weight)


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def move(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def inv_freq(tensors: dict[str, Tensor]) -> None:
    names = ["model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2))]
    tensors.update({name: torch.full((7,), 3, dtype=torch.int64) for name in names})


RENAMED: dict[str, tuple[str, Change]] = {
    "only the head of a tied pair": ("llama3", move(EMBED, HEAD)),
    "the head beside its tied embedding": ("llama3", lambda t: t.update({HEAD: t[EMBED].clone()})),
    "no prefix": ("llama2", without_prefix),
    "no prefix, tied, only the head": ("qwen2", lambda t: (without_prefix(t), move("embed_tokens.weight", HEAD)(t))),
    "a prefix before the head": ("qwen3", move(HEAD, "model." + HEAD)),
    "rotary buffers of old checkpoints": ("llama2", inv_freq),
}


@pytest.mark.parametrize(("family", "change"), RENAMED.values(), ids=RENAMED)
def test_published_names_load_without_a_word(tmp_path: Path, family: str, change: Change) -> None:
    directory = rewritten(tmp_path / "model", family, change)
    assert_as_transformers(loaded(directory), directory)


OTHERS = {
    "any": "model.extra",
    "a layer more": "model.layers.2.mlp.up_proj.weight",
    "a bias": "model.layers.0.self_attn.q_proj.bias",
    "a value head": "v_head.summary.weight",
    "an old mask": "model.layers.0.self_attn.masked_bias",
}


@pytest.mark.parametrize("name", OTHERS.values(), ids=OTHERS)
def test_leftovers_are_left_out_and_named(tmp_path: Path, name: str) -> None:
    directory = rewritten(tmp_path / "model", "llama2", lambda t: t.update({name: torch.ones(48, dtype=torch.int8)}))
    with pytest.warns(UserWarning, match=rf"^target: .*: 1 tensor\(s\) \({name}\) not used: .* with 2 layers"):
        weights = loaded(directory)
    assert_as_transformers(weights, directory)


def test_fewer_layers_in_the_config_are_the_first_ones(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    edit(directory / "config.json", num_hidden_layers=2, layer_types=None)
    with pytest.warns(UserWarning, match=r"model\.layers\.2\.\S+, .* and 8 more\) not used"):
        weights = loaded(directory)
    assert len(weights.layers) == 2
    assert_as_transformers(weights, directory)


def test_a_shard_may_hold_leftovers_that_the_index_does_not_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", max_shard_size="60KB")
    file = sorted(directory.glob("*.safetensors"))[0].name
    rewritten(directory, "llama2", lambda t: t.update({"model.extra": torch.ones(2)}), file)
    with pytest.warns(UserWarning, match=r"\(model\.extra\) not used"):
        weights = loaded(directory)
    assert_as_transformers(weights, directory)


def test_an_index_may_name_rotary_buffers_that_are_gone(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", max_shard_size="60KB")
    index = json.loads((directory / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = file
    (directory / INDEX).write_text(json.dumps(index))
    assert_as_transformers(loaded(directory), directory)


# Heads


@pytest.mark.parametrize("row", [0, 100, COMPARED_ROWS, 2 * COMPARED_ROWS + 2])
def test_another_head_beside_a_tied_embedding_is_used_as_it_is(tmp_path: Path, row: int) -> None:
    size = {"vocab_size": max(101, row + 1)}
    directory = make_checkpoint(tmp_path / "model", "llama3", **size)
    rewritten(directory, "llama3", lambda t: t.update({HEAD: t[EMBED].clone()}))
    rewritten(directory, "llama3", lambda t: t[HEAD][row, 5].add_(1.0))
    with pytest.warns(UserWarning, match=r"^target: .* ties the head .* but another lm_head\.weight is stored"):
        checkpoint = resolve(directory, role="target")
    assert not checkpoint.spec.tied, "memory for both must be planned"
    with pytest.warns(UserWarning, match="another"):
        weights = loaded(directory)
    assert_as_transformers(weights, directory)


@pytest.mark.parametrize("other", [torch.float32, torch.float16], ids=str)
def test_a_head_of_the_same_values_in_another_dtype_is_the_embedding(tmp_path: Path, other: torch.dtype) -> None:
    def head(tensors: dict[str, Tensor]) -> None:
        tensors[EMBED].mul_(256).round_().div_(256).clamp_(-0.5, 0.5)  # values that each of the dtypes holds
        tensors[HEAD] = tensors[EMBED].to(other)

    directory = rewritten(tmp_path / "model", "llama3", head, dtype=torch.bfloat16)
    assert_as_transformers(loaded(directory), directory)


def test_a_stored_head_must_have_the_embeddings_shape(tmp_path: Path) -> None:
    directory = rewritten(tmp_path / "model", "llama3", lambda t: t.update({HEAD: torch.ones(3, 64)}))
    assert "lm_head.weight in model.safetensors has shape [3, 64], wanted [101, 64]" in refusal(directory)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3"])
def test_without_a_head_an_untied_config_says_what_to_set(tmp_path: Path, family: str, named: bool) -> None:
    directory = make_checkpoint(tmp_path / "model", family, tie_word_embeddings=False)
    rewritten(directory, family, lambda t: t.pop(HEAD))
    raw = json.loads((directory / "config.json").read_text())
    if not named:
        del raw["tie_word_embeddings"]
        (directory / "config.json").write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is not model.model.embed_tokens.weight, "transformers fills it at random"
    message = refusal(directory)
    assert "(lm_head.weight) missing" in message
    assert "set tie_word_embeddings to true in config.json" in message
    edit(directory / "config.json", tie_word_embeddings=True)
    assert_as_transformers(loaded(directory), directory)


def test_an_untied_head_is_not_taken_for_a_missing_embedding(tmp_path: Path) -> None:
    directory = rewritten(tmp_path / "model", "llama2", lambda t: t.pop(EMBED))
    assert "(model.embed_tokens.weight) missing" in refusal(directory)


def test_a_live_model_keeps_its_loose_head() -> None:
    model = make_model("llama3")
    assert loaded(model).head is not None
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1.0)
    weights = loaded(model)
    assert torch.equal(weights.head.data, model.lm_head.weight)
    assert torch.equal(weights.embed.data, model.model.embed_tokens.weight)


def test_a_live_head_of_the_same_values_is_tied_and_released() -> None:
    model = make_model("llama3")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    checkpoint = resolve(model, role="target")
    assert checkpoint.spec.tied
    weights = load_weights(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False, release_source=True
    )
    assert weights.head is weights.embed
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# Which configs say "quantised"


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"quant_method": None},
        {"quant_method": None, "load_in_4bit": False, "load_in_8bit": False},
        {"quant_method": None, "desc_act": False},
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False, "bnb_4bit_quant_type": "fp4"},
    ],
    ids=repr,
)
def test_what_asks_for_no_quantisation_is_absent(tmp_path: Path, field: str, value: object) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2")
    plain = loaded(directory)
    edit(directory / "config.json", **{field: value})
    assert torch.equal(loaded(directory).layers[1].qkv.data, plain.layers[1].qkv.data)
    model = make_model("llama2")
    model.config.quantization_config = value
    resolve(model, role="target")


@pytest.mark.parametrize(
    "value",
    [
        {"quant_method": "nosuch"},
        {"bits": 4},
        {"quant_method": None, "load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True},
        {"quant_method": "gptq", "load_in_4bit": False, "load_in_8bit": False},
        {"quant_method": "bitsandbytes"},
        [],
        "",
    ],
    ids=repr,
)
def test_what_may_ask_for_it_is_refused(tmp_path: Path, value: object) -> None:
    from fastspec.errors import CheckpointError, UnsupportedModel

    directory = make_checkpoint(tmp_path / "model", "llama2")
    edit(directory / "config.json", quantization_config=value)
    said = refusal(directory, (CheckpointError, UnsupportedModel))
    assert "quantization_config" in said


def test_null_lists_and_objects_are_absent(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2")
    spec = resolve(directory, role="target").spec
    absent = dict.fromkeys(
        ["architectures", "auto_map", "rope_scaling", "layer_types", "per_layer_config", "torch_dtype", "head_dim"]
    )
    edit(directory / "config.json", **absent, num_key_value_heads=None, sliding_window=None)
    assert resolve(directory, role="target").spec == spec
    edit(directory / "config.json", architectures=[], auto_map={}, rope_scaling={})
    assert resolve(directory, role="target").spec == spec


def test_properties_under_new_names_are_collected_once() -> None:
    given = GivenTensors([("b", torch.zeros(2, 3)), ("a", torch.zeros(4))])
    renamed = RenamedTensors(given, {"x": "b"})
    assert dict(renamed.infos()) == {"x": given.infos()["b"]}
    assert renamed.infos() is renamed.infos()
    assert given.infos() is given.infos()
