"""Parts of a head's config that all types of heads have: sizes of its layers, and properties of its target."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES
from fastspec.models.families.plan import HeadNorm, LayerPlan, ModelScales
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.models.heads.spec import SUPPORTED, TargetSizes
from fastspec.models.rope import ropes_of

INNER: Final = "transformer_layer_config"
# names of settings that say themselves that they are a drafter's
_OF_DRAFTERS: Final = re.compile(
    r"(^|_)(draft|drafting|mask|markov|confidence|selector|anchors?|eagle|dflash2?|dspark|pard|ptd|beam|depths)(_|$)"
    r"|^(conv_kernel|conv_group|projector)_"
)
# settings that every head may have, and that do not change its arithmetic, or that are read for all heads
_SAID: Final = (
    *("draft_vocab_size", "max_anchors", "num_anchors", "draft_attn_impl", "embed_requires_grad", "num_depths"),
    *("confidence_temperatures", "target_model_name_or_path"),
)
_READ: Final = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "layer_types", "sliding_window", "vocab_size"),
)


def inner_config(raw: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """Returns the config of a head's layers: a separate object in the layout of speculators, else the config itself."""
    inner = raw.get(INNER, raw)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: {INNER} is {type(inner).__name__}, wanted an object")
    return inner


def flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns True or False. null gives the default.

    Raises:
        CheckpointError: any other value.
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{name}={value!r} in the head's config, wanted true or false")
    return value


def size(raw: Mapping[str, Any], name: str, default: int) -> int:
    """Returns a whole number from 1 on. null gives the default.

    Raises:
        CheckpointError: any other value.
    """
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= max(SIZE_LIMITS.values()):
        raise CheckpointError(f"{name}={value!r} in the head's config, wanted a whole number from 1")
    return value


def ties_head(raw: Mapping[str, Any], names: Collection[str], drafted: int, target: TargetSizes) -> bool:
    """Returns True if a head's own embedding is also its output matrix, by its own `tie_word_embeddings`.

    A stored output matrix is used in any case. The flag of `transformer_layer_config` is the target's, and not read.

    Args:
        raw: content of `config.json`.
        names: names of the stored tensors, converted by `plain_name`.
        drafted: number of ids that the head drafts.

    Raises:
        CheckpointError: the flag is neither true nor false, or the embedding has more rows than the head drafts ids.
    """
    if not flag(raw, "tie_word_embeddings") or "lm_head.weight" in names or "embed_tokens.weight" not in names:
        return False
    if drafted != target.vocab_size:
        raise CheckpointError(
            f"tie_word_embeddings is true, and the head drafts {drafted} ids with an embedding of {target.vocab_size}: "
            "lm_head.weight is missing"
        )
    return True


def refuse_unknown(raw: Mapping[str, Any], own: str, known: Collection[str], type_name: str) -> None:
    """Refuses settings of a drafter that are not known, because they may change what it drafts.

    All names in the config's object for heads are checked. Beside it only names that say that they are a drafter's are
    checked, for trainers copy any field of the target's config there.

    Args:
        raw: content of `config.json`.
        own: name of the config's object for heads.
        known: names of all settings that are read, or that do not change drafts.
        type_name: type of the head, for messages.

    Raises:
        UnsupportedModel: the message has all unknown names.
    """
    inner = raw.get(own)
    names = [f"{own}.{name}" for name in inner if name not in known] if isinstance(inner, Mapping) else []
    names += [name for name in raw if _OF_DRAFTERS.search(name) and name not in (*known, *_SAID, own)]
    unset = [name for name in names if _value(raw, name) not in (None, False)]
    if unset:
        given = ", ".join(f"{name}={_value(raw, name)!r}" for name in unset)
        raise UnsupportedModel(
            f"{given} in the config of this {type_name} head is not known, and may change what it drafts; use a head "
            "without, or take it out if it is only the trainer's"
        )


def _value(raw: Mapping[str, Any], name: str) -> object:
    """Returns the value of a name as `refuse_unknown` writes it."""
    found: Any = raw
    for part in name.split("."):
        found = found[part]
    return found


