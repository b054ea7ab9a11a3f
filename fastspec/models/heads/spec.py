"""Spec of a learned drafter: its type, its sizes, and the hidden states that it reads.

The type follows from its tensors and its config, never from its name.

Boundary b is the residual stream after b layers, `hidden_states[b]` of transformers. 0 is the embedding. The last one
is the number of layers, before the final norm. Configs name layers in two ways: as boundaries (vLLM, speculators), or
as the layers whose output is read, one less (SGLang, SpecForge). So the numbers in a config may have more than one
reading.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import torch

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.config import ModelSpec

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastspec.models.checkpoints.tensor_source import Use


HeadKind = Literal["eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp", "assistant"]

Layout = Literal["eagle", "z-lab", "deepspec", "speculators", "mtp", "nextn", "mimo", "mimo-v2", "google", "nemotron"]

NAMES: Final[Mapping[HeadKind, str]] = {
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "mtp": "MTP",
    "assistant": "Gemma 4 assistant",
}

LAYOUTS: Final[Mapping[Layout, str]] = {
    "eagle": "layout of EAGLE and SGLang",
    "z-lab": "layout of z-lab",
    "deepspec": "layout of DeepSpec",
    "speculators": "layout of speculators",
    "mtp": "layout of Qwen",
    "nextn": "layout of DeepSeek and GLM",
    "mimo": "layout of MiMo",
    "mimo-v2": "layout of MiMo-V2",
    "google": "layout of Google",
    "nemotron": "layout of Nemotron",
}

SPECULATORS: Final = "speculators_model_type"

SUPPORTED: Final = (
    "supported heads: EAGLE-3, P-EAGLE, DFlash, DFlash2 and DSpark, each in its first layout and in that of "
    "speculators, and the assistants of Gemma 4"
)

_WITHIN: Final = (
    "an MTP layer drafts for the model in whose checkpoint it lies: give that checkpoint as target, with draft='mtp'; "
    "put the layer's tensors into the target's directory where they lie apart"
)
# config keys and tensors that only related types of drafters have
_RELATIVES_BY_KEY: Final = {
    "medusa_num_heads": "Medusa",
    "dspark_block_size": "DSpark in the checkpoint of its target",
    "xpress_config": "XPress",
}

_RELATIVES_BY_TENSOR: Final = {
    "medusa_head.": "Medusa",
    "mtp.": "MTP",
    "mtp_layers.": "MTP",
    ".eh_proj.": "MTP",  # follows the number of a layer, in the layout of DeepSeek and GLM
}

_PREFIXES: Final = (("model.", ""), ("midlayer.", "layers.0."))

_OLD_NAMES: Final = {
    f"aux_norm_{place}.weight": f"fc_norm.{index}.weight" for index, place in enumerate(("low", "mid", "high"))
}


@dataclass(frozen=True, slots=True)
class Recognised:
    """Type and layout of a head."""

    kind: HeadKind
    layout: Layout

    def __str__(self) -> str:
        """Describes it in a few words, for messages and `explain()`."""
        head = "" if self.kind == "assistant" else " head"
        return f"{NAMES[self.kind]}{head} ({LAYOUTS[self.layout]})"


def plain_name(stored: str) -> str:
    """Converts a head's stored tensor name to the name used here, which is the same for all layouts."""
    for old, new in _PREFIXES:
        if stored.startswith(old):
            stored = new + stored.removeprefix(old)
    return _OLD_NAMES.get(stored, stored)


def says_head(raw: Mapping[str, Any]) -> bool:
    """True if a config shows that it belongs to a drafter, without the names of tensors. So no weight need be fetched.

    A head whose config looks like that of an ordinary model is recognised later, by its tensors.
    """
    keys = {SPECULATORS, "speculators_config", "eagle_config", "draft_vocab_size", "dflash_config", "markov_rank"}
    keys |= {*_RELATIVES_BY_KEY}
    marks = ("eagle3", "dflash", "dspark", "medusa", "speculator", "peagle")
    return _is_assistant(raw) or bool(keys & raw.keys()) or any(mark in _architectures(raw).lower() for mark in marks)


