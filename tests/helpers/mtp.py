"""Targets with an MTP layer in their checkpoint, as publishers store it, and the layer in straight lines."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.checkpoints import make_model
from tests.helpers.families import make_family
from tests.helpers.heads_definition import Definition, rms
from tests.helpers.hybrid import make_states

FAMILY = {
    "mimo": "qwen2",
    "nextn": "llama3",
    "step": "llama3",
    "mtp": "qwen3",
    "mimo-v2": "qwen2",
}  # of layout, a model that it may lie beside
LAYERS = 3
_PARTS = {
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    "nextn": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "step": ("eh_proj", "enorm", "hnorm", "transformer.shared_head.norm"),
    "mtp": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mimo-v2": ("eh_proj", "enorm", "hnorm", "final_layernorm"),
}
_MIMO = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "num_nextn_predict_layers": 1,
}


def random_mtp(model: PreTrainedModel, *, seed: int = 3, std: float = 0.3, neutral: float = 1.0) -> dict[str, Tensor]:
    """Tensors of an MTP layer as the model's last one, by plain names; norms lie around `neutral`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.get_text_config().hidden_size
    shapes = {f"layers.0.{name}": tensor.shape for name, tensor in model.get_decoder().layers[-1].state_dict().items()}
    shapes |= {"fc.weight": torch.Size((hidden, 2 * hidden))}
    shapes |= {f"{name}.weight": torch.Size((hidden,)) for name in _PARTS["mtp"][1:]}
    return {
        name: torch.randn(shape, generator=generator) * std + (neutral if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def random_layer(model: PreTrainedModel, layout: str, index: int) -> dict[str, Tensor]:
    """Tensors of MTP layer `index` as `random_mtp` draws them; in Step's layout with an output matrix.

    There smaller ones, because hidden states are compared before their norm.
    """
    if layout != "step":
        return random_mtp(model, seed=3 + index)
    shape = model.get_output_embeddings().weight.shape
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(30 + index)) * 0.3
    return random_mtp(model, seed=3 + index, std=0.1) | {"lm_head.weight": drawn}


def stored_names(layout: str, tensors: dict[str, Tensor], layers: int, index: int = 0) -> dict[str, Tensor]:
    """The tensors of MTP layer `index` by the names that publishers of a layout give them."""
    outer = {
        "mimo": f"model.mtp_layers.{index}.",
        "nextn": f"model.layers.{layers + index}.",
        "step": f"model.layers.{layers + index}.",
        "mtp": "mtp.",
        "mimo-v2": f"model.mtp.layers.{index}.",
    }[layout]
    parts = dict(zip(_PARTS["mtp"], _PARTS[layout], strict=True)) | {"lm_head": "transformer.shared_head.output"}
    made = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if layout == "mtp":
            if module in parts and index:
                continue  # once for all layers
            inner = name.replace("layers.0.", f"layers.{index}.")
        else:
            inner = f"{parts[module]}.{leaf}" if module in parts else name.split(".", 2)[2]
        if layout == "mimo-v2":
            inner = inner.replace("post_attention_layernorm", "pre_mlp_layernorm")
        made[outer + inner] = tensor.contiguous()
    return made


def add_to(directory: Path, extra: dict[str, Tensor], **fields: Any) -> Path:
    """Puts tensors, and fields of the config, into a saved checkpoint."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return directory


def write_target(path: Path, layout: str, **options: Any) -> tuple[Path, PreTrainedModel, dict[str, Tensor]]:
    """A target with an MTP layer: its directory, the live model without it, and the layer's tensors by plain names."""
    model = make_model(FAMILY[layout], num_hidden_layers=LAYERS, **options)
    model.save_pretrained(path)
    tensors = random_layer(model, layout, 0)
    extra = stored_names(layout, tensors, LAYERS)
    if layout == "nextn":  # with copies of what it shares
        table = model.get_input_embeddings().weight.detach().clone()
        at = f"model.layers.{LAYERS}."
        extra |= {f"{at}embed_tokens.weight": table, f"{at}shared_head.head.weight": table.clone()}
    return add_to(path, extra, **(_MIMO if layout == "mimo" else {})), model, tensors


def write_layers(path: Path, layout: str, depth: int) -> tuple[Path, PreTrainedModel, list[dict[str, Tensor]]]:
    """A target with several MTP layers: its directory, the live model without them, the tensors of each layer."""
    model = make_model(FAMILY[layout], num_hidden_layers=LAYERS)
    model.save_pretrained(path)
    made = [random_layer(model, layout, index) for index in range(depth)]
    if layout == "mtp":
        shared = {name: tensor for name, tensor in made[0].items() if not name.startswith("layers.")}
        made = [{**tensors, **shared} for tensors in made]
    extra: dict[str, Tensor] = {}
    for index, tensors in enumerate(made):
        extra |= stored_names(layout, tensors, LAYERS, index)
    return add_to(path, extra), model, made


@dataclass
class LayersDefinition:
    """Several MTP layers in straight lines: layer j over all positions, with the tokens 1 + j behind each."""

    layers: list[MtpDefinition]

    @property
    def before_norms(self) -> bool:
        """See `MtpDefinition`."""
        return self.layers[0].before_norms

    @torch.no_grad()
    def laws(self, features: Tensor, text: Tensor, k: int, fed: list[int] | None = None) -> list[Tensor]:
        """Logits of each of k drafts behind text [n], from features [n - 1, 1, hidden]. Each is made anew.

        Args:
            fed: the drafts that are read; None: the most probable ones.
        """
        depth, n, known, laws = len(self.layers), len(text), text.tolist(), []
        for j in range(k):
            g = features[:, 0]
            for index in range(min(j, depth - 1)):
                g = self.layers[index].behind(g, torch.tensor(known[1 + index : n + index]))
            last = self.layers[min(j, depth - 1)]
            for more in range(max(0, j + 1 - depth) + 1):
                shift = min(j, depth - 1)
                x = last.behind(g, torch.tensor(known[1 + shift : n + shift + more]))
                g = torch.cat((g, x[-1:]))
            laws.append(last.logits(x[-1]))
            known.append(int(laws[-1].argmax()) if fed is None else fed[j])
        return laws

    def drafts(self, features: Tensor, text: Tensor, k: int) -> tuple[list[int], list[float]]:
        """See `Definition.drafts`."""
        best = [law.topk(2) for law in self.laws(features, text, k)]
        return [int(each.indices[0]) for each in best], [float(each.values[0] - each.values[1]) for each in best]


@dataclass
class MtpDefinition(Definition):
    """An MTP layer; its hidden state is the target's behind the final norm, and its own behind its norm.

    Attributes:
        hidden_first: in what the first product multiplies.
        before_norms: hidden states are those before norms, and the output matrix is the layer's.
    """

    hidden_first: bool = False
    before_norms: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: dict[str, Tensor], layout: str) -> MtpDefinition:
        config = model.config
        rotary = model.get_decoder().rotary_emb
        return cls(
            tensors,
            dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            eps=config.rms_norm_eps,
            embed=model.get_input_embeddings().weight.detach(),
            lm_head=tensors.get("lm_head.weight", model.get_output_embeddings().weight.detach()),
            inv_freq=rotary.inv_freq,
            hidden_first=layout == "mimo",
            before_norms=layout == "step",
        )

    def condense(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def behind(self, g: Tensor, following: Tensor) -> Tensor:
        t, n, at = self.tensors, len(g), "layers.0."
        assert self.embed is not None
        e = rms(self.embed[following], t["pre_fc_norm_embedding.weight"], self.eps)
        h = rms(g, t["pre_fc_norm_hidden.weight"], self.eps)
        x = F.linear(torch.cat((h, e) if self.hidden_first else (e, h), 1), t["fc.weight"])
        x = x + self._attention(at, rms(x, t[f"{at}input_layernorm.weight"], self.eps), n)
        inner = rms(x, t[f"{at}post_attention_layernorm.weight"], self.eps)
        gate, up = F.linear(inner, t[f"{at}mlp.gate_proj.weight"]), F.linear(inner, t[f"{at}mlp.up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, t[f"{at}mlp.down_proj.weight"])
        return x if self.before_norms else rms(x, t["norm.weight"], self.eps)

    def logits(self, x: Tensor) -> Tensor:
        assert self.lm_head is not None
        if self.before_norms:
            x = rms(x, self.tensors["norm.weight"], self.eps)
        return F.linear(x, self.lm_head) * self.scale

    def feature(self, x: Tensor) -> Tensor:
        return x


def mtp_of_transformers() -> Any:
    """Their module of MTP layers; without it, or with one that cannot be asked layer by layer, the test is skipped."""
    layers = importlib.import_module("transformers.modeling_layers")
    found = getattr(layers, "MtpModel", None)
    if not hasattr(found, "forward_layer"):
        pytest.skip(f"transformers {transformers.__version__} has no MtpModel.forward_layer; 5.24 has")
    return found


def write_glm(path: Path) -> tuple[Path, Any]:
    """A GLM-4.5 with an MTP layer of experts, and transformers' own module of that layer."""
    live = make_family("glm4_moe")
    live.save_pretrained(path)
    layers = live.config.num_hidden_layers
    theirs = mtp_of_transformers()(live, 1).eval()
    generator = torch.Generator().manual_seed(4)
    extra: dict[str, Tensor] = {}
    own = {name: tensor for name, tensor in theirs.state_dict().items() if name.startswith("layers.0.")}
    for name, tensor in own.items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + float("norm" in name))
        inner = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if inner.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    extra[inner.replace("gate_up_proj", f"{expert}.{part}.weight")] = matrix.clone()
        elif inner.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                extra[inner.replace("down_proj", f"{expert}.down_proj.weight")] = matrix.clone()
        else:
            extra[inner] = tensor.clone()
    return add_to(path, {f"model.layers.{layers}.{name}": tensor for name, tensor in extra.items()}), theirs


_LING = {
    **{"mtp_block.": "", "self_attn.": "attention.", "o_proj.": "dense.", "post_norm.": "final_layernorm."},
    "e_score_correction_bias": "expert_bias",
}


def write_ling(path: Path, **sizes: Any) -> tuple[Path, Any]:
    """A Ling 3 with an MTP layer of latent attention and experts, and transformers' own module of that layer."""
    live = make_states("ling", num_hidden_layers=4, **sizes)  # the last attends: its norm is of the usual kind
    live.save_pretrained(path)
    config, layers = live.config, live.config.num_hidden_layers
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    theirs = mtp_of_transformers()(live, 1).eval()
    theirs.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(4)
    extra: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + float("norm" in name))
        for here, there in _LING.items():
            name = name.replace(here, there)
        at, part = f"model.layers.{layers}.{name.removeprefix('layers.0.')}", name.rpartition(".")[2]
        if part == "gate_up_proj":
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)
            for half, both in halves:
                extra |= _each_expert(at.replace(part, half), both)
        else:
            extra |= _each_expert(at, tensor)
    return add_to(path, extra, num_nextn_predict_layers=1), theirs