def ids_of(value: object, name: str) -> tuple[int, ...] | None:
    """Returns a list of layer ids. None if there is none.

    Raises:
        CheckpointError: not a list of ids.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
        raise CheckpointError(f"{name}={value!r} in the head's config, wanted a list of whole numbers")
    return tuple(value)


def decoder_of(inner: Mapping[str, Any], names: Collection[str], vocab_size: int, target: TargetSizes) -> ModelSpec:
    """Returns the spec of the head's layers: those of Llama, or those of Qwen3 if queries and keys are normalised.

    Args:
        inner: result of `inner_config`.
        names: names of the stored tensors, converted by `plain_name`. They show which projections have a bias.
        vocab_size: number of the head's own logits.
        target: sizes of the target, whose dtype the head uses.

    Raises:
        UnsupportedModel: a setting that changes the arithmetic and is not implemented.
    """
    from fastspec.models.config_classes import config_class

    family = "qwen3" if "layers.0.self_attn.q_norm.weight" in names else "llama"
    read = {name: inner[name] for name in _READ if inner.get(name) is not None}
    try:
        config = config_class(family).from_dict(read)
    except Exception as error:  # its validation raises errors of several libraries
        raise CheckpointError(f"not a valid config of {family} layers: {error}") from error
    fields = ConfigFields(config, SUPPORTED)
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
        if name not in read:
            raise CheckpointError(f"the head's config has no {name}")
    if fields.get("hidden_act") != "silu":
        fields.refuse("hidden_act", fields.get("hidden_act"), "'silu'")
    heads, kv_heads = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    head_dim = int(read.get("head_dim") or fields.size("hidden_size") // heads)
    if head_dim % 2 or head_dim > 256 or head_dim < 2:
        fields.refuse("head_dim", head_dim, "an even number up to 256")
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.positive("rms_norm_eps"),
        max_length=target.max_length,
        ropes=ropes_of(fields, (head_dim,), FAMILIES[family]),
        plans=_plans(fields, inner.get("sliding_window"), names, "head" if family == "qwen3" else None),
        tied=False,
        dtype=target.dtype,
        scales=ModelScales(logits=float(inner.get("logit_scale") or 1.0)),
    )


def _plans(
    fields: ConfigFields, window: object, names: Collection[str], qk_norm: HeadNorm | None
) -> tuple[LayerPlan, ...]:
    layers, first = fields.size("num_hidden_layers"), "layers.0."
    types = fields.layer_types(layers) or ("full_attention",) * layers
    if "sliding_attention" in types and (type(window) is not int or window < 1):
        fields.refuse("sliding_window", window, "a number of tokens, for layer_types has sliding_attention")
    return tuple(
        LayerPlan(
            window=window if kind == "sliding_attention" and isinstance(window, int) else None,
            qkv_bias=f"{first}self_attn.q_proj.bias" in names,
            o_bias=f"{first}self_attn.o_proj.bias" in names,
            mlp_bias=f"{first}mlp.down_proj.bias" in names,
            qk_norm=qk_norm,
        )
        for kind in types
    )


def check_verifier(raw: Mapping[str, Any], target: TargetSizes, architectures: Sequence[str]) -> None:
    """Refuses a head that was trained on a model of another architecture than the target, according to its config.

    The config has a Hub id, but a target's directory may have any name. So architectures are compared, if both are
    known. Sizes are compared elsewhere, with the tensors.

    Raises:
        CheckpointError: the architectures differ. The message names both.
    """
    config = raw.get("speculators_config")
    verifier = config.get("verifier") if isinstance(config, Mapping) else None
    if not isinstance(verifier, Mapping):
        return
    wanted = verifier.get("architectures")
    if isinstance(wanted, list) and wanted and not {*architectures} & {*wanted}:
        raise CheckpointError(
            f"it drafts for {verifier.get('name_or_path')} ({', '.join(map(str, wanted))}), and the target "
            f"{target.name} is a {architectures[0]}; choose a head of this target"
        )
