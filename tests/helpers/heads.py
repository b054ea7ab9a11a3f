"""Learned drafters with random weights, written as their publishers write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastspec.config import Config
from fastspec.engine.build import build
from fastspec.engine.engine import Engine
from fastspec.engine.settings import settings_of
from fastspec.kernels.ops import Ops
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.vocab import SharedVocab
from fastspec.sampling.rules import Verification

LAYERS, HIDDEN, VOCAB, DRAFTED = 6, 64, 101, 40


def eagle3_tensors(
    *,
    seed: int = 0,
    hidden: int = 32,
    target_hidden: int = HIDDEN,
    inner: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    layers: int = 1,
    read: int = 3,
    vocab: int = VOCAB,
    drafted: int = DRAFTED,
    qk_norm: bool = False,
    attention_bias: bool = False,
    fc_bias: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    own_embed: bool = True,
    own_head: bool = True,
    std: float = 0.2,
) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head by the names of its first layout; no weight is left at a neutral value."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        made[f"{name}.weight"] = torch.randn(*shape, generator=generator) * std

    def vector(name: str, size: int, around: float = 0.0) -> None:
        made[name] = around + torch.randn(size, generator=generator) * std

    matrix("fc", hidden, read * target_hidden)
    if fc_bias:
        vector("fc.bias", hidden)
    if norm_before_fc:
        vector("input_norm.weight", read * target_hidden, 1.0)
    for index in range(read if fc_norm else 0):
        vector(f"fc_norm.{index}.weight", target_hidden, 1.0)
    for layer in range(layers):
        at = "midlayer." if layer == 0 else f"layers.{layer}."
        width = hidden if layer else 2 * hidden
        vector(f"{at}input_layernorm.weight", hidden, 1.0)
        if layer == 0:
            vector(f"{at}hidden_norm.weight", hidden, 1.0)
        for which, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{at}self_attn.{which}_proj", count * dim, width)
            if attention_bias:
                vector(f"{at}self_attn.{which}_proj.bias", count * dim)
        matrix(f"{at}self_attn.o_proj", hidden, heads * dim)
        if attention_bias:
            vector(f"{at}self_attn.o_proj.bias", hidden)
        for which in "qk" if qk_norm else "":
            vector(f"{at}self_attn.{which}_norm.weight", dim, 1.0)
        vector(f"{at}post_attention_layernorm.weight", hidden, 1.0)
        matrix(f"{at}mlp.gate_proj", inner, hidden)
        matrix(f"{at}mlp.up_proj", inner, hidden)
        matrix(f"{at}mlp.down_proj", hidden, inner)
    vector("norm.weight", hidden, 1.0)
    if own_head:
        matrix("lm_head", drafted, hidden)
    if own_embed:
        matrix("embed_tokens", vocab, hidden)
    if drafted < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        made["d2t"] = ids - torch.arange(drafted)
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return made


def peagle_tensors(**options: Any) -> dict[str, Tensor]:
    """Tensors of a P-EAGLE head by the names of its first layout."""
    made = eagle3_tensors(**{"layers": 2, "qk_norm": True, **options})
    read = made["fc.weight"].shape[1]
    made["mask_hidden"] = torch.randn(1, 1, read, generator=torch.Generator().manual_seed(9))
    return made


def _sizes(tensors: dict[str, Tensor], dim: int) -> dict[str, Any]:
    """What a config says of the layers of these tensors; `dim` of heads without norms."""
    at = "midlayer.self_attn."
    hidden, spread = tensors["norm.weight"].shape[0], tensors[f"{at}o_proj.weight"].shape[1]
    dim = tensors[f"{at}q_norm.weight"].shape[0] if f"{at}q_norm.weight" in tensors else dim
    return {
        "hidden_size": hidden,
        "intermediate_size": tensors["midlayer.mlp.up_proj.weight"].shape[0],
        "num_attention_heads": spread // dim,
        "num_key_value_heads": tensors[f"{at}k_proj.weight"].shape[0] // dim,
        "head_dim": dim,
        "num_hidden_layers": sum(name.endswith("input_layernorm.weight") for name in tensors),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 24,  # of the trainer's texts: must be ignored
        "attention_bias": f"{at}q_proj.bias" in tensors,
    }


def _vocab(tensors: dict[str, Tensor], vocab: int) -> tuple[int, int]:
    return vocab, tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab


def write_eagle3(path: Path, tensors: dict[str, Tensor], *, vocab: int = VOCAB, **fields: Any) -> Path:
    """A head in the layout of EAGLE and SGLang."""
    path.mkdir(parents=True, exist_ok=True)
    vocab_size, drafted = _vocab(tensors, vocab)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_sizes(tensors, fields.get("head_dim", 16)),
        "vocab_size": vocab_size,
        "draft_vocab_size": drafted,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **fields,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


def write_speculators(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    vocab: int = VOCAB,
    verifier: str = "LlamaForCausalLM",
    boundaries: list[int] | None = None,
    inner: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A head in the layout of speculators."""
    path.mkdir(parents=True, exist_ok=True)
    vocab_size, drafted = _vocab(tensors, vocab)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "somebody/target", "architectures": [verifier]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **_sizes(tensors, (inner or {}).get("head_dim", 16)),
            "vocab_size": vocab_size,
        },
        "draft_vocab_size": drafted,
        "embed_requires_grad": False,
        "torch_dtype": "float32",
        **({} if boundaries is None else {"eagle_aux_hidden_state_layer_ids": boundaries}),
        **fields,
    }
    config["transformer_layer_config"].update(inner or {})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    stored = {name.replace("midlayer.", "layers.0."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


def engine_with(
    target: Path,
    head: Path | str,
    *,
    k: int = 3,
    batch: int = 3,
    max_length: int = 200,
    proposer: Any = None,
    verification: Verification = "block",
    feature_layers: tuple[int, ...] | None = None,
    exact: bool = True,
    quantization: str | None = None,
    draft_vocab: Sequence[int] | None = None,
    ops: Ops | None = None,
) -> Engine:
    """An engine over a target and a head, both from their files, with weights filled; ops: None for the CPU's."""
    found, drafting = resolve_pair(target, head, (None, None), (quantization, None), feature_layers, draft_vocab)
    config = Config(
        num_speculative_tokens=k,
        max_batch_size=batch,
        max_length=max_length,
        page_size=16,
        device="cpu",
        verification=verification,
        proposer=proposer,
        exact=exact,
        progress=False,
    )
    settings = settings_of(found, drafting, config)
    if ops is not None:
        settings = replace(settings, layout=replace(settings.layout, ops=ops))
    engine, pending = build(settings, found, drafting, shared_vocab=SharedVocab(found.spec.vocab_size))
    for weights in pending:
        weights.fill()
    return engine
