"""Reads the `quantization_config` of a checkpoint, which says in which layout each quantised matrix is stored.

It does not say which matrices are quantised. The names of the stored tensors show that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, NoReturn

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.quantised.schemes import Awq, Float4, Float8, Gptq, Int8, PackedInt, Scheme
from fastspec.models.config import says_quantised

SchemeOf = Callable[[str], "Scheme | None"]  # name of a module -> layout of its matrix; None: not quantised

UNSUPPORTED: Final[Mapping[str, str]] = {
    "bitsandbytes": "its 4-bit codes are made for training; take a compressed-tensors, AWQ or GPTQ checkpoint",
    "gguf": "pass the .gguf file itself: its path, or owner/name:file.gguf of the Hub",
    "hqq": "take a compressed-tensors, AWQ or GPTQ checkpoint",
    "exl2": "take a compressed-tensors, AWQ or GPTQ checkpoint",
    "exl3": "take a compressed-tensors, AWQ or GPTQ checkpoint",
    "torchao": "its tensors are pickled classes; take a compressed-tensors checkpoint",
    "quanto": "take a compressed-tensors checkpoint",
    "aqlm": "take a compressed-tensors, AWQ or GPTQ checkpoint",
    "mxfp4": "it is supported for the experts of gpt_oss only; take another checkpoint",
}
SUPPORTED: Final = "compressed-tensors, fp8, awq, gptq, modelopt"
# fields that change no value of a matrix, such as the tool that wrote them. A field in none of these lists is refused,
# because it may change values
_OF_ALL: Final = frozenset(
    ["quant_method", "is_quantized", "model_name_or_path", "producer", "provider", "meta", "tokenizer", "dataset"]
)
_FP8: Final = frozenset(["dequantize", "kv_cache_scheme", "kv_cache_quant_algo", "linear_dtype"])
_OF_INT4: Final = {  # fields of AWQ and GPTQ, which one tool writes today
    *("backend", "exllama_config", "use_exllama", "disable_exllama", "pack_dtype", "lm_head", "true_sequential"),
    *("damp_percent", "damp_auto_increment", "static_groups", "mse", "act_group_aware", "quant_log", "device"),
    *("max_input_length", "batch_size", "pad_token_id", "offload_to_disk", "offload_to_disk_path", "sym"),
}
_AWQ: Final = _OF_INT4 | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse", "desc_act", "format", "checkpoint_format"}
_GPTQ: Final = _OF_INT4 | {
    *("model_file_base_name", "block_name_to_quantize", "modules_in_block_to_quantize", "cache_block_outputs"),
    *("module_name_preceding_first_block", "model_seqlen", "use_cuda_fp16", "is_marlin_format"),
}
_COMPRESSED: Final = frozenset(["global_compression_ratio", "kv_cache_scheme", "version"])
_COMPRESSED_GROUP: Final = frozenset(["input_activations", "output_activations"])
_COMPRESSED_WEIGHTS: Final = frozenset(["observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic"])
_MIXED: Final = "MIXED_PRECISION"  # each of `quantized_layers` has an algorithm of its own
_FP8_BLOCKS: Final = ("FP8_PB_WO", "FP8_BLOCK_SCALES")  # two names of one layout
_MODELOPT: Final = frozenset(["kv_cache_quant_algo", "kv_cache_scheme", "config_groups", "has_zero_point"])


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Quantisation settings of a checkpoint.

    Attributes:
        method: `quant_method` of the config.
        scheme_of: function of a module's name in the checkpoint, such as "model.layers.0.mlp.up_proj". Returns the
            layout of its matrix, or None: not quantised.
        cache: True if the config has settings of a quantised KV cache.
        weights: True if the config has settings of quantised matrices.
    """

    method: str
    scheme_of: SchemeOf
    cache: bool = False
    weights: bool = True


def quantisation_of(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Quantisation | None:
    """Reads the quantisation settings of a checkpoint.

    Args:
        config: content of `config.json`.
        modelopt: content of `hf_quant_config.json`, which ModelOpt writes next to it. None: there is no such file.

    Returns:
        The settings. None if there are none.

    Raises:
        UnsupportedModel: an unsupported method or setting. The message names the field, its value, and what to use
            instead.
    """
    named = ("quantization_config", "compression_config")
    field = next((name for name in named if says_quantised(config.get(name))), None)
    if field is None:
        return None if modelopt is None else _modelopt(_Fields("hf_quant_config.json", modelopt).sub("quantization"))
    fields = _Fields(field, config[field])
    method = fields.values.get("quant_method", "compressed-tensors" if "config_groups" in fields.values else None)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(fields)
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "modelopt": _modelopt, "modelopt_fp4": _modelopt}
    readers["modelopt_mixed"] = _modelopt
    # only experts are quantised, and they are recognised by their names
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return Quantisation("mxfp4", lambda module: None, weights=False)
    if not isinstance(method, str) or method not in readers:
        fields.refuse("quant_method", method, UNSUPPORTED.get(str(method), f"supported are {SUPPORTED}"))
    return readers[method](fields)


