"""DFlash checkpoints of random weights, in the two layouts in which they are published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TAPS, GROUP = 2, 8  # of a DFlash2 head's convolutions


@dataclass(frozen=True)
class Head:
    """Sizes of a head for a target of `hidden` elements and `vocab` ids.

    Attributes:
        ids: of target layers, counted from 0: the head reads the residual stream behind each.
        draft_vocab: ids of its own head; None: it has the target's.
        layer_types, sliding_window: as in a config.
        bias: on all products of attention.
        own_embedding: the checkpoint has a table of embeddings, as older ones of speculators do.
        markov: rank of a DSpark head's Markov head; 0: none.
        selector: rank and candidates of a DFlash2 head, whose convolutions have 2 taps and groups of 8; None: none.
        more: fields of `dflash_config`, or in speculators' layout of the config.
    """

    hidden: int
    vocab: int
    target_layers: int = 3
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    inner: int = 48
    ids: tuple[int, ...] = (0, 1)
    block_size: int = 8
    mask_id: int = 5
    draft_vocab: int | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    bias: bool = False
    sinks: bool = False
    own_embedding: bool = False
    markov: int = 0
    selector: tuple[int, int] | None = None
    seed: int = 0
    std: float = 0.3
    more: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Layers that the target has run before each hidden state that the head reads."""
        return tuple(layer + 1 for layer in self.ids)


def tensors_of(head: Head, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name, made on a device; norms lie around 1."""
    generator = torch.Generator(device).manual_seed(head.seed)
    hidden, q_rows, kv_rows = head.hidden, head.heads * head.dim, head.kv_heads * head.dim

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return (mean + head.std * torch.randn(shape, generator=generator, device=device)).to(dtype).cpu()

    made = {
        "fc.weight": normal(hidden, len(head.ids) * hidden),
        "hidden_norm.weight": normal(hidden, mean=1.0),
        "norm.weight": normal(hidden, mean=1.0),
    }
    for layer in range(head.layers):
        prefix = f"layers.{layer}."
        attention = {"q_proj": (q_rows, hidden), "k_proj": (kv_rows, hidden), "v_proj": (kv_rows, hidden)}
        for name, shape in {**attention, "o_proj": (hidden, q_rows)}.items():
            made[f"{prefix}self_attn.{name}.weight"] = normal(*shape)
            if head.bias:
                made[f"{prefix}self_attn.{name}.bias"] = normal(shape[0])
        for name in ("q_norm", "k_norm"):
            made[f"{prefix}self_attn.{name}.weight"] = normal(head.dim, mean=1.0)
        if head.sinks:
            made[f"{prefix}self_attn.attention_sink_bias"] = normal(head.heads)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}{name}.weight"] = normal(hidden, mean=1.0)
        for name, shape in {"gate_proj": (head.inner, hidden), "up_proj": (head.inner, hidden)}.items():
            made[f"{prefix}mlp.{name}.weight"] = normal(*shape)
        made[f"{prefix}mlp.down_proj.weight"] = normal(hidden, head.inner)
    if head.draft_vocab is not None:
        known = torch.randperm(head.vocab, generator=generator, device=device).cpu()[: head.draft_vocab].sort().values
        made["lm_head.weight"] = normal(head.draft_vocab, hidden)
        made["d2t"] = known - torch.arange(head.draft_vocab)
        made["t2d"] = torch.zeros(head.vocab, dtype=torch.bool).index_fill_(0, known, True)
    if head.own_embedding:
        made["embed_tokens.weight"] = normal(head.vocab, hidden)
    if head.markov:
        made["markov_head.markov_w1.weight"] = normal(head.vocab, head.markov)
        made["markov_head.markov_w2.weight"] = normal(head.draft_vocab or head.vocab, head.markov)
        made["confidence_head.proj.weight"] = normal(1, hidden + head.markov)
        made["confidence_head.proj.bias"] = normal(1)
    if head.selector is not None:
        rank = head.selector[0]
        for name, shape in {
            "predecessor_codebook": (head.vocab, rank),
            "successor_codebook": (head.vocab, rank),
        }.items():
            made[f"candidate_selector.{name}"] = normal(*shape)
        made["candidate_selector.hidden_projection.weight"] = normal(rank, hidden)
        for layer in range(head.layers):
            for name in ("attention_conv", "mlp_conv"):
                made[f"layers.{layer}.{name}.base_kernel"] = normal(2, TAPS, hidden)
                made[f"layers.{layer}.{name}.kernel_projection.weight"] = normal(2 * TAPS * (hidden // GROUP), hidden)
    return made


def write_z_lab(path: Path, head: Head, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """A checkpoint as z-lab publishes them; its values are made on a device."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": head.block_size,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": head.mask_id, "target_layer_ids": list(head.ids), **head.more},
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": 2,
        "num_target_layers": head.target_layers,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "transformers_version": "4.57.3",
        "use_cache": True,
        **_decoder(head),
        **({} if head.draft_vocab is None else {"draft_vocab_size": head.draft_vocab}),
        **head.top,
    }
    return _write(path, config, tensors_of(head, dtype, device))


def write_speculators(path: Path, head: Head, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """A checkpoint as `speculators` publishes them."""
    tokens = head.block_size - (not head.more.get("sample_from_anchor"))
    config = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": list(head.boundaries),
        "block_size": head.block_size,
        "draft_vocab_size": head.draft_vocab or head.vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "mask_token_id": head.mask_id,
        "max_anchors": 512,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **_decoder(head),
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        },
        "transformers_version": "5.17.0",
        **head.more,
        **head.top,
    }
    return _write(path, config, tensors_of(head, dtype, device))


def write_deepspec(path: Path, head: Head, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """A DSpark checkpoint as DeepSpec publishes them: everything at the top of the config."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": head.block_size,
        "confidence_head_with_markov": True,
        "dtype": str(dtype).removeprefix("torch."),
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": head.markov,
        "mask_token_id": head.mask_id,
        "num_anchors": 64,
        "num_target_layers": head.target_layers,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "target_layer_ids": list(head.ids),
        "transformers_version": "5.9.0",
        **_decoder(head),
        **head.more,
        **head.top,
    }
    return _write(path, config, tensors_of(head, dtype, device))


def dflash2_fields(head: Head) -> dict[str, Any]:
    """The fields of a DFlash2 head, in `dflash_config`, or in speculators' layout in the config."""
    assert head.selector is not None
    rank, count = head.selector
    return {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": rank, "selector_top_k": count}


WRITERS = {"z-lab": write_z_lab, "deepspec": write_deepspec, "speculators": write_speculators}


def _decoder(head: Head) -> dict[str, Any]:
    """The fields of a Qwen3 decoder."""
    return {
        "attention_bias": head.bias,
        "head_dim": head.dim,
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "initializer_range": 0.02,
        "intermediate_size": head.inner,
        "layer_types": list(head.layer_types or ["full_attention"] * head.layers),
        "max_position_embeddings": 2048,
        "max_window_layers": head.layers,
        "model_type": "qwen3",
        "num_attention_heads": head.heads,
        "num_hidden_layers": head.layers,
        "num_key_value_heads": head.kv_heads,
        "rms_norm_eps": 1e-6,
        "sliding_window": head.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": head.vocab,
    }


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
