"""Makes specs of DFlash heads (arXiv 2602.06036) from their configs in the layouts of z-lab and of speculators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.config import ModelSpec
from fastspec.models.families.plan import ModelScales
from fastspec.models.heads.config import decoder_of, flag, ids_of, inner_config, refuse_unknown, ties_head
from fastspec.models.heads.spec import NAMES, HeadSpec, Reading, StoredHead, TargetSizes, asked_boundaries, readings_of
from fastspec.models.layer_table import layer_shapes

MASK_NAMES: Final = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
MASK_FILE: Final = "mask_embedding"
SINKS: Final = "layers.{}.self_attn.attention_sink_bias"
DEFAULT_THETA: Final = 1e6
DEFAULT_BLOCK: Final = 16
MAX_BLOCK: Final = 64
SLIDING, FULL = "sliding_attention", "full_attention"
# settings of related types of heads, which are not implemented: name -> allowed values, which have no effect
OTHERS: Final[Mapping[str, tuple[object, ...]]] = {
    "shift_label": (None, False),
    "use_heterogeneous_kv": (None, False),
    "use_aux_hidden_state": (None, True),
    "is_neox_style": (None, True),
}


# names of the settings that DFlash, DFlash2 and DSpark have in common
KNOWN: Final = (
    *(*MASK_NAMES, *OTHERS, "projector_type", "block_size", "target_layer_ids", "aux_hidden_state_layer_ids"),
    *("use_swa", "swa_window_size", "causal", "is_causal", "sliding_window_non_causal", "sample_from_anchor"),
    *("attention_sink_bias", "add_swa_attention_sink_bias", "attention_value_scale", "input_embedding_scale"),
    *("output_multiplier", "final_logit_softcapping", "num_target_layers"),
)


@dataclass(frozen=True, slots=True)
class DFlashSpec(HeadSpec):
    """Sizes and arithmetic of a DFlash head. `DFlash` in passes.py has the forward passes.

    A forward pass reads a block: the last token of the sequence, called the anchor, and mask tokens after it. `decoder`
    has the attention window of each layer. In a layer that has a window and is not causal, all tokens of a block use
    the window of the block's first token.

    Attributes:
        block_size: largest number of tokens of a block.
        mask_id: id of the mask token.
        causal: for each layer, True if a token of the block attends only to itself and earlier tokens. False: it
            attends to the whole block.
        sample_from_anchor: True if every token of the block predicts the token at the next position. False: every mask
            predicts the token at its own position, and the anchor predicts none.
        sinks: True if every query head has an attention sink: a further score in the softmax, whose value vector is 0.
        value_scale: factor by which V is multiplied.
        embed_scale: factor by which embeddings are multiplied.
        mask_file: file with the embedding of the mask token. None: row `mask_id` of the embedding matrix is used.
    """

    block_size: int = DEFAULT_BLOCK
    mask_id: int = 0
    causal: tuple[bool, ...] = ()
    sample_from_anchor: bool = False
    sinks: bool = False
    value_scale: float = 1.0
    embed_scale: float = 1.0
    mask_file: Path | None = None

    @property
    def max_drafts(self) -> int:
        """Largest number of draft tokens of one forward pass."""
        return self.block_size - (not self.sample_from_anchor)

    def rows(self, k: int) -> int:
        """Returns the number of tokens in the block of a forward pass that makes k draft tokens."""
        return k + (not self.sample_from_anchor)

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that are concatenated when they are loaded: k and v projections of all layers, and all sinks.

        The joined projections compute K and V of accepted tokens in one product; see `DFlash.store_context`.
        """
        projections = [f"layers.{layer}.self_attn.{which}_proj" for layer in range(self.num_layers) for which in "kv"]
        found = {"context.weight": tuple(f"{each}.weight" for each in projections)}
        if self.decoder.qkv_bias:
            found["context.bias"] = tuple(f"{each}.bias" for each in projections)
        return found | ({"sinks": tuple(map(SINKS.format, range(self.num_layers)))} if self.sinks else {})

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the number of bytes of the draft head's own weights in `dtype`.

        The k and v projections count twice, because they are both in the layers' weights and in the joined matrix.
        """
        twice = [part for name, parts in self.joined.items() if name != "sinks" for part in parts]
        again = sum(math.prod(self.tensors[part]) for part in twice)
        mask = 0 if self.mask_file is None else self.hidden_size
        return HeadSpec.weight_bytes(self, dtype) + (again + mask) * dtype.itemsize


def dflash_spec(head: StoredHead) -> DFlashSpec:
    """Makes the spec of a DFlash head from its config and the shapes of its tensors.

    Raises:
        CheckpointError: config and tensors do not match, or the head was made for another target.
        UnsupportedModel: a setting that is not implemented.
    """
    found, infos, target = head.found, head.infos, head.target
    settings = BlockSettings.of(head.raw, head.where, NAMES[found.kind])
    if settings.get("projector_type") not in (None, found.kind):
        settings.refuse("projector_type", f"{found.kind!r}, which its tensors are")
    for name, fine in OTHERS.items():
        if settings.get(name) not in fine:
            settings.refuse(name, f"{fine[1]!r}: such a head is a relative of DFlash")
    if head.found.kind == "dflash":  # relatives have more settings, and check theirs
        refuse_unknown(head.raw, "dflash_config", KNOWN, NAMES["dflash"])
    ours = found.layout == "speculators"
    inner = dict(inner_config(head.raw, head.where))
    if inner.get("rope_parameters") is None:
        inner["rope_theta"] = inner.get("rope_theta") or DEFAULT_THETA
    vocab = settings.whole("draft_vocab_size", 1, target.vocab_size, target.vocab_size)
    decoder = decoder_of({name: inner[name] for name in inner if name != "layer_types"}, infos, vocab, target)
    windows, causal = _attention(settings, inner, decoder.num_layers, ours)
    plans = tuple(replace(plan, window=window) for plan, window in zip(decoder.plans, windows, strict=True))
    decoder = replace(decoder, plans=plans, scales=_scales(settings, decoder.scales.logits))
    own_embed, own_head = "embed_tokens.weight" in infos, "lm_head.weight" in infos
    tied_head = ties_head(head.raw, infos, vocab, target)
    _check_shared(decoder, target, own_embed=own_embed, own_head=own_head or tied_head)
    readings = _readings(settings, target, head.feature_layers)
    sinks = settings.flag("attention_sink_bias", settings.flag("add_swa_attention_sink_bias"))
    return DFlashSpec(
        found=found,
        decoder=decoder,
        target=target,
        readings=readings,
        tensors=_tensors(decoder, target, len(readings[0]), sinks, own_embed=own_embed, own_head=own_head),
        own_embed=own_embed,
        own_head=own_head,
        tied_head=tied_head,
        block_size=settings.whole("block_size", 2, MAX_BLOCK, DEFAULT_BLOCK),
        mask_id=_mask_id(settings, target.vocab_size),
        causal=causal,
        # if the setting is missing, the training code of DSpark uses true, that of DFlash false
        sample_from_anchor=settings.flag("sample_from_anchor", found.kind == "dspark"),
        sinks=sinks,
        value_scale=settings.number("attention_value_scale"),
        embed_scale=settings.number("input_embedding_scale"),
        mask_file=_mask_file(head.where.parent),
    )


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Settings of a DFlash head or a relative. They are looked up in the object `dflash_config`, then in the config.

    Attributes:
        own: the object `dflash_config` of the config.
        raw: content of `config.json`.
        kind: type of the head, for messages.
    """

    own: Mapping[str, Any]
    raw: Mapping[str, Any]
    kind: str

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: Path, kind: str = "DFlash") -> BlockSettings:
        """Makes the settings from `raw`, the content of a `config.json`. `where` is its path, for messages."""
        own = raw.get("dflash_config")
        if own is not None and not isinstance(own, Mapping):
            raise CheckpointError(f"{where}: dflash_config is {type(own).__name__}, wanted an object")
        return cls(own or {}, raw, kind)

    def get(self, name: str, default: object = None) -> Any:
        """Returns the value of a setting. Returns `default` if it is missing or null."""
        found = self.own.get(name)
        found = self.raw.get(name) if found is None else found
        return default if found is None else found

    def refuse(self, name: str, wanted: str) -> NoReturn:
        """Raises `UnsupportedModel` with the name and value of a setting, and the text `wanted`."""
        raise UnsupportedModel(f"{name}={self.get(name)!r} of a {self.kind} head is not supported, wanted {wanted}")

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns the setting `name`, true or false. Returns `default` if it is missing. Refuses other values."""
        return flag({name: self.get(name)}, name, default)

    def number(self, name: str) -> float:
        """Returns the setting `name`, a positive number. Returns 1 if it is missing. Refuses other values."""
        value = self.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            self.refuse(name, "a positive number")
        return float(value)

    def whole(self, name: str, minimum: int, maximum: int, default: int | None = None) -> int:
        """Returns the setting `name`, a whole number from `minimum` to `maximum`. Refuses other values.

        If the setting is missing, `default` is its value.
        """
        value = self.get(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            self.refuse(name, f"a whole number from {minimum} to {maximum}")
        return value


def _readings(settings: BlockSettings, target: TargetSizes, asked: Sequence[int] | None) -> tuple[Reading, ...]:
    """Returns the boundaries of the target whose hidden states the draft head reads, as the only entry of a tuple.

    There is only one entry, because all engines read these configs alike. Numbers in z-lab's configs are indices of
    layers whose output is read. Numbers in speculators' configs are boundaries.

    Args:
        settings: settings of the head.
        target: sizes of the target.
        asked: boundaries that the user chose. None: those in the config.
    """
    if asked is not None:
        return (asked_boundaries(asked, target.layers, None),)
    for name, shift in (("target_layer_ids", 1), ("aux_hidden_state_layer_ids", 0)):
        ids = ids_of(settings.get(name), name)
        if ids is not None:
            return readings_of(ids, target.layers, shift)
    settings.refuse("target_layer_ids", "a list of layers of the target, or feature_layers= to say which")


def _scales(settings: BlockSettings, logit_scale: float) -> ModelScales:
    softcap = settings.get("final_logit_softcapping")
    softcap = None if softcap in (None, 0) else settings.number("final_logit_softcapping")
    return ModelScales(logits=settings.number("output_multiplier") * logit_scale, softcap=softcap)


def _mask_id(settings: BlockSettings, vocab: int) -> int:
    """Returns the id of the mask token. The setting has several possible names. The first found is used, as in vLLM."""
    name = next((name for name in MASK_NAMES if settings.get(name) is not None), MASK_NAMES[0])
    return settings.whole(name, 0, vocab - 1)


def _mask_file(directory: Path) -> Path | None:
    """Returns the file with the embedding of the mask token in a draft head's directory. None if there is no such file.

    Raises:
        CheckpointError: the file is pickled. The message has the command that converts it.
    """
    file = directory / f"{MASK_FILE}.safetensors"
    if file.is_file():
        return file
    if (directory / f"{MASK_FILE}.pt").is_file():
        raise CheckpointError(
            f"{directory}: {MASK_FILE}.pt is pickled and never loaded here; convert it once, if you trust it: "
            f'cd {directory} && python -c "import torch; from safetensors.torch import save_file; x = torch.load('
            f"'{MASK_FILE}.pt', map_location='cpu', weights_only=True); x = x['embedding'] if isinstance(x, dict) else "
            f"x; save_file({{'{MASK_FILE}': x.reshape(-1).clone()}}, '{MASK_FILE}.safetensors')\""
        )
    return None


def _attention(
    settings: BlockSettings, inner: Mapping[str, Any], layers: int, ours: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Returns the attention windows of all layers, and for each layer True if it is causal, as two tuples.

    A layer that `layer_types` calls sliding has a window and is causal. Other layers have no window and are not causal.
    If no layer is sliding, the setting `use_swa` gives every layer a window.

    In speculators' layout, `sliding_window_non_causal` makes all layers non-causal. If the config has `causal` or
    `is_causal`, this setting decides for all layers instead. In speculators' layout, a layer with a window that is not
    causal sees one more key.

    Args:
        settings: settings of the draft head.
        inner: config of its layers.
        layers: number of its layers.
        ours: True for the layout of speculators.
    """
    types = inner.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers or {*types} - {SLIDING, FULL}):
        wanted = f"{layers} entries, each {FULL!r} or {SLIDING!r}"
        raise UnsupportedModel(f"layer_types={types!r} of a DFlash head is not supported, wanted {wanted}")
    sliding = [kind == SLIDING for kind in types or [FULL] * layers]
    causal = list(sliding)
    if settings.flag("use_swa") and not any(sliding):
        sliding = [True] * layers
    # if the setting is missing, the training code of DFlash2 uses true, that of DFlash false
    if ours and settings.flag("sliding_window_non_causal", settings.kind == NAMES["dflash2"]):
        causal = [False] * layers
    for name in ("causal", "is_causal"):
        if settings.get(name) is not None:
            causal = [settings.flag(name)] * layers
    if not any(sliding):
        return (None,) * layers, tuple(causal)
    window = inner.get("sliding_window")
    window = settings.whole("swa_window_size", 1, 2**30, window if type(window) is int else None)
    return tuple(
        window + (ours and not each) if slides else None for slides, each in zip(sliding, causal, strict=True)
    ), tuple(causal)


