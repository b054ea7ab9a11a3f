"""GGUF files of tiny transformers models, as llama.cpp's converter writes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers.families import make_family
from tests.helpers.tokenizers import byte_tokenizer

VOCAB = 288
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
PLANTED = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,), Kind.Q5_K: (0, 2), Kind.Q3_K: (108,)}  # bytes of their fp16 scales
# architecture -> family of `make_family`, and changes to its config that a file can say
ARCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("", {}),
    "granite": ("granite", {"mlp_bias": False}),
    "qwen2": ("", {}),
    "qwen3": ("", {}),
    "qwen2moe": ("qwen2_moe", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}),
    "qwen3moe": ("qwen3_moe", {"moe_intermediate_size": 64, "mlp_only_layers": []}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3",
        {
            **{"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "final_logit_softcapping": None},
            **{"layer_types": None, "attention_bias": False, "head_dim": 32},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3-long", {}),
}


def make_gguf_model(name: str, **changes: Any) -> PreTrainedModel:
    """A live model of one of `ARCHS`, with sizes that blocks of 32 divide."""
    from tests.helpers import families

    family, given = ARCHS[name]
    changes = {"vocab_size": VOCAB, "eos_token_id": 258, "bos_token_id": None, "pad_token_id": None, **given, **changes}
    if name in ("llama", "qwen2", "qwen3"):
        title = name.capitalize()
        families.CONFIGS.setdefault(f"gguf-{name}", (title, {}))
        family = f"gguf-{name}"
    return make_family(family, **changes)


def _stored(name: str, values: np.ndarray, arch: str, config: Any) -> np.ndarray:
    """Values of a tensor as llama.cpp's converter stores them."""
    kind = name.split(".")[-2]
    if arch in ("llama", "granite") and kind in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
        shape = values.shape
        halves = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
        return halves.swapaxes(1, 2).reshape(shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values[0] if kind == "shared_expert_gate" else values


def _tensors(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """Tensors by the names in the file."""
    config = model.config
    known = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            base, width = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            parts = {base + "gate_proj.weight": values[:, :width], base + "up_proj.weight": values[:, width:]}
        elif name.endswith("experts.down_proj"):
            parts = {name + ".weight": values}
        else:
            parts = {name: _stored(name, values, arch, config)}
        for part, each in parts.items():
            module, _, leaf = part.rpartition(".")
            stored = names.get_name(module)
            assert stored is not None, f"gguf has no name for {part}"
            found[f"{stored}.{leaf}"] = np.ascontiguousarray(each)
    return found


def _quantised(values: np.ndarray, kind: Kind, generator: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix in a format; those that gguf cannot write are random, with small scales."""
    if kind not in PLANTED:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for at in PLANTED[kind]:
        scale = generator.uniform(0.0005, 0.002, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = scale[:, None].view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def write_gguf(path: Path, model: PreTrainedModel, name: str, kind: Kind = Kind.F32, **more: Any) -> PreTrainedModel:
    """Writes a model and the byte tokenizer to a file. Norms and other vectors are fp32.

    Args:
        kind: format of the matrices.
        more: further keys of the metadata, with "__" for ".".

    Returns:
        A copy of the model with the values that the file holds.
    """
    arch, config = name.removesuffix("-long"), model.config
    writer = gguf.GGUFWriter(path, arch)
    _write_config(writer, arch, config)
    _write_tokenizer(writer, byte_tokenizer())
    for key, value in more.items():
        writer.add_key_value(key.replace("__", "."), value, _type_of(value))
    generator = np.random.default_rng(0)
    held: dict[str, np.ndarray] = {}
    for stored, values in _tensors(model, arch).items():
        if values.ndim == 1 or kind is Kind.F32:
            writer.add_tensor(stored, values)
            held[stored] = values
            continue
        raw = values.astype(np.float16) if kind is Kind.F16 else _quantised(values, kind, generator)
        writer.add_tensor(stored, raw, raw_dtype=None if kind is Kind.F16 else kind)
        held[stored] = raw.astype(np.float32) if kind is Kind.F16 else gguf.quants.dequantize(raw, kind)
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _with(model, held, arch)


def _llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """Factors on wavelengths, as the converter writes them, from transformers' frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": dim, "num_attention_heads": 1, "head_dim": dim, "max_position_embeddings": 2**17}
    config = LlamaConfig(**sizes, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (plain / scaled).numpy()


def _with(model: PreTrainedModel, held: dict[str, np.ndarray], arch: str) -> PreTrainedModel:
    """A copy of the model with the values of a file: writes them back by storing arrays of indices as a guide."""
    made = copy.deepcopy(model)
    state = made.state_dict()
    guide = copy.deepcopy(model)
    numbers: dict[str, torch.Tensor] = {}
    start = 0
    for name, tensor in guide.state_dict().items():
        numbers[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float64).view(tensor.shape)
        start += tensor.numel()
    values = torch.zeros(start)
    for stored, where in _tensors(_Numbered(guide, numbers), arch).items():  # type: ignore[arg-type]
        shift = 1 if arch.startswith("gemma") and stored.endswith("norm.weight") else 0
        values[torch.from_numpy(where - shift).long().flatten()] = torch.from_numpy(held[stored] - shift).flatten()
    for name, tensor in state.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensor.copy_(values[numbers[name].long()])
    return made


class _Numbered:
    """Stands for a model whose elements are their own numbers, which fp64 holds exactly."""

    def __init__(self, model: PreTrainedModel, numbers: dict[str, torch.Tensor]) -> None:
        self.config, self._numbers = model.config, numbers

    def state_dict(self) -> dict[str, Any]:
        return {name: _Exact(values) for name, values in self._numbers.items()}


class _Exact:
    """A tensor that keeps fp64 when it is asked for fp32."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def float(self) -> torch.Tensor:
        return self._values


def _type_of(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    return gguf.GGUFValueType.ARRAY if isinstance(value, list) else kinds.get(type(value), gguf.GGUFValueType.STRING)


def _write_config(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "phi3":
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch in ("gemma2", "gemma3", "phi3") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the vocabulary of a byte-level tokenizer, its end token and a chat template."""
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    end = tokenizer.eos_token_id
    kinds = [gguf.TokenType.CONTROL if token == end else gguf.TokenType.NORMAL for token in range(len(tokens))]
    unused = range(len(tokens), VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[PAD{token}]" for token in unused)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges(["h e", "t he"])
    writer.add_eos_token_id(end)
    writer.add_chat_template(TEMPLATE)
