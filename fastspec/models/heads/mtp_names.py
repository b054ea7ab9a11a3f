"""Finds multi-token prediction (MTP) layers among the tensors of a checkpoint, by their names.

The formulas are those of DeepSeek-V3 (arXiv 2412.19437, section 2.2). Publishers store the same tensors under different
names. In Qwen's layout all MTP layers share the projection `fc` and the norms before and after the decoder layer. In
other layouts each layer has its own. In Nemotron's layout an MTP layer is stored as two layers: attention, and experts.
In Step's layout each MTP layer has an output matrix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

MtpLayout = Literal["mtp", "step", "nextn", "mimo", "nemotron", "mimo-v2"]

FC: Final = "fc"
EMBED_NORM: Final = "pre_fc_norm_embedding"
HIDDEN_NORM: Final = "pre_fc_norm_hidden"
NORM: Final = "norm"
OUTPUT: Final = "lm_head"
LAYER: Final = "model.layers.0."
_WRAPPED: Final = ("model.", "language_model.")
_PLACES: Final[Mapping[MtpLayout, re.Pattern[str]]] = {
    "mtp": re.compile(r"mtp\.(?:layers\.(\d+)\.)?(.+)"),
    "step": re.compile(r"layers\.(\d+)\.(.+)"),
    "nextn": re.compile(r"layers\.(\d+)\.(.+)"),
    "mimo": re.compile(r"mtp_layers\.(\d+)\.(.+)"),
    "nemotron": re.compile(r"mtp\.layers\.(\d+)\.(.+)"),
    "mimo-v2": re.compile(r"mtp\.layers\.(\d+)\.(.+)"),
}
_ENDS: Final = {"eh_proj": FC, "enorm": EMBED_NORM, "hnorm": HIDDEN_NORM, "final_layernorm": NORM}
_NAMES: Final[Mapping[MtpLayout, Mapping[str, str]]] = {
    "mtp": {},
    "step": {**_ENDS, "transformer.shared_head.norm": NORM, "transformer.shared_head.output": OUTPUT},
    "nextn": {**_ENDS, "shared_head.norm": NORM},  # Ling has final_layernorm, others shared_head.norm
    "mimo": {
        "input_proj": FC,
        "token_layernorm": EMBED_NORM,
        "hidden_layernorm": HIDDEN_NORM,
        "final_layernorm": NORM,
    },
    "nemotron": _ENDS,
    "mimo-v2": {**_ENDS, "pre_mlp_layernorm": f"{LAYER}post_attention_layernorm"},
}
SECOND_NORM: Final = "mlp_norm"  # norm of the second layer that Nemotron stores for an MTP layer; the first has "norm"
_MIXER: Final = re.compile(r"mixer\.[qkvo]_proj")  # matrices of the first layer that Nemotron stores for an MTP layer
_COPIES: Final = ("embed_tokens", "shared_head.head")  # copies of the model's own matrices, which are not read


@dataclass(frozen=True, slots=True)
class StoredMtp:
    """MTP layers that a checkpoint contains in addition to its model.

    Attributes:
        layout: publisher whose names the tensors have: "mtp" is Qwen, "nextn" is DeepSeek, GLM and Ling, "step" is
            Step 3.5 and 3.7, "mimo" is MiMo, "mimo-v2" is MiMo-V2, "nemotron" is Nemotron.
        depth: number of MTP layers.
        names: name of a tensor in this package -> its stored name, for all MTP layers. The first layer has the names
            fc, pre_fc_norm_embedding, pre_fc_norm_hidden, norm and in Step's layout lm_head, and `model.layers.0.*` for
            its decoder layer. Layer j has the names that `part_name` makes from these, and `model.layers.j.*`.
        stored: stored names of all tensors of MTP layers, including copies of the model's embedding and output matrix.
    """

    layout: MtpLayout
    depth: int
    names: Mapping[str, str]
    stored: frozenset[str]

    @property
    def hidden_first(self) -> bool:
        """True if the hidden state comes before the embedding in the input of `fc`."""
        return self.layout == "mimo"

    @property
    def shares_parts(self) -> bool:
        """True if all MTP layers use the same `fc` and the same norms outside of their decoder layer."""
        return self.layout == "mtp"

    @property
    def own_heads(self) -> bool:
        """True if each MTP layer has an output matrix. Then hidden states are read before norms; see `MtpSpec`."""
        return self.layout == "step"


def part_name(module: str, index: int) -> str:
    """Returns this package's name of a module of MTP layer `index`, such as fc, outside of its decoder layer.

    Args:
        module: name of the module in the first MTP layer.
        index: index of the MTP layer, from 0.
    """
    return f"{module}.{index}" if index else module


def find_mtp(stored: Collection[str], layers: int) -> StoredMtp | None:
    """Returns the MTP layers of a checkpoint. None if there are none.

    Args:
        stored: stored names of the checkpoint's tensors.
        layers: number of layers of the model. In DeepSeek's layout, layers from this index on are MTP layers.
    """
    plain = {name: _unwrapped(name) for name in stored}
    for layout in _PLACES:
        found = {name: place for name, text in plain.items() if (place := _place(layout, text, layers)) is not None}
        modules = {module for _, module, _ in found.values()}
        if FC in modules and _fits(layout, modules):
            return _stored(layout, found)
    return None


def _fits(layout: MtpLayout, modules: Collection[str]) -> bool:
    """True if modules of MTP layers can belong to `layout`, and not only to another layout with the same places."""
    if layout == "nemotron":
        return any(".mixer." in module for module in modules)
    return layout != "step" or OUTPUT in modules


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPED):
        name = name.split(".", 1)[1]
    return name


def _place(layout: MtpLayout, text: str, layers: int) -> tuple[int, str, str] | None:
    """Parses the stored name of a tensor in one layout.

    Args:
        layout: the layout.
        text: the name, without prefixes.
        layers: number of layers of the model.

    Returns:
        (index of the MTP layer, name of the module as in `StoredMtp.names`, name of the parameter). None if the tensor
        does not belong to an MTP layer.
    """
    match = _PLACES[layout].fullmatch(text)
    if match is None:
        return None
    index = int(match[1] or 0) - (layers if layout in ("nextn", "step") else 0)
    if index < 0:
        return None
    module, _, leaf = match[2].rpartition(".")
    if layout == "mtp" and match[1] is None:
        return index, module, leaf
    if layout == "nemotron":
        return index // 2, _of_nemotron(index % 2, module), leaf
    renamed = _NAMES[layout]
    return index, renamed.get(module, f"{LAYER}{module}"), leaf


def _of_nemotron(second: int, module: str) -> str:
    """Returns this package's name of a module in one of the two layers that Nemotron stores for an MTP layer.

    A module that does not belong in this stored layer gets a name with "other.", so that it is found to be unknown.

    Args:
        second: 0 for the first stored layer, with attention. 1 for the second, with experts.
        module: stored name of the module, without the prefix of its layer.
    """
    if module in _ENDS:
        return _ENDS[module]
    if module == "norm":
        module = SECOND_NORM if second else module
    elif bool(second) == (_MIXER.fullmatch(module) is not None):
        module = f"other.{module}"
    return LAYER + module.replace("mixer.experts.", "mlp.experts.")


def _stored(layout: MtpLayout, found: Mapping[str, tuple[int, str, str]]) -> StoredMtp:
    copies = {f"{LAYER}{module}" for module in _COPIES}
    names = {
        f"{_of_layer(module, index)}.{leaf}": name
        for name, (index, module, leaf) in found.items()
        if module not in (*copies, *_COPIES)
    }
    depth = 1 + max(index for index, _, _ in found.values())
    return StoredMtp(layout, depth, names, frozenset(found))


def _of_layer(module: str, index: int) -> str:
    """Returns this package's name of a module of MTP layer `index`, from its name in the first MTP layer."""
    if module.startswith(LAYER):
        return f"model.layers.{index}.{module.removeprefix(LAYER)}"
    return part_name(module, index)
