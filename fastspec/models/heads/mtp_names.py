"""Finds multi-token prediction (MTP) layers among the tensors of a checkpoint, by their names.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) has the formulas; publishers store the same parts under different names.
Qwen's layout has the first product and the norms once for all layers. In other layouts each layer has its own. In
Nemotron's an MTP layer is two stored layers: attention, and experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

MtpLayout = Literal["mtp", "nextn", "mimo", "nemotron", "mimo-v2"]

FC: Final = "fc"
EMBED_NORM: Final = "pre_fc_norm_embedding"
HIDDEN_NORM: Final = "pre_fc_norm_hidden"
NORM: Final = "norm"
LAYER: Final = "model.layers.0."
_WRAPPED: Final = ("model.", "language_model.")
_PLACES: Final[Mapping[MtpLayout, re.Pattern[str]]] = {
    "mtp": re.compile(r"mtp\.(?:layers\.(\d+)\.)?(.+)"),
    "nextn": re.compile(r"layers\.(\d+)\.(.+)"),
    "mimo": re.compile(r"mtp_layers\.(\d+)\.(.+)"),
    "nemotron": re.compile(r"mtp\.layers\.(\d+)\.(.+)"),
    "mimo-v2": re.compile(r"mtp\.layers\.(\d+)\.(.+)"),
}
_ENDS: Final = {"eh_proj": FC, "enorm": EMBED_NORM, "hnorm": HIDDEN_NORM, "final_layernorm": NORM}
_NAMES: Final[Mapping[MtpLayout, Mapping[str, str]]] = {
    "mtp": {},
    "nextn": {"eh_proj": FC, "enorm": EMBED_NORM, "hnorm": HIDDEN_NORM, "shared_head.norm": NORM},
    "mimo": {
        "input_proj": FC,
        "token_layernorm": EMBED_NORM,
        "hidden_layernorm": HIDDEN_NORM,
        "final_layernorm": NORM,
    },
    "nemotron": _ENDS,
    "mimo-v2": {**_ENDS, "pre_mlp_layernorm": f"{LAYER}post_attention_layernorm"},
}
SECOND_NORM: Final = "mlp_norm"  # name of the norm of Nemotron's second stored layer; that of the first is "norm"
_MIXER: Final = re.compile(r"mixer\.[qkvo]_proj")  # parts of Nemotron's first stored layer
_COPIES: Final = ("embed_tokens", "shared_head.head")  # copies of the model's own matrices, which are not read


@dataclass(frozen=True, slots=True)
class StoredMtp:
    """MTP layers that a checkpoint contains in addition to its model.

    Attributes:
        layout: naming of the tensors: "mtp" is Qwen's, "nextn" DeepSeek's and GLM's, "mimo" MiMo's,
            "nemotron" Nemotron's.
        depth: number of MTP layers.
        names: tensors of all MTP layers: name in this package -> stored name. Names of the first layer are fc,
            pre_fc_norm_embedding, pre_fc_norm_hidden and norm, and `model.layers.0.*` for the decoder layer. Those of
            layer j are `part_name` and `model.layers.j.*`.
        stored: stored names of all MTP layers' tensors, including copies of shared matrices.
    """

    layout: MtpLayout
    depth: int
    names: Mapping[str, str]
    stored: frozenset[str]

    @property
    def hidden_first(self) -> bool:
        """True if the first product reads the hidden state before the embedding."""
        return self.layout == "mimo"

    @property
    def shares_parts(self) -> bool:
        """True if all layers have the first product and the norms of the first one."""
        return self.layout == "mtp"


def part_name(module: str, index: int) -> str:
    """Returns the name in this package of a part of MTP layer `index` besides its decoder layer."""
    return f"{module}.{index}" if index else module


def find_mtp(stored: Collection[str], layers: int) -> StoredMtp | None:
    """Returns the MTP layers of a checkpoint. None if there are none.

    Args:
        stored: stored names of the checkpoint's tensors.
        layers: number of layers of the model. In DeepSeek's layout layers with higher numbers are MTP layers.
    """
    plain = {name: _unwrapped(name) for name in stored}
    for layout in _PLACES:
        found = {name: place for name, text in plain.items() if (place := _place(layout, text, layers)) is not None}
        modules = {module for _, module, _ in found.values()}
        if FC in modules and (layout != "nemotron" or any(".mixer." in module for module in modules)):
            return _stored(layout, found)
    return None


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPED):
        name = name.split(".", 1)[1]
    return name


def _place(layout: MtpLayout, text: str, layers: int) -> tuple[int, str, str] | None:
    """Splits a stored name into (number of the MTP layer, module by its name in `StoredMtp.names`, parameter).

    None: not a tensor of an MTP layer.
    """
    match = _PLACES[layout].fullmatch(text)
    if match is None:
        return None
    index = int(match[1] or 0) - (layers if layout == "nextn" else 0)
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
    """Returns the name of a module of the first or second stored layer. One that belongs to the other keeps its own."""
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
    """Returns the name in this package of a module of MTP layer `index`."""
    if module.startswith(LAYER):
        return f"model.layers.{index}.{module.removeprefix(LAYER)}"
    return part_name(module, index)
