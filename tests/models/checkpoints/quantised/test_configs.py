"""What a `quantization_config` may say: closed lists of fields, and names as the checkpoint has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.quantised.configs import quantisation_of
from fastspec.models.checkpoints.quantised.schemes import Float8, Gptq, Int8, PackedInt
from fastspec.models.checkpoints.quantised.tensors import cache_scale_names
from fastspec.models.config import spec_from_config
from fastspec.models.layer_table import tensor_shapes
from tests.helpers.hybrid import config_of

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "observer": "minmax"}
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.4,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "version": "0.20.0",
        "transform_config": {},
        "sparsity_config": {},
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups)},
        **more,
    }


# as published checkpoints have them
PUBLISHED: dict[str, dict[str, Any]] = {
    "compressed-tensors w4a16": compressed({"targets": ["Linear"], "weights": INT4, "input_activations": None}),
    "compressed-tensors fp8": compressed(
        {"targets": ["Linear"], "weights": FP8, "input_activations": ACTIVATIONS, "output_activations": None},
        format="float-quantized",
    ),
    "fp8 blocks": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0",
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    },
    "awq of gptqmodel": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "sym": False,
        "lm_head": False, "pack_dtype": "int32", "checkpoint_format": "gemm", "format": "gemm", "desc_act": False,
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
    },
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True,
        "static_groups": False, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
    },
    "gptq of gptqmodel": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
        "pack_dtype": "int32", "checkpoint_format": "gptq", "dynamic": {"-:.*down_proj": {}, "+:.*q_proj": {"bits": 8}},
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "mse": 0.0}, "rotation": None, "adapter": None,
    },
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"],
        "kv_cache_quant_algo": None, "producer": {"name": "modelopt", "version": "0.33.1"},
    },
}  # fmt: skip


def objects(config: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Places of the objects whose fields are read: not those that only describe how a file was made."""
    yield place
    for name, value in config.items():
        if isinstance(value, dict) and name not in (
            "meta",
            "producer",
            "input_activations",
            "config_groups",
            "dynamic",
        ):
            yield from objects(value, (*place, name))
        elif name in ("config_groups", "dynamic") and isinstance(value, dict):
            for one, inner in value.items():
                yield from objects(inner, (*place, name, one))


PLACES = [
    (kind, place)
    for kind, config in PUBLISHED.items()
    for place in objects(config)
    if not place or place[-1] not in ("transform_config", "sparsity_config")
]


