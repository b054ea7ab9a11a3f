"""An MTP layer in torch (multi-token prediction, arXiv 2412.19437), and the checkpoint of its target that holds it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.safetensors_files import INDEX, SINGLE, ShardTensors

from .head import Attention, DraftHead, HeadShape, Mlp, Norm, Past, Variant

OWN, VOCAB = "mtp.safetensors", "draft_vocab.json"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
RENAMED = {SINGLE: "target.safetensors"}  # a file of the usual name would be read alone
OTHERS = (".json", ".jinja", ".model", ".txt")
ROPES = ("default", "linear", "llama3")
PARTS = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}  # DeepSeek's names
PROBED = 8


class Block(nn.Module):
    """A decoder layer with the names and the arithmetic of the target's own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, shape.hidden), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, eps=shape.rms_eps)
        self.post_attention_layernorm = Norm(shape.hidden, eps=shape.rms_eps)

    def forward(self, x: Tensor, first: int, past: Past) -> Tensor:
        """Maps x [rows, starts, hidden] to the same shape, start i at position first + i."""
        x = x + self.self_attn(self.input_layernorm(x), first, past)
        mapped: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mapped


class MtpHead(DraftHead):
    """One MTP layer, used again for each further draft. Embedding and output matrix are the target's.

    It reads the target's last hidden state, after the final norm; later its own state, after its own last norm.
    """

    def __init__(self, shape: HeadShape, drafted: Tensor) -> None:
        super().__init__(shape, drafted)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)  # of the embedding and one state
        self.enorm, self.hnorm = (Norm(shape.hidden, eps=shape.rms_eps) for _ in range(2))
        self.layer = Block(shape)
        self.lm_head.requires_grad_(False)

    def unroll(self, features: Tensor, ids: Tensor, embedding: Tensor, passes: int) -> list[Tensor]:
        """Drafts from every position of known text, fed the text's own tokens; see `DraftHead.unroll`."""
        starts, past, said = ids.shape[1] - passes, Past(), []
        state = features[:, :starts]
        for place in range(passes):
            embedded = self.enorm(F.embedding(ids[:, 1 + place : 1 + place + starts], embedding))
            x = self.fc(torch.cat((embedded, self.hnorm(state)), -1))
            state = self.norm(self.layer(x, place, past))
            said.append(self.lm_head(state))
        return said


def layer_variant(model: PreTrainedModel) -> Variant:
    """What an MTP layer for a target has beyond a Llama's layer: norms of queries and keys, and the target's rope."""
    names, plain = model.model.layers[-1].state_dict(), model.config.rope_parameters["rope_type"] == "default"
    frequencies = () if plain else tuple(model.model.rotary_emb.inv_freq.tolist())
    return Variant(qk_norm="self_attn.q_norm.weight" in names, frequencies=frequencies)


@torch.no_grad()
def check_layer(model: PreTrainedModel, shape: HeadShape) -> None:
    """Checks that a target's last layer is a `Block`: its tensors, its attention, and what it computes.

    Raises:
        ValueError: it is not. An MTP layer trained here would not be the one that runs.
    """
    block, inner = Block(shape), model.model
    last = {name: tensor.float().cpu() for name, tensor in inner.layers[-1].state_dict().items()}
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (last, block.state_dict())]
    full = "sliding_attention" not in (getattr(model.config, "layer_types", None) or ())
    fits = shapes[0] == shapes[1] and full and model.config.rope_parameters["rope_type"] in ROPES
    if fits:
        block.load_state_dict(last)
        ids = torch.arange(PROBED, device=model.device)[None]
        states = inner(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        before, after = (each.float().cpu() for each in states[-2:])
        found = F.rms_norm(block(before, 0, Past()), (shape.hidden,), inner.norm.weight.float().cpu(), shape.rms_eps)
        fits = bool(
            (found - after).norm() < (1e-4 if model.dtype == torch.float32 else 5e-2) * after.norm()
        )  # rounding
    if not fits:
        raise ValueError(
            f"The layers of this {type(model).__name__} are not those of a Llama or a Qwen3 with full attention and "
            "without biases: no MTP layer is trained for it. Train an EAGLE-3 head."
        )


def save_mtp(head: MtpHead, target: str | Path, folder: Path) -> None:
    """Writes the target's checkpoint again, with the trained layer behind its layers, as DeepSeek stores it.

    The layer is in a file of its own, mtp.safetensors. If it does not draft all ids, its ids are in draft_vocab.json.

    Args:
        head: the layer.
        target: folder or name of its target.
        folder: gets the checkpoint.
    """
    source = resolve(target, role="target").directory
    assert source is not None, "transformers has loaded it"
    single = (source / SINGLE).exists()
    stored = dict.fromkeys(ShardTensors(source).infos(), SINGLE) if single else _weight_map(source)
    layers = _layers(source)
    own = {
        _stored(name, layers): parameter.detach().cpu().bfloat16().contiguous()
        for name, parameter in head.named_parameters()
        if name != OUTPUT
    }
    if own.keys() & stored.keys():
        raise ValueError(f"{target} has an MTP layer already: draft='mtp' reads it.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in {*stored.values(), *(each.name for each in source.iterdir() if each.suffix in OTHERS)} - {INDEX}:
        shutil.copyfile(source / file, folder / RENAMED.get(file, file))
    save_file(own, folder / OWN, metadata={"format": "pt"})
    names = {name: RENAMED.get(file, file) for name, file in stored.items()} | dict.fromkeys(own, OWN)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=1) + "\n")
    if len(head.d2t) < head.shape.vocab:
        (folder / VOCAB).write_text(json.dumps(head.drafted.tolist()) + "\n")


def load_mtp(folder: Path, shape: HeadShape) -> MtpHead:
    """Reads what `save_mtp` wrote: the layer in float32, with the target's rows of its output matrix.

    Args:
        folder: the checkpoint.
        shape: sizes of the layer; its `draft_vocab` is read from the folder.
    """
    path, layers, source = folder / VOCAB, _layers(folder), ShardTensors(folder)
    drafted = torch.tensor(json.loads(path.read_text())) if path.exists() else torch.arange(shape.vocab)
    head = MtpHead(replace(shape, draft_vocab=len(drafted)), drafted)
    with torch.no_grad(), source.open():
        output = source.read(OUTPUT if OUTPUT in source.infos() else EMBEDDING)
        for name, parameter in head.named_parameters():
            parameter.copy_(output[drafted] if name == OUTPUT else source.read(_stored(name, layers)))
    return head.requires_grad_(False)


def _layers(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])


def _weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def _stored(name: str, layers: int) -> str:
    """The name in the checkpoint of a parameter, in a target of so many layers."""
    module, _, leaf = name.rpartition(".")
    return f"model.layers.{layers}.{PARTS.get(module, module.removeprefix('layer.'))}.{leaf}"