class _Fields:
    """One JSON object of the settings. Reads and checks its fields.

    Args:
        name: path of the object in the config, for messages.
        values: the object.
    """

    def __init__(self, name: str, values: Any) -> None:
        self.name = name
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{name} is {values!r}, wanted an object with quant_method")
        self.values: Mapping[str, Any] = values

    def sub(self, field: str) -> _Fields:
        """Returns the JSON object that is the value of a field."""
        return _Fields(f"{self.name}.{field}", self.values.get(field))

    def refuse(self, field: str, value: object, wanted: str) -> NoReturn:
        """Raises UnsupportedModel with the field, its value, and the text `wanted`."""
        raise UnsupportedModel(f"{self.name}.{field}={value!r} is not supported: {wanted}")

    def close(self, *known: str, off: Collection[str] = ()) -> None:
        """Refuses an object with unknown fields, unless they are empty.

        Args:
            *known: names of the fields that the caller reads.
            off: names of fields that are ignored, because they change no value of a matrix.
        """
        for field, value in self.values.items():
            if field not in known and field not in off and field not in _OF_ALL and value not in (None, "", [], {}):
                self.refuse(field, value, "it is not known whether it changes values; leave it out if it does not")

    def choice(self, field: str, wanted: tuple[Any, ...], default: Any = None) -> Any:
        """Returns a field's value, which must be one of `wanted`. Returns `default` if it is missing or null."""
        value = self.values.get(field)
        value = default if value is None else value
        if value not in wanted or isinstance(value, bool) != isinstance(wanted[0], bool):
            self.refuse(field, value, "wanted " + " or ".join(repr(each) for each in wanted))
        return value

    def group(self, field: str = "group_size", default: int | None = None) -> int | None:
        """Returns the number of columns that share a scale. None: a whole row. Configs write -1 for a whole row."""
        value = self.values.get(field)
        value = default if value is None else value
        if value == -1:
            return None
        if type(value) is not int or value < 1:
            self.refuse(field, value, "wanted a whole number of columns, or -1 for a whole row")
        return value

    def block(self, field: str) -> tuple[int, int]:
        """Returns (rows, columns) of the blocks that share a scale."""
        value = self.values.get(field)
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            self.refuse(field, value, "wanted two whole numbers, rows and columns")
        return value[0], value[1]

    def names(self, *fields: str) -> tuple[str, ...]:
        """Returns all names in the lists that are the values of these fields. null counts as an empty list."""
        found: list[str] = []
        for field in fields:
            value = self.values.get(field) or []
            if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
                self.refuse(field, value, "wanted a list of names")
            found += value
        return tuple(found)


def _fp8(fields: _Fields) -> Quantisation:
    fields.close(
        *("activation_scheme", "fmt", "scale_fmt", "weight_block_size"),
        *("modules_to_not_convert", "ignored_layers", "ignore"),
        off=_FP8,
    )
    fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.choice("scale_fmt", (None, "ue8m0", "float", "float32"))
    block = None if fields.values.get("weight_block_size") is None else fields.block("weight_block_size")
    ignored = fields.names("modules_to_not_convert", "ignored_layers", "ignore")
    scheme = Float8(block, "weight_scale_inv" if block else "weight_scale")
    return Quantisation("fp8", lambda module: None if _within(module, ignored) else scheme)


def _awq(fields: _Fields) -> Quantisation:
    fields.close(
        *("bits", "w_bit", "zero_point", "version", "group_size", "q_group_size", "modules_to_not_convert"), off=_AWQ
    )
    fields.choice("bits", (4,), fields.values.get("w_bit"))
    fields.choice("zero_point", (True,), True)
    version = str(fields.values.get("version", "gemm")).lower()
    if version != "gemm":
        fields.refuse("version", version, "wanted 'gemm'")
    scheme = Awq(fields.group(default=fields.values.get("q_group_size", 128)))
    ignored = fields.names("modules_to_not_convert")
    return Quantisation("awq", lambda module: None if _within(module, ignored) else scheme)