def recognise(raw: Mapping[str, Any], stored: Collection[str]) -> Recognised | None:
    """Returns the type of head that a config and stored tensor names belong to. None for an ordinary model.

    Args:
        raw: content of `config.json`.
        stored: stored names of tensors.

    Raises:
        UnsupportedModel: a drafter of an unsupported type. The message names the type.
    """
    names = {plain_name(name) for name in stored}
    if _is_assistant(raw):
        return Recognised("assistant", "google")
    _refuse_relatives(raw, stored, names)
    layout: Layout | None = "speculators" if SPECULATORS in raw or "speculators_config" in raw else None
    if "layers.0.hidden_norm.weight" in names:
        return Recognised("peagle" if "mask_hidden" in names else "eagle3", layout or "eagle")
    if {"fc.weight", "hidden_norm.weight"} <= names:
        called = f"{raw.get(SPECULATORS)} {_architectures(raw)}".lower()
        if "candidate_selector.predecessor_codebook" in names or "dflash2" in called:
            return Recognised("dflash2", layout or "z-lab")
        if "markov_head.markov_w1.weight" in names or "dspark" in called:
            return Recognised("dspark", layout or "deepspec")
        return Recognised("dflash", layout or "z-lab")
    if "fc.weight" in names and "layers.0.input_layernorm.weight" not in names:
        _refuse("EAGLE-1 or EAGLE-2")
    if layout:
        _refuse(f"{SPECULATORS}={raw.get(SPECULATORS)!r} with tensors of none of these")
    return None


