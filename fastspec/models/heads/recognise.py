"""Which learned drafter a checkpoint is: by its tensors and its config, never by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from fastspec.errors import UnsupportedModel

HeadKind = Literal["eagle3", "dflash", "mtp"]
Layout = Literal["eagle", "z-lab", "speculators", "mtp", "nextn", "mimo"]

NAMES: Final[Mapping[HeadKind, str]] = {"eagle3": "EAGLE-3", "dflash": "DFlash", "mtp": "MTP"}
LAYOUTS: Final[Mapping[Layout, str]] = {
    "eagle": "layout of EAGLE and SGLang",
    "z-lab": "layout of z-lab",
    "speculators": "layout of speculators",
    "mtp": "layout of Qwen",
    "nextn": "layout of DeepSeek and GLM",
    "mimo": "layout of MiMo",
}
SPECULATORS: Final = "speculators_model_type"
SUPPORTED: Final = "supported heads: EAGLE-3 and DFlash, each in its first layout and in that of speculators"
_WITHIN: Final = (
    "an MTP layer drafts for the model in whose checkpoint it lies: give that checkpoint as target, with draft='mtp'; "
    "put the layer's tensors into the target's directory where they lie apart"
)
# config keys and tensors that only the relatives of these heads have
_RELATIVES_BY_KEY: Final = {
    "medusa_num_heads": "Medusa",
    "dspark_noise_token_id": "DSpark",
    "dspark_config": "DSpark",
    "dflash2_config": "DFlash2",
    "xpress_config": "XPress",
}
_RELATIVES_BY_TENSOR: Final = {
    "mask_hidden": "P-EAGLE",
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "medusa_head.": "Medusa",
    "mtp.": "MTP",
    "mtp_layers.": "MTP",
    ".eh_proj.": "MTP",  # after the number of a layer, in the layout of DeepSeek and GLM
}
_PREFIXES: Final = (("model.", ""), ("midlayer.", "layers.0."))
_OLD_NAMES: Final = {
    f"aux_norm_{place}.weight": f"fc_norm.{index}.weight" for index, place in enumerate(("low", "mid", "high"))
}


@dataclass(frozen=True, slots=True)
class Recognised:
    """What a checkpoint was found to be."""

    kind: HeadKind
    layout: Layout

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        return f"{NAMES[self.kind]} head ({LAYOUTS[self.layout]})"


def plain_name(stored: str) -> str:
    """The name of a head's tensor here: one name for layouts that differ only in names."""
    for old, new in _PREFIXES:
        if stored.startswith(old):
            stored = new + stored.removeprefix(old)
    return _OLD_NAMES.get(stored, stored)


def says_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config is plainly a drafter's: what can be said before any weight is fetched.

    A head whose config looks like an ordinary model's is recognised later, by its tensors.
    """
    keys = {SPECULATORS, "speculators_config", "eagle_config", "draft_vocab_size", "dflash_config", *_RELATIVES_BY_KEY}
    marks = ("eagle3", "dflash", "dspark", "medusa", "speculator", "peagle")
    return bool(keys & raw.keys()) or any(mark in _architectures(raw).lower() for mark in marks)


def recognise(raw: Mapping[str, Any], stored: Collection[str]) -> Recognised | None:
    """The head that a config and the names of the stored tensors make, None for an ordinary model.

    Args:
        raw: `config.json`.
        stored: names of tensors, as they are stored.

    Raises:
        UnsupportedModel: it is a drafter of another kind; the message names the kind.
    """
    names = {plain_name(name) for name in stored}
    _refuse_relatives(raw, stored, names)
    layout: Layout | None = "speculators" if SPECULATORS in raw or "speculators_config" in raw else None
    if "layers.0.hidden_norm.weight" in names:
        return Recognised("eagle3", layout or "eagle")
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return Recognised("dflash", layout or "z-lab")
    if "fc.weight" in names and "layers.0.input_layernorm.weight" not in names:
        _refuse("EAGLE-1 or EAGLE-2")
    if layout:
        _refuse(f"{SPECULATORS}={raw.get(SPECULATORS)!r} with tensors of none of these")
    return None


def _architectures(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return " ".join(map(str, named)) if isinstance(named, list) else ""


def _refuse_relatives(raw: Mapping[str, Any], stored: Collection[str], names: Collection[str]) -> None:
    asked = raw.get(SPECULATORS)
    if asked not in (None, "eagle3", "dflash"):
        _refuse(f"{SPECULATORS}={asked!r}", _WITHIN if asked == "mtp" else SUPPORTED)
    for key, relative in _RELATIVES_BY_KEY.items():
        if raw.get(key) is not None:
            _refuse(f"{relative} ({key} in the config)")
    if "dflash2" in _architectures(raw).lower():
        _refuse("DFlash2")
    embeds = any(name.endswith("embed_tokens.weight") and name.startswith("model.") for name in stored)
    whole = embeds and not says_head(raw)  # an ordinary model may have MTP layers after its own
    for mark, relative in _RELATIVES_BY_TENSOR.items():
        found = next((name for name in names if name.startswith(mark) or (mark[0] == "." and mark in name)), None)
        if found is not None and not whole:
            _refuse(f"{relative} (it holds {found})", _WITHIN if relative == NAMES["mtp"] else SUPPORTED)


def _refuse(what: str, instead: str = SUPPORTED) -> NoReturn:
    raise UnsupportedModel(f"this is a learned drafter that is not supported: {what}; {instead}")
