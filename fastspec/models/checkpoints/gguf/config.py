"""Makes the config of a model from the metadata of a GGUF file.

Keys of the metadata have llama.cpp's names. Fields of the config have transformers' names. Some properties of an
architecture are in the code of llama.cpp, but not in the file. The table `GGUF_ARCHS` has these properties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.gguf.header import GgufHeader, MetadataValue

EMBEDDING: Final = "token_embd.weight"
OUTPUT: Final = "output.weight"
ROPE_FREQS: Final = "rope_freqs.weight"
ROPE_LONG: Final = "rope_factors_long.weight"
ROPE_SHORT: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of Llama 3
# key of the metadata -> field of the config, for keys of every architecture
_COMMON: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_REQUIRED: Final = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
# keys that functions of this file read, or that follow from others
_READ: Final = frozenset({
    "feed_forward_length",
    "vocab_size",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
})  # fmt: skip
_TOKENS: Final = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_ENDS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


@dataclass(frozen=True, slots=True)
class GgufArch:
    """Properties of one architecture of llama.cpp.

    Attributes:
        model_type: `model_type` of the config in transformers.
        permuted: True if rows of the q and k projections are stored in the order of a RoPE that rotates neighbouring
            elements of a head together.
        plus_one: True if norms are stored as 1 + w.
        fields: further keys of the metadata -> fields of the config.
        constants: fields of the config that have the same value for all files.
        finish: function that makes further fields from the metadata and the config so far. None: there are none.
    """

    model_type: str
    permuted: bool = False
    plus_one: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]] | None = None


class _Metadata:
    """Checked access to the metadata of a file.

    Args:
        header: header of the file.
        arch: name of the architecture, which is the prefix of its keys.
    """

    def __init__(self, header: GgufHeader, arch: str) -> None:
        self.header, self.arch = header, arch

    def get(self, key: str) -> MetadataValue | None:
        """Returns the value of a key of the architecture. None: the key is missing.

        The stored value may be a list with one value for each layer. All of them must be equal, and one is returned.

        Args:
            key: the key, without the architecture.

        Raises:
            UnsupportedModel: the layers have different values.
        """
        value = self.header.metadata.get(f"{self.arch}.{key}")
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            self.refuse(key, value, "one value for all layers")
        return value[0]

    def number(self, key: str, default: float | None = None) -> float | None:
        """Returns the value of a key, which must be a finite number. Returns `default` if the key is missing.

        Raises:
            CheckpointError: another value.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool | str | list) or not math.isfinite(value):
            raise CheckpointError(f"{self.header.path}: {self.arch}.{key}={value!r}, wanted a number")
        return value

    def refuse(self, key: str, value: object, wanted: str) -> None:
        """Raises UnsupportedModel with a key, its value, and the text `wanted`."""
        raise UnsupportedModel(
            f"{self.header.path}: {self.arch}.{key}={value!r} is not supported, wanted {wanted}; take the original "
            "checkpoint"
        )

    def floats(self, tensor: str) -> list[float] | None:
        """Returns the values of a stored fp32 vector. None: the file has no tensor of this name.

        Raises:
            CheckpointError: the tensor has another dtype, or is not a vector.
        """
        found = self.header.tensors.get(tensor)
        if found is None:
            return None
        if found.kind != "F32" or len(found.shape) != 1:
            raise CheckpointError(f"{self.header.path}: {tensor} is {found.kind} {list(found.shape)}, wanted F32 [n]")
        raw = self.header.data[found.start : found.start + found.nbytes]
        return [float(each) for each in raw.view(np.float32)]


