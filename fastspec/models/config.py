"""The checked fields of a Hugging Face config: sizes, rope, and what each layer does.

`spec_from_config` turns a config into a frozen `ModelSpec`, or refuses it by name. What its layers do is said by the
family's file in `families/`. No other code reads a config: a setting that is not in the spec does not change the
arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from fastspec.errors import UnsupportedModel
from fastspec.models.families import FAMILIES
from fastspec.models.families.plan import LayerPlan
from fastspec.models.fields import ConfigFields

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

ROPE_KINDS: Final = ("default", "llama3")
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM: Final = 512


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
        family: a key of `FAMILIES`.
        max_length: the config's max_position_embeddings, in tokens.
        plans: what each layer does. All layers hold the same kinds of tensors.
        tied: the head is the embedding matrix.
        dtype: the dtype that the checkpoint declares, else the one it is stored in.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_length: int
    rope: RopeSpec
    plans: tuple[LayerPlan, ...]
    tied: bool
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.plans)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: full attention."""
        return tuple(plan.window for plan in self.plans)

    @property
    def qkv_bias(self) -> bool:
        """q, k and v projections have a bias."""
        return self.plans[0].qkv_bias

    @property
    def o_bias(self) -> bool:
        """The output projection has a bias."""
        return self.plans[0].o_bias

    @property
    def mlp_bias(self) -> bool:
        """Gate, up and down projections have a bias."""
        return self.plans[0].mlp_bias

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised."""
        return self.plans[0].qk_norm

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
    families = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    return (
        f"supported: {families}; rope types {', '.join(ROPE_KINDS)}; full or sliding-window attention; hidden_act "
        f"silu; even head_dim up to {MAX_HEAD_DIM}; weights in bfloat16, float16 or float32, or quantised by "
        "compressed-tensors, fp8, AWQ, GPTQ or ModelOpt"
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
    fields = ConfigFields(config, supported_models())
    family = _family(fields)
    _refuse_unread_settings(fields)
    layers = fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads") if fields.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    head_dim = _head_dim(fields, heads)
    plans = FAMILIES[family].plans(fields, layers)  # before _rope: transformers reads layer_types there, unchecked
    return ModelSpec(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.positive("rms_norm_eps"),
        max_length=fields.size("max_position_embeddings"),
        rope=_rope(fields, head_dim),
        plans=plans,
        tied=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
    )


def _family(fields: ConfigFields) -> str:
    family = str(fields.get("model_type"))
    if family not in FAMILIES:
        fields.refuse("model_type", family, "one of " + ", ".join(FAMILIES))
    refuse_other_architectures(family, fields.get("architectures"))
    return family


def refuse_other_architectures(family: str, named: object) -> None:
    """Refuses `architectures` of a config that name anything but the causal model of its family.

    Raises:
        UnsupportedModel: names what it says and what was wanted.
    """
    named, wanted = list(named) if isinstance(named, tuple) else named, FAMILIES[family].architecture
    if named and named != [wanted]:
        raise UnsupportedModel(
            f"architectures={named!r} is not supported, wanted [{wanted!r}] for model_type {family!r}; "
            f"{supported_models()}"
        )


def _refuse_unread_settings(fields: ConfigFields) -> None:
    """Refuses settings that would change the result and that no field of the spec carries."""
    # First: such a config raises on reading a field that layers differ in. Older versions of transformers do not know
    # such layers, and keep what they are given.
    if fields.get("is_heterogeneous" if hasattr(fields.config, "is_heterogeneous") else "per_layer_config"):
        fields.refuse("per_layer_config", "set", "layers of one shape")
    if fields.get("hidden_act") != "silu":
        fields.refuse("hidden_act", fields.get("hidden_act"), "'silu'")
    if says_quantised(fields.get("quantization_config")):
        fields.refuse(
            "quantization_config", fields.get("quantization_config"), "its directory in place of the live model"
        )


def says_quantised(value: object) -> bool:
    """Whether a config's `quantization_config` asks for anything: None, or only fields that are null or off, do not."""
    if not isinstance(value, Mapping):
        return value is not None
    if value.get("load_in_4bit") is False and value.get("load_in_8bit") is False:
        return value.get("quant_method") not in (None, "bitsandbytes")  # whose other fields say how, not that
    return any(each not in (None, False) for each in value.values())


def _head_dim(fields: ConfigFields, heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_dim = fields.size("head_dim")
    else:
        hidden = fields.size("hidden_size")
        if hidden % heads:
            fields.refuse("hidden_size", hidden, f"a multiple of num_attention_heads={heads}, or a head_dim")
        head_dim = hidden // heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        fields.refuse("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}")
    return head_dim


def _dtype(fields: ConfigFields) -> torch.dtype:
    value = fields.get("dtype")
    if value is None:
        return torch.float32
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        fields.refuse("dtype", value, "bfloat16, float16 or float32")
    return dtype


def _rope(fields: ConfigFields, head_dim: int) -> RopeSpec:
    parameters = fields.get("rope_parameters")
    if not isinstance(parameters, dict):
        fields.refuse("rope_parameters", parameters, "an object with rope_theta")
    if any(isinstance(value, dict) for value in parameters.values()):
        fields.refuse("rope_parameters", parameters, "one setting for all layers")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        fields.refuse("rope_type", kind, " or ".join(repr(name) for name in ROPE_KINDS))
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        fields.refuse("partial_rotary_factor", partial, "1.0")
    theta = fields.check_positive(parameters.get("rope_theta"), "rope_theta")
    if kind == "llama3":
        return _llama3_rope(fields, parameters, head_dim)
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return RopeSpec("default", _finite(fields, 1.0 / theta**steps, parameters), 1.0)


def _finite(fields: ConfigFields, inv_freq: Tensor, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    if not bool(inv_freq.isfinite().all()):
        fields.refuse("rope_parameters", dict(parameters), "settings whose frequencies are finite in float32")
    return tuple(inv_freq.tolist())


def _llama3_rope(fields: ConfigFields, parameters: Mapping[str, Any], head_dim: int) -> RopeSpec:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _, low, high, _ = (fields.check_positive(parameters.get(name), f"rope_parameters.{name}") for name in names)
    if low >= high:
        fields.refuse("rope_parameters.low_freq_factor", low, f"less than high_freq_factor={high}")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["llama3"](copy.deepcopy(fields.config), torch.device("cpu"))
    if inv_freq.numel() * 2 != head_dim or scaling != 1.0:
        fields.refuse("rope_parameters", dict(parameters), f"{head_dim // 2} frequencies and a scaling of 1.0")
    return RopeSpec("llama3", _finite(fields, inv_freq, parameters), 1.0)
