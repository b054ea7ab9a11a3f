"""The checked fields of a Hugging Face config: everything in which the supported families differ.

`spec_from_config` turns a config into a frozen `ModelSpec`, or refuses it by name. Nothing behind this file
looks at a config again: a setting that is not a field of the spec does not change the arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from fastspec.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported families: the config's `model_type`, and the one architecture name that goes with it."""

ROPE_KINDS: Final = ("default", "llama3")
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM: Final = 256
MAX_NUMBER: Final = 2.0**62  # of a setting that is no size; torch takes whole numbers of 64 bits only

SIZE_LIMITS: Final[Mapping[str, int]] = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "max_position_embeddings": 2**30,
    "sliding_window": 2**30,
}
"""Largest plausible value of each size field; no model of these families comes near. Bounds what a bad config
costs."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, reduced to numbers.

    Attributes:
        kind: "default" or "llama3", for messages.
        inv_freq: [head_dim / 2] inverse frequencies in radians per position, each exactly representable in
            fp32.
        scaling: factor on cos and sin (1.0 for both kinds).
    """

    kind: str
    inv_freq: tuple[float, ...]
    scaling: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one decoder. Sizes are counts of elements.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        max_length: the config's max_position_embeddings, in tokens.
        windows: one entry per layer: None is full attention; n means that a query sees the n newest keys, its
            own included.
        qkv_bias: q, k and v projections have a bias. o_bias, mlp_bias: the same for the output projection,
            and for gate, up and down.
        qk_norm: RMSNorm over head_dim on each query and key head, before the rotation.
        tied: the head is the embedding matrix.
        dtype: the dtype that the checkpoint declares, else the one it is stored in.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_length: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: torch.dtype

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the fused weights in `dtype`."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (heads + 2 * kv_heads) * (self.hidden_size + self.qkv_bias)
        out = self.hidden_size * (heads + self.o_bias)
        mlp = 2 * self.intermediate_size * (self.hidden_size + self.mlp_bias)
        mlp += self.hidden_size * (self.intermediate_size + self.mlp_bias)
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return (self.num_layers * (qkv + out + mlp + norms) + embeddings + self.hidden_size) * dtype.itemsize


def supported_models() -> str:
    """One line that lists every supported family and setting, for error messages."""
    families = ", ".join(f"{name} ({ARCHITECTURES[name]})" for name in ARCHITECTURES)
    return (
        f"supported: {families}; rope types {', '.join(ROPE_KINDS)}; full or sliding-window attention; hidden_act "
        f"silu; even head_dim up to {MAX_HEAD_DIM}; unquantised bfloat16, float16 or float32 weights"
    )


def spec_from_config(config: PretrainedConfig) -> ModelSpec:
    """Reads the checked fields out of a loaded Hugging Face config.

    Args:
        config: a transformers config object; both the `rope_parameters` and the older
            `rope_theta`/`rope_scaling` spellings are read through it. Not modified.

    Returns:
        The frozen spec. Its dtype is float32 when the config names none, as in transformers.

    Raises:
        UnsupportedModel: the family, or any setting that changes the arithmetic, is not implemented. The
            message names the field, its value, and what is supported.
    """
    family = _family(config)
    _refuse_unread_settings(config)
    layers = _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads") if _get(config, "num_key_value_heads") is not None else heads
    if heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    head_dim = _head_dim(config, heads)
    attention_bias = family in ("llama", "qwen3") and _flag(config, "attention_bias")
    windows = _windows(config, family, layers)  # before _rope: transformers reads layer_types there, unchecked
    return ModelSpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_positive(_get(config, "rms_norm_eps"), "rms_norm_eps"),
        max_length=_size(config, "max_position_embeddings"),
        rope=_rope(config, head_dim),
        windows=windows,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
        qk_norm=family == "qwen3",
        tied=_flag(config, "tie_word_embeddings"),
        dtype=_dtype(_get(config, "dtype")),
    )


def _refuse(field: str, got: object, wanted: str) -> NoReturn:
    raise UnsupportedModel(f"{field}={got!r} is not supported, wanted {wanted}; {supported_models()}")


def _get(config: PretrainedConfig, field: str) -> Any:
    # A family's config class declares only its own fields, and transformers itself reads the others this way.
    return getattr(config, field, None)


def _family(config: PretrainedConfig) -> str:
    family = str(config.model_type)
    if family not in ARCHITECTURES:
        _refuse("model_type", family, "one of " + ", ".join(ARCHITECTURES))
    refuse_other_architectures(family, _get(config, "architectures"))
    return family


def refuse_other_architectures(family: str, named: object) -> None:
    """Refuses `architectures` of a config that name anything but the causal model of its family.

    Raises:
        UnsupportedModel: names what it says and what was wanted.
    """
    named = list(named) if isinstance(named, tuple) else named
    if named and named != [ARCHITECTURES[family]]:
        _refuse("architectures", named, f"[{ARCHITECTURES[family]!r}] for model_type {family!r}")


