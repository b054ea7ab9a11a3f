"""Makes specs of EAGLE-3 heads (arXiv 2503.01840) and P-EAGLE heads from configs of EAGLE and of speculators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.tensor_source import TensorInfo
from fastspec.models.config import ModelSpec
from fastspec.models.heads.config import decoder_of, flag, ids_of, inner_config, refuse_unknown, size, ties_head
from fastspec.models.heads.spec import (
    NAMES,
    NORMED,
    HeadSpec,
    Reading,
    Recognised,
    StoredHead,
    TargetSizes,
    asked_boundaries,
    default_boundaries,
    readings_of,
)
from fastspec.models.layer_table import layer_shapes

MASK_HIDDEN: Final = "mask_hidden"
_MASKS: Final = ("mask_token_id", "pard_token", "ptd_token_id")
_KNOWN: Final = (
    *(*_MASKS, "parallel_drafting", "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "layer_ids"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_norm"),
    *("num_aux_hidden_states", "num_aux_layers", "num_eagle_features", "parallel_draft_heads_num_layers"),
)
# settings of NVIDIA's ModelOpt, each with the value of the arithmetic in `Eagle3Spec`
_FIXED: Final = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, slots=True)
class Eagle3Spec(HeadSpec):
    """Sizes and arithmetic of an EAGLE-3 head. Variants are in brackets, with the flags that turn them on.

        a = the target's hidden states at one position, concatenated
        a = norm(a) [with norm_before_fc], or each hidden state has its own norm [with fc_norm]
        g = a Wfc [+ bias] [without fc: a];  at a draft token's position g is `feature` of the previous pass
        e = norm(embedding of the next token), h = norm(g)
        r = g [h with norm_before_residual]
        x = r + attention([e h]);  x = x + mlp(norm(x)); then ordinary layers, if there are more
        logits = norm(x) Whead;  feature = x [norm(x) with norm_output]

    Attributes:
        fc: True if the target's hidden states are first multiplied with Wfc.
        fc_bias: True if that product has a bias.
        norm_before_fc, fc_norm, norm_before_residual, norm_output: flags of the variants in the formulas.
    """

    fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor that is stored for each row between steps.

        It is the result of `Eagle3.absorb` at the newest position. The pass for the first draft token starts from it.
        """
        return (self.attention_inputs,)


@dataclass(frozen=True, slots=True)
class PEagleSpec(Eagle3Spec):
    """Sizes and arithmetic of a P-EAGLE head: an EAGLE-3 head that makes all draft tokens of a step in one pass.

    In a row with n tokens, position n - 2 gives draft token 0, as in EAGLE-3. Positions n - 1, n, .. give the other
    draft tokens in the same pass. The inputs at these positions are the mask token, and the tensor `mask_hidden`
    instead of the target's hidden states:

        e = norm(embedding of the mask), g = mask_hidden Wfc      other formulas are those of `Eagle3Spec`

    Attributes:
        mask_id: id of the mask token.
    """

    mask_id: int = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor stored for each row between steps: g at the newest position, read by the next pass."""
        return (self.hidden_size,)


def peagle_spec(head: StoredHead) -> PEagleSpec:
    """Makes the spec of a P-EAGLE head. For errors see `eagle3_spec`."""
    base, raw, target = eagle3_spec(head), head.raw, head.target
    name = next((name for name in _MASKS if raw.get(name) is not None), _MASKS[0])
    mask = raw.get(name)
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise CheckpointError(f"{name}={mask!r} in the head's config, wanted an id of {target.name}, for masks")
    read = base.feature_layers * target.hidden_size
    return PEagleSpec.extending(base, {MASK_HIDDEN: (1, 1, read)}, mask_id=mask)


def eagle3_spec(head: StoredHead) -> Eagle3Spec:
    """Makes the spec of an EAGLE-3 head from its config and the shapes of its tensors.

    Raises:
        CheckpointError: config and tensors do not match, or the head was made for another target.
        UnsupportedModel: a setting that is not implemented.
    """
    found, raw, infos, target = head.found, head.raw, head.infos, head.target
    inner = inner_config(raw, head.where)
    refuse_unknown(raw, "eagle_config", _settings(raw), NAMES[found.kind])
    _check_target(raw, inner, infos, target)
    vocab_size = size(raw, "draft_vocab_size", target.vocab_size)
    decoder = decoder_of(inner, infos, vocab_size, target)
    count = _inputs(infos, target, decoder)
    flags = _flags(found, raw, infos)
    spec = Eagle3Spec(
        found=found,
        decoder=decoder,
        target=target,
        readings=_readings(found, raw, target, count, head.feature_layers),
        tensors={},
        own_embed="embed_tokens.weight" in infos,
        own_head="lm_head.weight" in infos,
        tied_head=ties_head(raw, infos, vocab_size, target),
        fc="fc.weight" in infos,
        **flags,
    )
    _check_shared(spec)
    return replace(spec, tensors=_tensors(spec, count))


def _settings(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of settings that are read, or have the only value that this package implements."""
    inner = raw.get("eagle_config")
    given: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    return (*_KNOWN, *(name for name, value in _FIXED.items() if given.get(name) == value))


