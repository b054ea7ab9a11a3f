"""Spec of a learned drafter, called a head: its type, its sizes, and the target's hidden states that it reads.

The type is found from the names of the tensors and from the config, never from the name of the checkpoint.

Boundary b of a target is its residual stream after b layers, `hidden_states[b]` of transformers. Boundary 0 is the
embedding. The last boundary is the output of the last layer, before the final norm. Configs of heads name these hidden
states in two ways. For vLLM and speculators the numbers are boundaries. For SGLang and SpecForge they are indices of
layers whose output is read, so the boundary is one more. Often a config does not say which of the two is meant. Each
possible meaning, as a tuple of boundaries, is a *reading*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import torch

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.parameter_names import usual_name
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from fastspec.models.checkpoints.tensor_source import TensorInfo, Use


HeadKind = Literal["eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp", "assistant"]

Layout = Literal["eagle", "z-lab", "deepspec", "speculators", "mtp", "nextn", "step", "mimo", "mimo-v2", "google",
                 "nemotron"]  # fmt: skip

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
    "step": "layout of Step 3.5",
    "mimo-v2": "layout of MiMo-V2",
    "google": "layout of Google",
    "nemotron": "layout of Nemotron",
}

SPECULATORS: Final = "speculators_model_type"

SUPPORTED: Final = (
    "supported heads: EAGLE-3, P-EAGLE, DFlash, DFlash2 and DSpark, each in the layout of its authors and in that of "
    "speculators, and the assistants of Gemma 4"
)

_WITHIN: Final = (
    "an MTP layer drafts for the model whose checkpoint contains it: give that checkpoint as target, with draft='mtp'; "
    "put the layer's tensors into the target's directory if they are stored elsewhere"
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
    """Type of a draft head, and the layout of its checkpoint: the names of its tensors and config fields."""

    kind: HeadKind
    layout: Layout

    def __str__(self) -> str:
        """Describes type and layout in a few words, for messages and `explain()`."""
        head = "" if self.kind == "assistant" else " head"
        return f"{NAMES[self.kind]}{head} ({LAYOUTS[self.layout]})"


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A draft head as it is stored, and the target for which its spec is made.

    Attributes:
        found: type and layout of the head.
        raw: content of `config.json`.
        infos: properties of its stored tensors, by `plain_name`.
        target: sizes of the target.
        feature_layers: boundaries of the target whose hidden states the head reads, if the user chose them. Boundary b
            is the hidden state after b layers. None: those in the config.
        where: path of the config, for messages. Other files of the head lie beside it.
    """

    found: Recognised
    raw: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]
    target: TargetSizes
    feature_layers: Sequence[int] | None
    where: Path


def plain_name(stored: str) -> str:
    """Converts the stored name of a draft head's tensor to the name in this package, which all layouts share."""
    for old, new in _PREFIXES:
        if stored.startswith(old):
            stored = new + stored.removeprefix(old)
    return _OLD_NAMES.get(stored, stored)


def says_head(raw: Mapping[str, Any]) -> bool:
    """True if a model's config shows, without the weights, that the model is a learned drafter.

    False for a head whose config looks like that of an ordinary model. `recognise` finds such a head by its tensors.
    """
    keys = {SPECULATORS, "speculators_config", "eagle_config", "draft_vocab_size", "dflash_config", "markov_rank"}
    keys |= {*_RELATIVES_BY_KEY}
    marks = ("eagle3", "dflash", "dspark", "medusa", "speculator", "peagle")
    return _is_assistant(raw) or bool(keys & raw.keys()) or any(mark in _architectures(raw).lower() for mark in marks)


def recognise(raw: Mapping[str, Any], stored: Collection[str]) -> Recognised | None:
    """Returns the type and layout of a head, found from its config and tensor names. None: it is an ordinary model.

    Args:
        raw: content of `config.json`.
        stored: names of the tensors in the checkpoint.

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


def _embeds(stored: Collection[str]) -> bool:
    """True if the embedding of a whole model is stored, by the name of any family. A head's own has no prefix."""
    found = [name for name in stored if "embed" in name]
    usual = (usual_name(name, family.renamed) for family in FAMILIES.values() for name in found)
    return any(name.startswith("model.") and name.endswith("embed_tokens.weight") for name in usual)


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
    whole = _embeds(stored) and not says_head(raw)  # an ordinary model may have MTP layers after its own layers
    for mark, relative in _RELATIVES_BY_TENSOR.items():
        found = next((name for name in names if name.startswith(mark) or (mark[0] == "." and mark in name)), None)
        if found is not None and not whole:
            _refuse(f"{relative} (it holds {found})", _WITHIN if relative == NAMES["mtp"] else SUPPORTED)


def _refuse(what: str, instead: str = SUPPORTED) -> NoReturn:
    raise UnsupportedModel(f"this is a learned drafter that is not supported: {what}; {instead}")


NORMED: Final = -1

"""Entry of a reading for the hidden state after all layers and the final norm, which has no boundary number."""

Reading = tuple[int, ...]


