"""Writes a head as a folder in the published layout of its type, and reads it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from .dflash import Block, DFlashHead
from .head import DraftHead, Eagle3Head, HeadShape

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Config = dict[str, object]


def save(head: DraftHead, target: PretrainedConfig, boundaries: Sequence[int], folder: Path) -> None:
    """Writes config.json and bfloat16 weights into a folder.

    The embedding is the target's and is not written. d2t holds offsets: the target's id is the draft's id plus its
    entry. t2d marks the target's tokens that can be drafted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_config(head, target, boundaries), indent=2) + "\n")


def load(folder: Path) -> tuple[DraftHead, tuple[int, ...]]:
    """Reads a folder that `save` wrote: the head in float32, and the boundaries it reads."""
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    own = config.get("dflash_config")
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] if own is None else own["target_layer_ids"]
    shape = HeadShape(
        hidden=config["hidden_size"],
        features=len(ids),
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        draft_vocab=config["draft_vocab_size"],
        rope_theta=config["rope_theta"],
        rms_eps=config["rms_norm_eps"],
    )
    drafted = tensors["t2d"].nonzero()[:, 0]
    head: DraftHead
    if own is None:
        head = Eagle3Head(shape, drafted)
    else:
        block = Block(config["num_hidden_layers"], config["block_size"], own["mask_token_id"])
        head = DFlashHead(shape, block, drafted)
    head.load_state_dict(tensors)
    return head.requires_grad_(False), tuple(index + 1 for index in ids)


def _config(head: DraftHead, target: PretrainedConfig, boundaries: Sequence[int]) -> Config:
    shape = head.shape
    config: Config = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
    }
    layers = [boundary - 1 for boundary in boundaries]
    return config | (_dflash(head, target, layers) if isinstance(head, DFlashHead) else _eagle3(layers))


def _eagle3(layers: Sequence[int]) -> Config:
    """Fields of an EAGLE-3 head that reads the outputs of these layers.

    SGLang's ids name a layer whose output is read; vLLM reads layer_ids, which count the layers below.
    """
    ids = {"eagle_aux_hidden_state_layer_ids": list(layers), "layer_ids": [layer + 1 for layer in layers]}
    config: Config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_config": {"use_aux_hidden_state": True, **ids},
    }
    return config if len(layers) == 3 else config | {"num_aux_hidden_states": len(layers)}


def _dflash(head: DFlashHead, target: PretrainedConfig, layers: Sequence[int]) -> Config:
    """Fields of a DFlash head in the layout of z-lab; it reads the outputs of these layers of the target."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": head.block.layers,
        "block_size": head.block.size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": head.block.mask_id, "target_layer_ids": list(layers)},
    }