def _refuse_unread_settings(config: PretrainedConfig) -> None:
    """Refuses settings that would change the result and that no field of the spec carries."""
    # First: such a config raises on reading a field that layers differ in. Older versions of transformers do not know
    # such layers, and keep what they are given.
    if _get(config, "is_heterogeneous" if hasattr(config, "is_heterogeneous") else "per_layer_config"):
        _refuse("per_layer_config", "set", "layers of one shape")
    if _get(config, "hidden_act") != "silu":
        _refuse("hidden_act", _get(config, "hidden_act"), "'silu'")
    if _get(config, "quantization_config"):
        _refuse("quantization_config", _get(config, "quantization_config"), "an unquantised checkpoint")


def _size(config: PretrainedConfig, field: str) -> int:
    value = _get(config, field)
    limit = SIZE_LIMITS[field]
    if type(value) is not int or not 1 <= value <= limit:
        _refuse(field, value, f"a whole number from 1 to {limit}")
    return int(value)


def _flag(config: PretrainedConfig, field: str) -> bool:
    value = _get(config, field)
    if value is not None and type(value) is not bool:
        _refuse(field, value, "true or false")
    return bool(value)


def _positive(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        _refuse(field, value, f"a positive number up to {MAX_NUMBER:.2g}")
    return float(value)


def _head_dim(config: PretrainedConfig, heads: int) -> int:
    if _get(config, "head_dim") is not None:
        head_dim = _size(config, "head_dim")
    else:
        hidden = _size(config, "hidden_size")
        if hidden % heads:
            _refuse("hidden_size", hidden, f"a multiple of num_attention_heads={heads}, or a head_dim")
        head_dim = hidden // heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        _refuse("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}")
    return head_dim


def _dtype(value: object) -> torch.dtype:
    if value is None:
        return torch.float32
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        _refuse("dtype", value, "bfloat16, float16 or float32")
    return dtype


def _windows(config: PretrainedConfig, family: str, layers: int) -> tuple[int | None, ...]:
    """Attention window of each layer, as each family's transformers model applies it."""
    types = _get(config, "layer_types")
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != layers:
            _refuse("layer_types", types, f"a list of num_hidden_layers={layers} entries")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                _refuse("layer_types", kind, "'full_attention' or 'sliding_attention' in every layer")
    window = _get(config, "sliding_window")
    if family == "llama" or window is None:
        # A family without windows ignores sliding_window, so only a layer that asks for one is in conflict.
        if types is not None and "sliding_attention" in types:
            _refuse("layer_types", "sliding_attention", "'full_attention' here: there is no sliding_window")
        return (None,) * layers
    window = _size(config, "sliding_window")
    if family == "mistral":
        if types is not None and "full_attention" in types:
            _refuse("layer_types", "full_attention", f"'sliding_attention' here: sliding_window={window}")
        return (window,) * layers
    if types is None:
        _refuse("layer_types", None, f"one entry per layer with sliding_window={window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope(config: PretrainedConfig, head_dim: int) -> RopeSpec:
    parameters = _get(config, "rope_parameters")
    if not isinstance(parameters, dict):
        _refuse("rope_parameters", parameters, "an object with rope_theta")
    if any(isinstance(value, dict) for value in parameters.values()):
        _refuse("rope_parameters", parameters, "one setting for all layers")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        _refuse("rope_type", kind, " or ".join(repr(name) for name in ROPE_KINDS))
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        _refuse("partial_rotary_factor", partial, "1.0")
    theta = _positive(parameters.get("rope_theta"), "rope_theta")
    if kind == "llama3":
        return _llama3_rope(config, parameters, head_dim)
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return RopeSpec("default", _finite(1.0 / theta**steps, parameters), 1.0)


def _finite(inv_freq: Tensor, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    if not bool(inv_freq.isfinite().all()):
        _refuse("rope_parameters", dict(parameters), "settings whose frequencies are finite in float32")
    return tuple(inv_freq.tolist())


def _llama3_rope(config: PretrainedConfig, parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _, low, high, _ = (_positive(parameters.get(field), f"rope_parameters.{field}") for field in fields)
    if low >= high:
        _refuse("rope_parameters.low_freq_factor", low, f"less than high_freq_factor={high}")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["llama3"](copy.deepcopy(config), torch.device("cpu"))
    if inv_freq.numel() * 2 != head_dim or scaling != 1.0:
        _refuse("rope_parameters", dict(parameters), f"{head_dim // 2} frequencies and a scaling of 1.0")
    return RopeSpec("llama3", _finite(inv_freq, parameters), 1.0)