def _gemma2(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config field for the scale of queries, with the value that llama.cpp uses.

    The value is hidden_size / heads for the models with 27B parameters, and head_dim for others.
    """
    big = config["num_hidden_layers"] == (62 if metadata.arch == "gemma3" else 46)
    scale = config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
    return {"query_pre_attn_scalar": scale}


def _gemma3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config fields for the types of layers, for RoPE and for the scale of queries.

    Five layers with a sliding window are followed by one with full attention. RoPE of layers with a window has theta
    10000, unless the file has another, and no scaling.
    """
    if "sliding_window" not in config:
        raise CheckpointError(f"{metadata.header.path}: gemma3.attention.sliding_window is missing; download it again")
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    pattern = metadata.get("attention.sliding_window_pattern")
    if pattern not in (None, 6):
        metadata.refuse("attention.sliding_window_pattern", pattern, "6")
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    return {
        **_gemma2(metadata, config),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": [kinds[layer % 6] for layer in range(config["num_hidden_layers"])],
    }


def _phi3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config fields for RoPE: the share of a head's elements that is rotated, and longrope's factors."""
    rotated = metadata.number("rope.dimension_count", config["head_dim"])
    assert rotated is not None, "it has a default"
    partial = rotated / config["head_dim"]
    rope = {**config["rope_parameters"], "partial_rotary_factor": partial}
    long, short = metadata.floats(ROPE_LONG), metadata.floats(ROPE_SHORT)
    if long is None and short is None:
        return {"partial_rotary_factor": partial, "rope_parameters": rope}
    original = metadata.get("rope.scaling.original_context_length")
    if long is None or short is None or type(original) is not int or original < 1:
        raise CheckpointError(
            f"{metadata.header.path}: longrope needs {ROPE_LONG}, {ROPE_SHORT} and "
            f"{metadata.arch}.rope.scaling.original_context_length; got {original!r} for the last"
        )
    rope |= {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
    }
    return {
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _moe(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that the metadata has all sizes of experts. Returns an empty dict.

    Raises:
        CheckpointError: a size is missing.
    """
    missing = [key for key, to in _EXPERTS.items() if to not in config]
    if missing:
        raise CheckpointError(f"{metadata.header.path}: its metadata lacks {', '.join(missing)}; download it again")
    return {}


_LLAMA = GgufArch("llama", permuted=True)
_EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GRANITE: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_SOFTCAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW: Final = {"attention.sliding_window": "sliding_window"}
GGUF_ARCHS: Final[Mapping[str, GgufArch]] = {
    "llama": _LLAMA,
    "granite": GgufArch("granite", permuted=True, fields=_GRANITE),
    "qwen2": GgufArch("qwen2"),
    "qwen3": GgufArch("qwen3"),
    "qwen2moe": GgufArch(
        "qwen2_moe",
        fields={**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={"norm_topk_prob": False},
        finish=_moe,
    ),
    "qwen3moe": GgufArch("qwen3_moe", fields=_EXPERTS, constants={"norm_topk_prob": True}, finish=_moe),
    "gemma2": GgufArch("gemma2", plus_one=True, fields={**_WINDOW, **_SOFTCAPS}, finish=_gemma2),
    "gemma3": GgufArch(
        "gemma3_text",
        plus_one=True,
        fields={**_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
        finish=_gemma3,
    ),
    "phi3": GgufArch("phi3", fields=_WINDOW, finish=_phi3),
}
"""Value of the key `general.architecture` -> architecture. It is "llama" for Mistral and SmolLM2, too."""
_MORE_KEYS: Final = {"gemma3": {"rope.freq_base_swa", "attention.sliding_window_pattern"}}


def gguf_arch(header: GgufHeader) -> GgufArch:
    """Returns the architecture of a GGUF file.

    Raises:
        CheckpointError: the file does not name its architecture.
        UnsupportedModel: the architecture is not supported.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{header.path}: general.architecture={name!r}, wanted a name; download the file again")
    if name not in GGUF_ARCHS:
        raise UnsupportedModel(
            f"{header.path}: the GGUF architecture {name!r} is not supported, wanted one of {', '.join(GGUF_ARCHS)}; "
            "take the original checkpoint"
        )
    return GGUF_ARCHS[name]


def config_of_gguf(header: GgufHeader) -> dict[str, Any]:
    """Returns the config of a GGUF file's model, with the fields that `config.json` of the original checkpoint has.

    Raises:
        CheckpointError: a key or a tensor is missing, or a value is of the wrong type.
        UnsupportedModel: an architecture, a key or a type of RoPE that is not supported.
    """
    arch = gguf_arch(header)
    name = str(header.metadata["general.architecture"])
    metadata = _Metadata(header, name)
    _check_keys(metadata, arch)
    config: dict[str, Any] = {"model_type": arch.model_type, **arch.constants}
    for key, to in {**_COMMON, **arch.fields}.items():
        if metadata.get(key) is not None:
            config[to] = metadata.number(key)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if type(heads) is not int or type(width) is not int or heads < 1:
        raise CheckpointError(
            f"{header.path}: head_count={heads!r} and embedding_length={width!r}, wanted whole numbers"
        )
    config["head_dim"] = metadata.number("attention.key_length", width // heads)
    if type(config["head_dim"]) is not int or config["head_dim"] < 2:
        raise CheckpointError(f"{header.path}: head_dim={config['head_dim']!r}, wanted a whole number from 2")
    if metadata.number("attention.value_length", config["head_dim"]) != config["head_dim"]:
        metadata.refuse("attention.value_length", metadata.get("attention.value_length"), "that of keys")
    inner = metadata.number("feed_forward_length")
    config["intermediate_size"] = inner if inner is not None else config.get("moe_intermediate_size")
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{header.path}: the tensor {EMBEDDING} is missing; download the file again")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = OUTPUT not in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors and arch.model_type not in ("qwen2", "qwen2_moe")
    config["mlp_bias"] = "blk.0.ffn_down.bias" in header.tensors
    config["rope_parameters"] = _rope(metadata, config)
    if arch.finish is not None:
        config |= arch.finish(metadata, config)
    return config | _special_ids(header)


def _check_keys(metadata: _Metadata, arch: GgufArch) -> None:
    known = {*_COMMON, *_READ, *arch.fields, *_MORE_KEYS.get(metadata.arch, ())}
    prefix = metadata.arch + "."
    for key in metadata.header.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            value = metadata.header.metadata[key]
            if key.removeprefix(prefix) in ("expert_count", "expert_used_count") and value == 0:
                continue  # no experts
            raise UnsupportedModel(
                f"{metadata.header.path}: {key}={value!r} is not supported for architecture {metadata.arch!r}, and may "
                "change its text; take the original checkpoint"
            )
    missing = [prefix + key for key in _REQUIRED if metadata.get(key) is None]
    if missing:
        raise CheckpointError(f"{metadata.header.path}: its metadata lacks {', '.join(missing)}; download it again")


def _rope(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config field `rope_parameters`. For longrope, `_phi3` adds the factors.

    Args:
        metadata: metadata of the file.
        config: fields of the config so far.
    """
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    kind = metadata.get("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear"))
    partial = metadata.get("rope.dimension_count")
    if metadata.arch != "phi3" and partial is not None and partial != config["head_dim"]:
        metadata.refuse("rope.dimension_count", partial, f"{config['head_dim']}, the whole head")
    if kind is None:
        kind = "linear" if factor not in (None, 0.0, 1.0) else "none"
    original = metadata.get("rope.scaling.original_context_length")
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none" and not (kind == "longrope" and metadata.arch == "phi3"):
        metadata.refuse("rope.scaling.type", kind, "none, linear or yarn")
    factors = metadata.floats(ROPE_FREQS)
    if factors is not None:
        if found["rope_type"] != "default":
            metadata.refuse("rope.scaling.type", kind, f"none beside {ROPE_FREQS}")
        found |= _llama3(metadata, factors, found["rope_theta"], config["head_dim"])
    return found


def _llama3(metadata: _Metadata, factors: list[float], theta: float, dim: int) -> dict[str, Any]:
    """Returns the config fields for Llama 3's RoPE scaling that give the stored factors.

    The file does not have these settings. It has a factor for each rotated pair of elements, by which the wavelength of
    the pair is multiplied. low_freq_factor and high_freq_factor are 1 and 4 in all published models. The original
    context length is found by trial.

    Args:
        metadata: metadata of the file.
        factors: the stored factors.
        theta: base of the frequencies.
        dim: elements of a head.

    Raises:
        UnsupportedModel: no such settings give the factors.
    """
    factor = max(factors, default=1.0)
    context = metadata.get("context_length")
    if len(factors) == dim // 2 and theta > 0 and type(context) is int and context > 0:
        for original in (8192, context):
            made = [_llama3_factor(theta ** (2 * i / dim), factor, original) for i in range(dim // 2)]
            if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(made, factors, strict=True)):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW,
                    "high_freq_factor": _HIGH,
                    "original_max_position_embeddings": original,
                }
    raise UnsupportedModel(
        f"{metadata.header.path}: {ROPE_FREQS} holds factors {factors[:3]}... that are not those of Llama 3's rope; "
        "take the original checkpoint"
    )


def _llama3_factor(inverse: float, factor: float, original: int) -> float:
    """Returns the factor by which Llama 3's RoPE scaling multiplies one wavelength.

    Args:
        inverse: the wavelength divided by 2 pi.
        factor: the largest factor, by which long wavelengths are multiplied.
        original: context length before scaling.
    """
    length = 2 * math.pi * inverse
    if length < original / _HIGH:
        return 1.0
    if length > original / _LOW:
        return factor
    smooth = (original / length - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _special_ids(header: GgufHeader) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, to in _TOKENS.items():
        if key in header.metadata:
            found[to] = _id(header, key)
    ends = [_id(header, key) for key in _ENDS if key in header.metadata]
    if ends:
        found["eos_token_id"] = ends[0] if len(set(ends)) == 1 else ends
    return found


def _id(header: GgufHeader, key: str) -> int:
    value = header.metadata[key]
    if type(value) is not int:
        raise CheckpointError(f"{header.path}: {key}={value!r}, wanted an id; download the file again")
    return value