class NemotronMtp:
    """Nemotron's MTP layer by transformers: the first product before a model of one attention and one expert layer."""

    def __init__(self, live: PreTrainedModel) -> None:
        self.live, self.config = (
            make_states("nemotron_h", seed=4, layers_block_type=["full_attention", "moe"]),
            live.config,
        )
        self.embed, self.lm_head = live.get_input_embeddings(), live.get_output_embeddings()
        hidden, generator = live.config.hidden_size, torch.Generator().manual_seed(5)
        self.enorm, self.hnorm = (1 + 0.3 * torch.randn(hidden, generator=generator) for _ in range(2))
        self.eh_proj = 0.3 * torch.randn(hidden, 2 * hidden, generator=generator)

    def forward_layer(self, index: int, g: Tensor, places: Tensor, mask: None, input_ids: Tensor) -> Tensor:
        """The hidden states after the layer and its norm, [1, n, hidden]."""
        e, eps = self.embed(input_ids), self.config.layer_norm_epsilon
        x = F.linear(torch.cat((rms(e, self.enorm, eps), rms(g, self.hnorm, eps)), -1), self.eh_proj)
        found: Tensor = self.live.get_decoder()(inputs_embeds=x, use_cache=False).last_hidden_state
        return found

    def _project_to_logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.lm_head(x)
        return found

    def stored(self) -> dict[str, Tensor]:
        """Its tensors by the names of its publisher."""
        first = {"eh_proj": self.eh_proj, "enorm": self.enorm, "hnorm": self.hnorm}
        found = {f"mtp.layers.0.{name}.weight": tensor for name, tensor in first.items()}
        for name, tensor in self.live.state_dict().items():
            if name.startswith("model.layers."):
                found |= _each_expert(name.replace("model.", "mtp.", 1), tensor)
            elif name.startswith("model.norm"):
                found["mtp.layers.1.final_layernorm.weight"] = tensor.clone()
        return found


def _each_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor, or each expert's part of it."""
    at, _, part = name.rpartition(".")
    if tensor.dim() != 3:
        return {name: tensor.clone()}
    return {f"{at}.{expert}.{part}.weight": matrix.clone() for expert, matrix in enumerate(tensor)}


def write_nemotron(path: Path) -> tuple[Path, NemotronMtp]:
    """A Nemotron with an MTP layer, and that layer by transformers."""
    live = make_states("nemotron_h")
    live.save_pretrained(path)
    theirs = NemotronMtp(live)
    return add_to(
        path, theirs.stored(), num_nextn_predict_layers=1, mtp_layers_block_type=["full_attention", "moe"]
    ), theirs
