"""Reads the parts of a head's config that all types of heads have: sizes of its layers, and its target's properties."""

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
# fields of a config that belong to a learned drafter, as their names show
_OF_DRAFTERS: Final = re.compile(
    r"(^|_)(draft|drafting|mask|markov|confidence|selector|anchors?|eagle|dflash2?|dspark|pard|ptd|beam|depths)(_|$)"
    r"|^(conv_kernel|conv_group|projector)_"
)
# fields of a drafter that are allowed for every type of head: they do not change its arithmetic, or are always read
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
    """Returns the config of a draft head's layers.

    In the layout of speculators it is an object inside of the config. In other layouts it is the config itself.

    Args:
        raw: content of `config.json`.
        where: path of the file, for messages.

    Raises:
        CheckpointError: the value is not an object.
    """
    inner = raw.get(INNER, raw)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: {INNER} is {type(inner).__name__}, wanted an object")
    return inner


def flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns the field `name` of a config, true or false. Returns `default` if it is missing or null.

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
    """Returns the field `name` of a config, a whole number from 1 on. Returns `default` if it is missing or null.

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
    """True if a draft head's own embedding is also its output matrix, according to its `tie_word_embeddings`.

    False if an output matrix is stored, because it is used then, whatever the flag says. The same flag in the object
    `transformer_layer_config` is the target's, and is not read.

    Args:
        raw: content of `config.json`.
        names: names of the stored tensors, converted by `plain_name`.
        drafted: number of token ids that the head can draft.
        target: sizes of the target.

    Raises:
        CheckpointError: the flag is neither true nor false. Or the head drafts fewer ids than its embedding has rows,
            and lacks the output matrix that it needs then.
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
    """Refuses a head whose config has unknown settings, because they may change what it drafts.

    All names in the object `own` are checked. At the top of the config, trainers also copy fields of the target's
    config. So only names that clearly belong to a drafter are checked there.

    Args:
        raw: content of `config.json`.
        own: name of the object in the config that has the drafter's settings.
        known: names of all settings that are read, or that do not change drafts.
        type_name: type of the head, for messages.

    Raises:
        UnsupportedModel: an unknown setting is neither null nor false. The message has all of them.
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
    """Returns the value of the setting `name` in a config. A name "a.b" stands for field b of the object a."""
    found: Any = raw
    for part in name.split("."):
        found = found[part]
    return found


def ids_of(value: object, name: str) -> tuple[int, ...] | None:
    """Checks a list of layer numbers from a config, and returns it as a tuple. Returns None if `value` is None.

    Args:
        value: value of the field.
        name: name of the field, for messages.

    Raises:
        CheckpointError: the value is not a list of whole numbers, or is empty.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
        raise CheckpointError(f"{name}={value!r} in the head's config, wanted a list of whole numbers")
    return tuple(value)


def decoder_of(inner: Mapping[str, Any], names: Collection[str], vocab_size: int, target: TargetSizes) -> ModelSpec:
    """Makes the spec of a draft head's decoder layers.

    They are layers of Llama, or layers of Qwen3 if there are norms of queries and keys.

    Args:
        inner: config of the layers, from `inner_config`.
        names: names of the stored tensors, converted by `plain_name`. They show which projections have a bias.
        vocab_size: number of ids for which the head has logits.
        target: sizes of the target, whose dtype and context length the head has.

    Raises:
        CheckpointError: a size is missing, or the config is not valid.
        UnsupportedModel: a setting that changes the arithmetic is not implemented.
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
    """Refuses a draft head whose config says that it was trained with a target of another architecture.

    The config names that target by its Hub id. The given target may be in a directory of any name, so names cannot be
    compared. Architectures are compared, if the config has them. Sizes are compared elsewhere, with the tensors.

    Args:
        raw: content of the head's `config.json`.
        target: the given target.
        architectures: class names of the given target.

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