def _gptq(fields: _Fields) -> Quantisation:
    fields.close("bits", "group_size", "desc_act", "checkpoint_format", "format", "dynamic", off=_GPTQ)
    layout = fields.choice("format", ("gptq", "gptq_v2"), fields.values.get("checkpoint_format") or "gptq")
    if fields.choice("checkpoint_format", ("gptq", "gptq_v2"), layout) != layout:  # two names of one setting
        fields.refuse("checkpoint_format", fields.values["checkpoint_format"], f"format says {layout!r}")
    usual = _gptq_scheme(fields, layout)
    rules = fields.values.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        fields.refuse("dynamic", rules, "wanted an object: pattern of a module's name -> its settings")
    own: list[tuple[str, Scheme | None]] = []
    for pattern, change in rules.items():
        leave, name = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
        _compiled(fields, "dynamic", name)
        change = _Fields(f"{fields.name}.dynamic[{pattern!r}]", change or {})
        change.close("bits", "group_size", "desc_act", off=_GPTQ)
        merged = _Fields(change.name, {**fields.values, **change.values})
        own.append((name, None if leave else _gptq_scheme(merged, layout)))

    def scheme_of(module: str) -> Scheme | None:
        found = (scheme for pattern, scheme in own if any(re.match(pattern, name) for name in spellings(module)))
        return next(found, usual)

    return Quantisation("gptq", scheme_of)


def _gptq_scheme(fields: _Fields, layout: str) -> Scheme:
    group = fields.group(default=128)
    if fields.values.get("desc_act") and group is not None:
        fields.refuse("desc_act", True, "groups in the order of activations; take one quantised with desc_act=false")
    symmetric = fields.values.get("sym")
    if symmetric not in (None, True, False):
        fields.refuse("sym", symmetric, "wanted true or false")
    return Gptq(fields.choice("bits", (4, 8)), group, less_one=layout == "gptq", symmetric=bool(symmetric))


def _modelopt(fields: _Fields) -> Quantisation:
    fields.close(
        *("quant_algo", "exclude_modules", "ignore", "group_size", "pre_quant_scale", "quantized_layers"),
        off=_MODELOPT,
    )
    if fields.values.get("pre_quant_scale"):
        fields.refuse("pre_quant_scale", True, "inputs are scaled before each product; take a checkpoint without that")
    ignored = fields.names("exclude_modules", "ignore")
    of_layers: dict[str, Scheme] = {}
    usual: Scheme | None = None
    if fields.values.get("quant_algo") == _MIXED:
        layers = fields.sub("quantized_layers")
        of_layers = {name: _modelopt_scheme(layers.sub(name)) for name in layers.values}
    else:
        usual = _modelopt_scheme(fields)

    def scheme_of(module: str) -> Scheme | None:
        by_pattern = any(fnmatchcase(spelling, name) for spelling in spellings(module) for name in ignored)
        if by_pattern or _within(module, ignored):
            return None
        named = [name for name in of_layers if _within(module, (name,))]
        return of_layers[max(named, key=len)] if named else usual

    return Quantisation("modelopt", scheme_of, cache=bool(fields.values.get("kv_cache_quant_algo")))


def _modelopt_scheme(fields: _Fields) -> Scheme:
    """Returns the layout of quantised matrices for the settings of a whole checkpoint, or of a part of its layers."""
    algorithm = fields.choice("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8", *_FP8_BLOCKS))
    if algorithm == "FP8":
        return Float8(None)
    wanted = 128 if algorithm in _FP8_BLOCKS else 16
    if (group := fields.values.get("group_size", wanted)) != wanted:
        fields.refuse("group_size", group, f"wanted {wanted}")
    if algorithm in _FP8_BLOCKS:
        return Float8((wanted, wanted), "weight_scale_inv")
    return Float4(16, weight="weight", overall="weight_scale_2")


def _compressed(fields: _Fields) -> Quantisation:
    fields.close(
        *("quantization_status", "sparsity_config", "ignore", "config_groups", "format", "transform_config"),
        off=_COMPRESSED,
    )
    if transforms := fields.values.get("transform_config"):
        rotated = isinstance(transforms, Mapping) and not transforms.get("config_groups")
        if not rotated:
            fields.refuse("transform_config", transforms, "weights are rotated; take a checkpoint without transforms")
    status = fields.values.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        fields.refuse("quantization_status", status, "wanted 'compressed': save the model compressed")
    sparsity = fields.values.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        fields.refuse("sparsity_config", sparsity, "wanted dense weights")
    ignored, groups = fields.names("ignore"), fields.values.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        fields.refuse("config_groups", groups, "wanted an object")
    schemes: list[tuple[tuple[str, ...], Scheme]] = []
    for name in groups:
        group = fields.sub("config_groups").sub(name)
        group.close("weights", "targets", "format", off=_COMPRESSED_GROUP)
        if group.values.get("weights") is not None:
            schemes.append((group.names("targets"), _compressed_scheme(group, fields.values.get("format"))))
    for target in (*ignored, *(name for targets, _ in schemes for name in targets)):
        if target.startswith("re:"):
            _compiled(fields, "ignore or targets", target[3:])

    def scheme_of(module: str) -> Scheme | None:
        if _matches(module, ignored):
            return None
        # a module's name has precedence over its class
        found = [scheme for targets, scheme in schemes if _matches(module, targets)]
        found += [scheme for targets, scheme in schemes if "Linear" in targets]
        return found[0] if found else None

    cache = fields.values.get("kv_cache_scheme") is not None
    return Quantisation("compressed-tensors", scheme_of, cache, weights=bool(schemes))