def default_boundaries(layers: int) -> Reading:
    """Returns the boundaries of a target with `layers` layers that EAGLE-3 reads if its config names none."""
    return (2, layers // 2, layers - 3)


def asked_boundaries(asked: Sequence[int], layers: int, count: int | None) -> Reading:
    """Checks the boundaries that the user chose, and returns them as a tuple.

    Args:
        asked: boundaries of the target; boundary b is the hidden state after b layers.
        layers: number of the target's layers.
        count: number of hidden states per position that the draft head reads. None: any number.

    Raises:
        ValueError: the target has no such boundary, or there are more or fewer than `count`.
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
    """Converts the layer numbers of a draft head's config to boundaries of the target, in each way that engines do it.

    Args:
        ids: layer numbers in the config.
        layers: number of the target's layers.
        first: number that the engine for which the config was written adds to a layer number, to get a boundary.
        others: numbers that other engines add instead.

    Returns:
        The possible meanings, without repetitions. Each has only boundaries that the target has. The meaning for
        `first` comes first.

    Raises:
        CheckpointError: the target has too few layers for all meanings.
    """
    found = [tuple(each + shift for each in ids) for shift in (first, *others)]
    possible = [reading for reading in found if all(0 <= boundary <= layers for boundary in reading)]
    if not possible:
        raise CheckpointError(
            f"the head reads layers {list(ids)}, and the target has {layers} layers: it was made for another target"
        )
    return tuple(dict.fromkeys(possible))


def as_layers(reading: Reading, layers: int) -> tuple[int, ...]:
    """Converts boundaries to the layer numbers of `Proposer.features`. `layers` is the number of the target's layers.

    The embedding becomes -1. The output of a layer becomes the index of the layer. `NORMED` becomes `layers`.
    """
    return tuple(layers if boundary == NORMED else boundary - 1 for boundary in reading)


def described(reading: Reading) -> str:
    """Describes the boundaries of a reading in a few words, for messages and `explain()`."""
    return ", ".join("final norm" if boundary == NORMED else str(boundary) for boundary in reading)


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of a target model that its head needs.

    Attributes:
        name: name of the target, for messages.
        layers: number of its layers.
        hidden_size, vocab_size: its hidden size and vocabulary size.
        max_length: its context length.
        dtype: dtype of its weights.
        embed_scale: factor by which the target multiplies its embeddings.
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
    """Sizes of a learned drafter, called a head. Implements `ModelInfo`.

    A head has its target's dtype, because it reads the target's hidden states and may share its embedding.

    Attributes:
        found: type and layout of the head.
        decoder: spec of the head's layers. Its vocab_size is the number of ids for which the head has logits.
        target: sizes of the target.
        readings: tuples of boundaries, one for each possible meaning of the head's config. A tuple names the hidden
            states of the target that the head reads. Boundary b is the residual stream after b layers, and `NORMED` is
            the stream after all layers and the final norm. The first tuple is the meaning in the engine for which the
            layout was made.
        tensors: shape of every tensor that is loaded, by its `plain_name`.
        own_embed: True if the head's checkpoint has an embedding. False: the target's embedding is used.
        own_head: True if the head has an output matrix (LM head) besides its embedding.
        tied_head: True if the head's embedding is also its output matrix. Without `own_head` and `tied_head`, the
            target's output matrix is used.
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
        """Makes a spec of this class from one of its base class, with more tensors and fields.

        Args:
            base: spec whose fields are copied.
            shapes: shapes of the tensors that `base` does not have, by name.
            **own: values of the fields that the base class does not have.
        """
        values = {each.name: getattr(base, each.name) for each in fields(base)}
        return cls(**values | {"tensors": {**base.tensors, **shapes}, **own})

    def for_length(self, max_length: int) -> Self:
        """Returns the spec for rows of up to `max_length` tokens; see `ModelSpec.for_length`."""
        return replace(self, decoder=self.decoder.for_length(max_length))

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor that is stored for each row of the batch between steps; see `Proposer`. (): none."""
        return ()

    @property
    def computed_again(self) -> int:
        """Number of a row's newest positions whose K and V the next step computes again; see `Proposer`."""
        return 0

    @property
    def attention_inputs(self) -> int:
        """Number of elements per position that the last layer needs from its attention on.

        They are the residual stream, q, k, v and output gates, concatenated. With latent attention (`LatentPlan`) they
        are q or its first projection, c and r, in place of q, k and v.
        """
        plan = self.decoder.plans[-1]
        gates = self.num_heads * (plan.head_gate + (self.head_dim if plan.output_gate else 0))
        if (latent := plan.latent) is not None:
            return (
                self.hidden_size + (latent.q_rank or self.num_heads * latent.dim) + latent.rank + latent.shared + gates
            )
        return self.hidden_size + (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + gates

    @property
    def max_drafts(self) -> int | None:
        """Largest number of draft tokens that the draft head makes in a step. None: any number."""
        return None

    @property
    def uses(self) -> Mapping[str, Use]:
        """Uses of the matrices that are not multiplied like a projection of a layer: name of the matrix -> use."""
        return {}

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that checkpoints of this type of draft head may contain, and that are not read."""
        return ()

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that are concatenated when they are loaded: name of the result -> names of the parts."""
        return {}

    @property
    def feature_layers(self) -> int:
        """Number of the target's hidden states that the draft head reads at each position."""
        return len(self.readings[0])

    @property
    def family(self) -> str:
        """Type and layout of the draft head in a few words, for messages and `explain()`."""
        return str(self.found)

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    @property
    def vocab_size(self) -> int:
        """Number of ids for which the draft head has logits. It may be less than the target's vocabulary size."""
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int:
        """The target's context length. A length in a draft head's config is only that of its training texts."""
        return self.target.max_length

    @property
    def num_layers(self) -> int:
        """Number of the draft head's decoder layers."""
        return self.decoder.num_layers

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """See `ModelInfo`."""
        return self.decoder.attention_shapes

    @property
    def hosting(self) -> str:
        """Empty, because this package's decoder runs the draft head."""
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
        """Elements of the draft head's residual stream at one position."""
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
        """Returns 0, because a draft head has no recurrent state."""
        return 0

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the number of bytes of the draft head's weights in `dtype`, without those shared with the target."""
        return dtype.itemsize * sum(math.prod(shape) for shape in self.tensors.values())