def at(config: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for name in place:
        config = config[name]
    return config


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_are_read(kind: str) -> None:
    found = quantisation_of({"quantization_config": PUBLISHED[kind]})
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") is not None
    fields = [name for name in ("ignore", "modules_to_not_convert") if PUBLISHED[kind].get(name)]
    assert not fields or found.scheme_of("lm_head") is None


@pytest.mark.parametrize("value", [1, True, "x", False, {"a": 1}], ids=str)
@pytest.mark.parametrize(("kind", "place"), PLACES, ids=str)
def test_a_field_that_is_not_known_is_refused_by_name(kind: str, place: tuple[str, ...], value: object) -> None:
    config = copy.deepcopy(PUBLISHED[kind])
    at(config, place)["rotated_by"] = value
    with pytest.raises(UnsupportedModel, match=r"rotated_by=.* is not supported: it is not known whether"):
        quantisation_of({"quantization_config": config})


@pytest.mark.parametrize(("kind", "place"), PLACES, ids=str)
def test_a_field_that_is_null_counts_as_absent(kind: str, place: tuple[str, ...]) -> None:
    config = copy.deepcopy(PUBLISHED[kind])
    at(config, place)["rotated_by"] = None
    assert quantisation_of({"quantization_config": config}) is not None


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("compressed-tensors w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "weights are rotated"),
        ("gptq of gptqmodel", {"rotation": "hadamard"}, "rotation='hadamard' is not supported"),
        ("gptq of gptqmodel", {"format": "gptq_v2"}, "format says 'gptq_v2'"),
        ("gptq", {"sym": "yes"}, "wanted true or false"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt='e5m2'"),
        ("fp8 blocks", {"scale_fmt": "log2"}, "scale_fmt='log2'"),
        ("modelopt", {"pre_quant_scale": True}, "inputs are scaled before each product"),
    ],
)
def test_fields_that_change_values_are_refused(kind: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        quantisation_of({"quantization_config": {**PUBLISHED[kind], **change}})


def scheme(kind: str, module: str = "model.layers.0.mlp.up_proj", **change: Any) -> Any:
    found = quantisation_of({"quantization_config": {**PUBLISHED[kind], **change}})
    assert found is not None
    return found.scheme_of(module)


@pytest.mark.parametrize(
    ("change", "less_one"),
    [
        ({}, True),
        ({"format": "gptq_v2"}, False),
        ({"checkpoint_format": "gptq_v2"}, False),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, False),
        ({"format": "gptq", "checkpoint_format": None}, True),
    ],
    ids=str,
)
def test_the_format_of_gptq_has_two_names(change: dict[str, Any], less_one: bool) -> None:
    assert scheme("gptq", **change).less_one is less_one


@pytest.mark.parametrize("stored", range(16))
@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_of_symmetric_gptq_are_eight_or_refused(stored: int, less_one: bool, symmetric: bool) -> None:
    word = sum(stored << 4 * place for place in range(8))
    word -= (word >> 31) << 32
    tensors = {
        "qweight": torch.zeros(16, 8, dtype=torch.int32),
        "qzeros": torch.full((1, 1), word, dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    way = Gptq(4, None, less_one, symmetric)
    zero = (stored + less_one) % 16
    if symmetric and zero != 8:
        with pytest.raises(ValueError, match="sym is true, and qzeros are not all"):
            way.codes(tensors, (8, 128))
    else:
        codes = way.codes(tensors, (8, 128))
        assert codes.zeros is not None
        assert codes.zeros.unique().tolist() == [zero]


@pytest.mark.parametrize(
    "sizes", [{}, {"group_size": 128}, {"group_size": -1}, {"group_size": 64, "actorder": None}], ids=str
)
def test_a_strategy_that_is_absent_is_the_librarys(sizes: dict[str, Any]) -> None:
    """Inferred from the sizes, as compressed-tensors does when it reads the file."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, **sizes}
    inferred = QuantizationArgs(**weights).strategy
    for said in ({}, {"strategy": None}, {"strategy": inferred}):
        made = scheme(
            "compressed-tensors w4a16", config_groups={"g": {"targets": ["Linear"], "weights": weights | said}}
        )
        assert made == PackedInt(4, sizes.get("group_size") if inferred == "group" else None, True)


OLD, NEW = "language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("stored", [OLD, NEW])
@pytest.mark.parametrize("named", [OLD, NEW, r"re:.*language_model.*", r"re:model.*language.*up_proj$"])
def test_names_of_a_multimodal_checkpoint_are_the_checkpoints(stored: str, named: str) -> None:
    """An exact name or a pattern, of a group or of what is left out; other groups do not take the module."""
    text, others = {"targets": [named], "weights": FP8}, {"targets": [r"re:.*\.layers\..*"], "weights": INT4}
    config = compressed(text, others, ignore=[])
    for group, layout in zip(config["config_groups"].values(), ("float-quantized", "pack-quantized"), strict=True):
        group["format"] = layout
    found = quantisation_of({"quantization_config": config})
    assert found is not None
    assert isinstance(found.scheme_of(stored), Float8)
    assert isinstance(found.scheme_of("model.visual.layers.0.mlp.up_proj"), PackedInt)
    left = quantisation_of(
        {"quantization_config": compressed({"targets": ["Linear"], "weights": INT4}, ignore=[named])}
    )
    assert left is not None
    assert left.scheme_of(stored) is None
    assert left.scheme_of("model.visual.layers.0.mlp.up_proj") is not None
    for kind, field in (("fp8 blocks", "modules_to_not_convert"), ("awq", "modules_to_not_convert")):
        if not named.startswith("re:"):
            assert scheme(kind, stored, **{field: [named]}) is None


@pytest.mark.parametrize("stored", ["layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"])
@pytest.mark.parametrize("named", ["layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"])
def test_a_base_models_names_lack_the_prefix(stored: str, named: str) -> None:
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {"targets": [named], "weights": int8, "format": "int-quantized"}
    assert isinstance(scheme("compressed-tensors w4a16", stored, config_groups={"g": group}), Int8)


def test_scales_of_the_cache_are_the_text_layers_own() -> None:
    parameters = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    ours = [
        "model.layers.0.self_attn.k_scale",
        "layers.1.self_attn.attn.v_scale",
        "model.language_model.layers.1.self_attn.k_proj.k_scale",
        "language_model.model.layers.0.self_attn.qkv_proj.v_scale",
    ]
    others = [
        "mtp.layers.0.self_attn.k_scale",
        "model.mtp.layers.0.self_attn.v_scale",
        "visual.layers.1.self_attn.k_scale",
        "model.visual.layers.1.self_attn.k_proj.k_scale",
        "model.layers.2.self_attn.k_scale",
        "audio_tower.layers.0.self_attn.kv_scale",
    ]
    assert cache_scale_names([*ours, *others], parameters) == ours


def test_scales_of_the_cache_have_the_names_of_the_family() -> None:
    spec = spec_from_config(config_of("nemotron_h"))
    ours, others = ["backbone.layers.2.mixer.k_proj.k_scale"], ["mtp.layers.2.mixer.k_proj.k_scale"]
    assert cache_scale_names([*ours, *others], tensor_shapes(spec), spec) == ours