def _compressed_scheme(group: _Fields, usual: object) -> Scheme:
    weights = group.sub("weights")
    layout = group.values.get("format") or (None if usual == "mixed-precision" else usual)
    bits, kind = weights.choice("num_bits", (4, 8)), weights.choice("type", ("int", "float"), "int")
    if weights.values.get("actorder") not in (None, False, "static", "weight"):
        weights.refuse("actorder", weights.values["actorder"], "groups in the order of activations; take one without")
    if weights.values.get("dynamic"):
        weights.refuse("dynamic", weights.values["dynamic"], "wanted weights quantised beforehand")
    weights.close(
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder"),
        off=_COMPRESSED_WEIGHTS,
    )
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"), _strategy(weights))
    if (bits, kind) == (4, "float"):
        return _float4(group, weights, layout)
    symmetric = weights.choice("symmetric", (True, False), True)
    columns = weights.group() if strategy == "group" else None
    if strategy not in ("tensor", "channel", "group") and (kind, strategy) != ("float", "block"):
        weights.refuse("strategy", strategy, f"wanted 'tensor', 'channel' or 'group' of {kind} in {bits} bits")
    if layout == "pack-quantized" and kind == "int":
        if bits == 8 and not symmetric:
            weights.refuse("symmetric", False, "wanted true of 8 bits")
        return PackedInt(bits, columns, symmetric)
    if bits == 8 and layout in ("int-quantized", "float-quantized", "naive-quantized", None) and symmetric:
        return _eight_bits(weights, kind, strategy, columns)
    group.refuse("format", layout, f"with {kind} in {bits} bits, symmetric={symmetric}; save it as pack-quantized")


def _eight_bits(weights: _Fields, kind: str, strategy: str, columns: int | None) -> Scheme:
    if kind == "int":
        return Int8(columns)
    if strategy == "block":
        return Float8(weights.block("block_structure"))
    return Float8(None if columns is None else (1, columns))


def _float4(group: _Fields, weights: _Fields, layout: object) -> Scheme:
    if layout == "nvfp4-pack-quantized":
        weights.choice("group_size", (16,))
        return Float4(16, overall="weight_global_scale", divides=True)
    if layout == "mxfp4-pack-quantized":
        weights.choice("group_size", (32,))
        return Float4(32)
    group.refuse("format", layout, "wanted 'nvfp4-pack-quantized' or 'mxfp4-pack-quantized' of floats in 4 bits")


def _compiled(fields: _Fields, field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        fields.refuse(field, pattern, f"not a regular expression: {error}")


def _strategy(weights: _Fields) -> str:
    """Returns the default of the field `strategy`, as compressed-tensors infers it from other fields."""
    if weights.values.get("block_structure") is not None:
        return "block"
    group = weights.values.get("group_size")
    if group is None:
        return "tensor"
    return "channel" if group == -1 else "group"


def _matches(module: str, targets: tuple[str, ...]) -> bool:
    """True if one of the targets in a compressed-tensors config selects a module.

    A target is the name of a module, or `re:` and a regular expression that matches the beginning of the name.
    """
    return any(
        re.match(target[3:], name) is not None if target.startswith("re:") else name == target
        for name in spellings(module)
        for target in targets
    )


def spellings(module: str) -> tuple[str, ...]:
    """Returns the names that a config may use for a module with the stored name `module`.

    In files of a base model, names lack `model.`. In a multimodal model, the text part can be `language_model.model` in
    the files and `model.language_model` in the config, or the reverse. It depends on the releases of transformers.
    """
    old, new = "language_model.model.", "model.language_model."
    for here, there in ((old, new), (new, old)):
        if module.startswith(here):
            return module, there + module.removeprefix(here)
    if "language_model." in module:
        return (module,)
    return (module, module.removeprefix("model.") if module.startswith("model.") else f"model.{module}")


def _within(module: str, names: tuple[str, ...]) -> bool:
    return any(_inside(spelling, name) for spelling in spellings(module) for name in names)


def _inside(module: str, name: str) -> bool:
    """True if `name`, as a sequence of whole parts between dots, occurs in a module's name."""
    return module == name or module.startswith(name + ".") or module.endswith("." + name) or f".{name}." in module