def _flags(found: Recognised, raw: Mapping[str, Any], infos: Collection[str]) -> dict[str, bool]:
    """Returns the flags of `Eagle3Spec` from a draft head's config and the names of its tensors.

    A missing flag is false, as in the engine for which the layout was made. `norm_before_residual` is a flag of
    speculators and of vLLM. SGLang has no such flag, and its arithmetic is that for false.
    """
    inner = raw.get("eagle_config")
    eagle: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}

    def either(name: str) -> bool:
        return flag(raw, name, flag(eagle, name))

    before = either("norm_before_fc") or "input_norm.weight" in infos
    each = either("fc_norm") or flag(raw, "use_aux_norm", flag(eagle, "use_aux_norm")) or "fc_norm.0.weight" in infos
    if before and each:
        raise CheckpointError("norm_before_fc and fc_norm are both set in the head's config; wanted one of them")
    return {
        "fc_bias": "fc.bias" in infos,
        "norm_before_fc": before,
        "fc_norm": each,
        "norm_before_residual": either("norm_before_residual"),
        "norm_output": either("norm_output"),
    }


def _check_target(
    raw: Mapping[str, Any], inner: Mapping[str, Any], infos: Mapping[str, TensorInfo], target: TargetSizes
) -> None:
    """Refuses a draft head whose sizes show that it was made for another target."""
    hidden = raw.get("target_hidden_size")
    vocab = infos["t2d"].shape[0] if "t2d" in infos else inner.get("vocab_size")
    for name, got, wanted in (("hidden_size", hidden, target.hidden_size), ("vocab_size", vocab, target.vocab_size)):
        if got is not None and got != wanted:
            raise CheckpointError(
                f"the head was made for a target with {name}={got}, and {target.name} has {wanted}: choose a head of "
                "this target"
            )


def _inputs(infos: Mapping[str, TensorInfo], target: TargetSizes, decoder: ModelSpec) -> int:
    """Returns the number of the target's hidden states that a draft head reads at each position.

    It follows from the width of `fc.weight`. Without this tensor it is 1.

    Raises:
        CheckpointError: the width does not fit the target's hidden size.
    """
    if "fc.weight" not in infos:
        if decoder.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"the head is {decoder.hidden_size} wide, {target.name} {target.hidden_size}, and fc.weight is missing"
            )
        return 1
    shape = infos["fc.weight"].shape
    if len(shape) != 2 or shape[1] % target.hidden_size:
        raise CheckpointError(
            f"fc.weight has shape {list(shape)}, wanted [{decoder.hidden_size}, a multiple of the target's hidden_size="
            f"{target.hidden_size}]: choose a head of {target.name}"
        )
    return shape[1] // target.hidden_size


def _readings(
    found: Recognised, raw: Mapping[str, Any], target: TargetSizes, count: int, asked: Sequence[int] | None
) -> tuple[Reading, ...]:
    eagle = raw.get("eagle_config")
    inner: Mapping[str, Any] = eagle if isinstance(eagle, Mapping) else {}
    if asked is not None:
        return (asked_boundaries(asked, target.layers, count),)
    if not flag(inner, "use_aux_hidden_state", flag(raw, "use_aux_hidden_state", True)):
        if count != 1:
            raise CheckpointError(f"use_aux_hidden_state is false, and fc.weight is made for {count} hidden states")
        return ((NORMED,),)
    name = "eagle_aux_hidden_state_layer_ids"
    ids = ids_of(raw.get(name, inner.get(name, inner.get("layer_ids"))), name)
    if ids is None:
        ids, written = default_boundaries(target.layers), True
        if min(ids) < 0 or len(ids) != count:
            raise CheckpointError(
                f"the head's config does not name the {count} layers that it reads of a target with {target.layers} "
                "layers: name them with feature_layers="
            )
    else:
        written = found.layout == "speculators"
    if len(ids) != count:
        raise CheckpointError(f"{name}={list(ids)} has {len(ids)} entries, and fc.weight is made for {count}")
    behind = ids_of(inner.get("layer_ids"), "layer_ids")
    if behind is not None and list(behind) == [each + 1 for each in ids]:
        return readings_of(behind, target.layers, 0)  # the config has both kinds of numbers: only one reading is left
    # SGLang and its trainer read the numbers as layers whose output is used; vLLM and speculators read them as
    # boundaries
    return readings_of(ids, target.layers, 0) if written else readings_of(ids, target.layers, 1, (0,))


def _check_shared(spec: Eagle3Spec) -> None:
    """Checks the target's matrices that a draft head without its own embedding or output matrix uses.

    Raises CheckpointError if such a matrix does not have the shape that the head needs.
    """
    target = spec.target
    if not spec.own_embed and spec.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the draft head has no embedding and cannot use that of {target.name}: the head has hidden_size "
            f"{spec.hidden_size}, the target {target.hidden_size}; use a head that was trained for this target"
        )
    lent = not (spec.own_head or spec.tied_head)
    if lent and (spec.hidden_size, spec.vocab_size) != (target.hidden_size, target.vocab_size):
        raise CheckpointError(
            f"lm_head.weight is missing, and the target's [{target.vocab_size}, {target.hidden_size}] does not fit "
            f"[{spec.vocab_size}, {spec.hidden_size}]"
        )
    if not spec.own_embed and target.embed_scale != 1.0:
        raise UnsupportedModel(
            f"the head has no embedding of its own, and {target.name} scales its own: engines differ in whether such a "
            "head reads it scaled; use a head that brings its embedding"
        )


def _tensors(spec: Eagle3Spec, count: int) -> dict[str, tuple[int, ...]]:
    decoder, hidden, wide = spec.decoder, spec.hidden_size, spec.target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
    if spec.fc:
        shapes["fc.weight"] = (hidden, count * wide)
    if spec.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (count * wide,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (wide,) for index in range(count)}
    if spec.own_embed:
        shapes["embed_tokens.weight"] = (spec.target.vocab_size, hidden)
    if spec.own_head:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        shapes |= layer_shapes(decoder, layer, f"layers.{layer}.", hidden if layer else 2 * hidden)
    return shapes