def _check_shared(decoder: ModelSpec, target: TargetSizes, *, own_embed: bool, own_head: bool) -> None:
    """Refuses a draft head that lacks its embedding or output matrix, if the target's matrix has another shape.

    Args:
        decoder: spec of the head's layers.
        target: sizes of the target.
        own_embed: True if the head has its own embedding.
        own_head: True if the head has its own output matrix.
    """
    hidden, vocab = decoder.hidden_size, decoder.vocab_size
    if hidden != target.hidden_size and not (own_embed and own_head):
        raise CheckpointError(
            f"the head is {hidden} wide, and would share the embedding or the head of {target.name}, which is "
            f"{target.hidden_size}: choose a head of this target"
        )
    if vocab != target.vocab_size and not own_head:
        raise CheckpointError(
            f"lm_head.weight is missing, and the target's [{target.vocab_size}, {target.hidden_size}] does not fit "
            f"[{vocab}, {hidden}]"
        )


def _tensors(
    decoder: ModelSpec, target: TargetSizes, states: int, sinks: bool, *, own_embed: bool, own_head: bool
) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, states * target.hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(decoder.num_layers):
        shapes |= layer_shapes(decoder, layer, f"layers.{layer}.", hidden)
        if sinks:
            shapes[SINKS.format(layer)] = (decoder.num_heads,)
    if own_embed:
        shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    if own_head:
        shapes["lm_head.weight"] = (decoder.vocab_size, hidden)
    return shapes