def _is_assistant(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == "gemma4_assistant"


def _architectures(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return " ".join(map(str, named)) if isinstance(named, list) else ""


def _refuse_relatives(raw: Mapping[str, Any], stored: Collection[str], names: Collection[str]) -> None:
    asked = raw.get(SPECULATORS)
    if asked is not None and (asked in ("mtp", "assistant") or asked not in NAMES):
        _refuse(f"{SPECULATORS}={asked!r}", _WITHIN if asked == "mtp" else SUPPORTED)
    for key, relative in _RELATIVES_BY_KEY.items():
        if raw.get(key) is not None:
            _refuse(f"{relative} ({key} in the config)")
    embeds = any(name.endswith("embed_tokens.weight") and name.startswith("model.") for name in stored)
    whole = embeds and not says_head(raw)  # an ordinary model may have MTP layers after its own layers
    for mark, relative in _RELATIVES_BY_TENSOR.items():
        found = next((name for name in names if name.startswith(mark) or (mark[0] == "." and mark in name)), None)
        if found is not None and not whole:
            _refuse(f"{relative} (it holds {found})", _WITHIN if relative == NAMES["mtp"] else SUPPORTED)


def _refuse(what: str, instead: str = SUPPORTED) -> NoReturn:
    raise UnsupportedModel(f"this is a learned drafter that is not supported: {what}; {instead}")


NORMED: Final = -1

"""In place of a boundary: the hidden state after all layers and the final norm."""

Reading = tuple[int, ...]


def default_boundaries(layers: int) -> Reading:
    """Returns the boundaries that EAGLE-3 reads if its config names none: low, middle, high."""
    return (2, layers // 2, layers - 3)


def asked_boundaries(asked: Sequence[int], layers: int, count: int | None) -> Reading:
    """Checks the boundaries that the user chose.

    Args:
        asked: boundaries.
        layers: number of the target's layers.
        count: number of hidden states for which the head's tensors are made. None: any number.

    Raises:
        ValueError: a boundary does not exist, or there are too few or too many.
    """
    reading = tuple(asked)
    for boundary in reading:
        if isinstance(boundary, bool) or not isinstance(boundary, int) or not 0 <= boundary <= layers:
            raise ValueError(
                f"feature_layers={reading}: {boundary!r} is not one of the target's boundaries 0 to {layers}; "
                "boundary b "
                "is the hidden state after b layers"
            )
    if count is not None and len(reading) != count:
        raise ValueError(f"feature_layers={reading} has {len(reading)} entries, and the head reads {count}")
    return reading


def readings_of(ids: Sequence[int], layers: int, first: int, others: Sequence[int] = ()) -> tuple[Reading, ...]:
    """Returns all readings of a config's layer numbers for which the target has layers.

    Args:
        ids: numbers in the config.
        layers: number of the target's layers.
        first: number that the engine of this layout adds to get a boundary.
        others: numbers that other engines add.

    Raises:
        CheckpointError: the target has too few layers for every reading.
    """
    found = [tuple(each + shift for each in ids) for shift in (first, *others)]
    possible = [reading for reading in found if all(0 <= boundary <= layers for boundary in reading)]
    if not possible:
        raise CheckpointError(
            f"the head reads layers {list(ids)}, and the target has {layers} layers: it was made for another target"
        )
    return tuple(dict.fromkeys(possible))


def as_layers(reading: Reading, layers: int) -> tuple[int, ...]:
    """Converts a reading to the layer numbers of `Proposer.features`. -1 and `layers` are the two ends."""
    return tuple(layers if boundary == NORMED else boundary - 1 for boundary in reading)


def described(reading: Reading) -> str:
    """Describes it in a few words, for messages and `explain()`."""
    return ", ".join("final norm" if boundary == NORMED else str(boundary) for boundary in reading)


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of a target that a head needs.

    Attributes:
        name: name for messages.
        embed_scale: factor on its embedding.
    """

    name: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: torch.dtype
    embed_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes of a head. Implements `ModelInfo`.

    A head has its target's dtype, because it reads the target's hidden states and may share its embedding.

    Attributes:
        found: its type and layout.
        decoder: spec of its layers; vocab_size is that of its own logits.
        target: sizes of the target.
        readings: boundaries of the target that it reads: b is the residual stream after b layers, 0 the embedding, and
            `NORMED` the stream after all layers and the final norm. There is one entry for each possible meaning of the
            config. The first is that of the engine that wrote the layout.
        tensors: shape of every tensor that is loaded, by its `plain_name`.
        own_embed, own_head: True if it has its own embedding, or its own head. Else the target's is used.
        tied_head: True if its own embedding is also its output matrix.
    """

    found: Recognised
    decoder: ModelSpec
    target: TargetSizes
    readings: tuple[tuple[int, ...], ...]
    tensors: Mapping[str, tuple[int, ...]]
    own_embed: bool
    own_head: bool
    tied_head: bool = field(default=False, kw_only=True)

    @classmethod
    def extending(cls, base: HeadSpec, shapes: Mapping[str, tuple[int, ...]], **own: object) -> Self:
        """Makes the spec of a relative of another head.

        Args:
            base: spec of a base class.
            shapes: shapes of the tensors that the relative has besides, by name.
            **own: fields that the base class does not have.
        """
        values = {each.name: getattr(base, each.name) for each in fields(base)}
        return cls(**values | {"tensors": {**base.tensors, **shapes}, **own})

    def for_length(self, max_length: int) -> Self:
        """Returns the spec for rows of up to `max_length` tokens; see `ModelSpec.for_length`."""
        return replace(self, decoder=self.decoder.for_length(max_length))

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor stored for each row between steps, see `Proposer.kept`. (): none."""
        return ()

    @property
    def computed_again(self) -> int:
        """Positions before the newest one that are computed again, see `Proposer.computed_again`."""
        return 0

    @property
    def attention_inputs(self) -> int:
        """Elements per position that the last layer reads from its attention on: the residual stream, q, k and v."""
        gates = self.num_heads if self.decoder.plans[-1].output_gate else 0
        return self.hidden_size + (self.num_heads + gates + 2 * self.num_kv_heads) * self.head_dim

    @property
    def max_drafts(self) -> int | None:
        """Largest number of drafts of a step. None: any number."""
        return None

    @property
    def uses(self) -> Mapping[str, Use]:
        """How matrices are used, by name, if not in products of layers."""
        return {}

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that may be stored with such a head, and are not read."""
        return ()

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the tensors that are loaded as one: new name -> names of the joined tensors."""
        return {}

    @property
    def feature_layers(self) -> int:
        """Number of hidden states of the target that are read at each position."""
        return len(self.readings[0])

    @property
    def family(self) -> str:
        """Describes it in a few words, for messages and `explain()`."""
        return str(self.found)

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int:
        """The target's context. Lengths in a head's config are those of its training texts."""
        return self.target.max_length

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.decoder.num_layers

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """See `ModelInfo`."""
        return self.decoder.attention_shapes

    @property
    def hosting(self) -> str:
        """Empty, because this package's decoder runs it."""
        return ""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer."""
        return self.decoder.windows

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.decoder.num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.decoder.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.decoder.head_dim

    @property
    def hidden_size(self) -> int:
        """Elements of its residual stream."""
        return self.decoder.hidden_size

    @property
    def routed_elements(self) -> int:
        """0, because heads have no experts."""
        return 0

    @property
    def intermediate_size(self) -> int:
        """Intermediate size of the MLP."""
        return self.decoder.intermediate_size

    def rotary_bytes(self, positions: int) -> int:
        """See `ModelInfo`."""
        return self.decoder.rotary_bytes(positions)

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Returns 0, because a head has no recurrent state."""
        return 0

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of its own weights in `dtype`. Weights shared with the target are not counted."""
        return dtype.itemsize * sum(math.prod(shape) for shape in self.tensors.values())
