"""Named pairs of model shapes, and what their passes read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

Fields = Mapping[str, Any]
SHIPPED, OWN = "shipped", "own"
ACCEPTED = 0.78  # agreement of planted pairs, unless a case says otherwise


@dataclass(frozen=True, slots=True)
class Workload:
    """Two model shapes that decode together.

    Attributes:
        name: what the command line calls it.
        target, draft: fields of their Hugging Face configs; empty for models that lie on disk.
        about: one line.
        dtype: of weights and cache.
    """

    name: str
    target: Fields
    draft: Fields
    about: str
    dtype: torch.dtype = torch.bfloat16

    def config(self, role: str) -> PretrainedConfig:
        """The config of "target" or "draft". No token ends a text: every run makes as many as it is asked for."""
        fields = dict(self.target if role == "target" else self.draft)
        kind = CONFIG_MAPPING[fields.pop("model_type")]
        ends: Fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config: PretrainedConfig = kind(**fields, **ends, dtype=self.dtype)
        return config


def _llama(hidden: int, inter: int, layers: int, heads: int, *, rope: float, tied: bool = False) -> Fields:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": rope, **scaling},
        "tie_word_embeddings": tied,
    }


def _qwen(kind: str, vocab: int, hidden: int, inter: int, layers: int, heads: tuple[int, int], tied: bool) -> Fields:
    fields = {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
    }
    return fields | ({"head_dim": 128} if kind == "qwen3" else {})


def _tiny(hidden: int, inter: int, layers: int, *, tied: bool) -> Fields:
    return {
        **_llama(hidden, inter, layers, 4, rope=8.0, tied=tied),
        "vocab_size": 2048,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


_8B, _1B = _llama(4096, 14336, 32, 32, rope=8.0), _llama(2048, 8192, 16, 32, rope=32.0)

_ALL = (
    Workload("8b+1b", _8B, _1B, "Llama-3.1-8B with a Llama-3.2-1B shape whose head is its own (1.50B)"),
    Workload("8b+1b-tied", _8B, {**_1B, "tie_word_embeddings": True}, "Llama-3.1-8B with Llama-3.2-1B as released"),
    Workload(
        "70b-slice+8b-slice",
        _llama(8192, 28672, 8, 64, rope=8.0),
        _llama(4096, 14336, 4, 32, rope=8.0),
        "8 of Llama-3.1-70B's 80 layers with 4 of the 8B's 32: the widths of the pair, a tenth of the depth",
    ),
    Workload(
        "qwen2.5-7b+0.5b",
        _qwen("qwen2", 152064, 3584, 18944, 28, (28, 4), False),
        _qwen("qwen2", 151936, 896, 4864, 24, (14, 2), True),
        "Qwen2.5-7B with Qwen2.5-0.5B: biases, and vocabularies padded to different sizes",
    ),
    Workload(
        "qwen3-8b+0.6b",
        _qwen("qwen3", 151936, 4096, 12288, 36, (32, 8), False),
        _qwen("qwen3", 151936, 1024, 3072, 28, (16, 8), True),
        "Qwen3-8B with Qwen3-0.6B: norms on query and key heads",
    ),
    Workload(
        "1b+slice",
        _1B,
        _llama(1024, 4096, 4, 16, rope=32.0, tied=True),
        "the 1B of the first pair with a draft of 4 layers: seconds to write and to load",
    ),
    Workload(SHIPPED, {}, {}, "the demo pair that fastspec ships"),
    Workload(OWN, {}, {}, "checkpoints of your own: --target and --draft"),
    Workload(
        "tiny",
        _tiny(384, 1024, 3, tied=False),
        _tiny(320, 704, 1, tied=True),
        "seconds on a CPU: shows that the measuring works, and measures nothing",
        dtype=torch.float32,
    ),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _ALL})
SHAPED = tuple(sorted(workload.name for workload in _ALL if workload.target))  # those that can be planted


@dataclass(frozen=True, slots=True)
class Bytes:
    """What passes of one model must read.

    Attributes:
        weights: of one pass: every layer, the last norm and the head; of the embedding only the rows used, so
            none, unless it is the head.
        cache_token: K and V of one position, all layers.
    """

    weights: int
    cache_token: int

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Bytes:
        """Counted over the model that transformers makes of the config, without memory for its weights."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        elements = sum(weight.numel() for weight in model.parameters())  # a tied weight is there once
        if not config.tie_word_embeddings:
            elements -= model.get_input_embeddings().weight.numel()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        return cls(elements * dtype.itemsize, cache * dtype.itemsize)


def step_bytes(target: Bytes, draft: Bytes | None, *, k: int, batch: int, context: float) -> float:
    """Bytes that a step must read: the target once, the draft k times, and every row's K and V in each pass.

    Args:
        context: mean length of a row, in tokens.
    """
    passes = target.weights + batch * context * target.cache_token
    if draft is not None:
        passes += k * (draft.weights + batch * context * draft.cache_token)
    return passes
