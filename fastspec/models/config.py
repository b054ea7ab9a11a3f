"""Checked fields of a Hugging Face config: sizes, rotary embedding, and the operations of each layer.

`spec_from_config` converts a config to a frozen `ModelSpec`, or raises an error that names the bad field. The family's
file in `families/` defines the layers. No other code reads a config. So a setting that is not in the spec cannot change
the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from fastspec.errors import UnsupportedModel
from fastspec.kv_cache.states import row_bytes
from fastspec.models.families import FAMILIES
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, ModelScales
from fastspec.models.fields import ConfigFields
from fastspec.models.layer_table import weight_bytes
from fastspec.models.rope import RopeSpec, head_order, ropes_of
from fastspec.shapes import DeltaRule, MambaRule, SelectiveRule, StateRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NO_SCALES: Final = ModelScales()
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM: Final = 512
# transformers changes its own classes, for all threads, while it makes or reads a model; so only one thread does it at
# a time
MAKING: Final = threading.RLock()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and arithmetic of one decoder. Sizes are numbers of elements.

    Attributes:
        family: `model_type` of the config, a key of `FAMILIES`.
        max_length: max_position_embeddings of the config, in tokens.
        rms_eps: epsilon of all norms.
        ropes: rotary embeddings. `LayerPlan.rope` is an index of this tuple. Empty: no layer has rope.
        scales: factors on the embedding and on the logits.
        plans: operations of each layer. Layers with the same plan have the same tensors.
        tied: True if the LM head is the embedding matrix.
        dtype: dtype that the checkpoint declares. If it declares none: the dtype of its stored tensors.
        own_names: pairs (name of a row of `layer_table.LAYER`, names of its tensors in the checkpoint). Only for rows
            whose names in this checkpoint differ from those of the family.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_length: int
    ropes: tuple[RopeSpec, ...]
    plans: tuple[LayerPlan, ...]
    tied: bool
    dtype: torch.dtype
    scales: ModelScales = NO_SCALES
    own_names: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def rope(self) -> RopeSpec:
        """The first rotary embedding; most models have only one."""
        return self.ropes[0]

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor names of the checkpoint that differ from `layer_table.LAYER`: name of the table's row -> names."""
        return {**FAMILIES[self.family].names, **dict(self.own_names)}

    @property
    def head_order(self) -> list[int] | None:
        """Index in the checkpoint of each loaded element of a query or key head; see `rope.head_order`.

        None: elements are loaded in the stored order.
        """
        if not self.ropes:
            return None
        return head_order(len(self.rope.inv_freq), self.rope_dims[0], interleaved=FAMILIES[self.family].interleaved)

    def for_length(self, max_length: int) -> ModelSpec:
        """Returns the spec for a generator with rows of up to `max_length` tokens; see `RopeSpec.for_length`."""
        return replace(self, ropes=tuple(rope.for_length(max_length) for rope in self.ropes))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.plans)

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, KV heads, head_dim) of each layer with K and V of its own in the cache."""
        return tuple(self.heads_of(self.plans[layer]) for layer in self.caching)

    def heads_of(self, plan: LayerPlan) -> tuple[int, int, int]:
        """Returns (query heads, KV heads, head_dim) of a layer."""
        return self.num_heads, plan.kv_heads or self.num_kv_heads, plan.head_dim or self.head_dim

    @property
    def attending(self) -> tuple[int, ...]:
        """Indices of layers with attention."""
        return tuple(layer for layer, plan in enumerate(self.plans) if plan.attends)

    @property
    def caching(self) -> tuple[int, ...]:
        """Indices of layers with keys and values of their own, in the order of the KV cache."""
        return tuple(layer for layer, plan in enumerate(self.plans) if plan.caches)

    @property
    def rope_dims(self) -> tuple[int, ...]:
        """Size of a head that each of `ropes` rotates, one number per rope. Includes elements that are not rotated."""
        dims = {plan.rope: self.heads_of(plan)[2] for plan in self.plans}
        return tuple(dims.get(index, 2 * len(rope.inv_freq)) for index, rope in enumerate(self.ropes))

    @property
    def state_rules(self) -> tuple[StateRule, ...]:
        """Kind and sizes of the recurrent state of each layer that has one."""
        return tuple(plan.state for plan in self.plans if plan.state is not None)

    @property
    def divided(self) -> dict[str, int]:
        """Sizes that must be multiples of the number of tensor-parallel ranks: name for messages -> size.

        A size of 1 means that the model cannot be split. `num_heads` and `num_kv_heads` are not included.
        """
        found = {"intermediate_size": self.intermediate_size}
        for plan in self.plans:
            if plan.kv_heads is not None and plan.kv_heads & (plan.kv_heads - 1):  # ranks are powers of two
                found["key heads of some layers"] = plan.kv_heads
            if plan.width is not None:
                found["width of some layers"] = plan.width
            if plan.experts is not None:
                found["width of experts"] = plan.experts.width
                found |= {"width of the shared expert": plan.experts.shared} if plan.experts.shared else {}
            if isinstance(plan.state, DeltaRule):
                found["recurrent key heads"] = plan.state.key_heads
            elif isinstance(plan.state, MambaRule):
                found["groups of recurrent heads"] = plan.state.groups
            elif isinstance(plan.state, SelectiveRule):
                found["layers with Mamba-1"] = 1
            elif plan.state is not None:
                found["channels of short convolutions"] = plan.state.channels
            if plan.state is not None and plan.attends:
                found["layers with attention and a state"] = 1
            if not plan.feeds or not plan.mixes:
                found["layers without an MLP, or with nothing else"] = 1
        return found

    @property
    def hosting(self) -> str:
        """Empty string, because this package's decoder runs the model, not a module of transformers (`HostedInfo`)."""
        return ""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer: number of newest keys to which a query attends. None: all keys."""
        return tuple(plan.window for plan in self.plans)

    @property
    def qkv_bias(self) -> bool:
        """True if q, k and v projections have a bias."""
        return self._attends.qkv_bias

    @property
    def o_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self._attends.o_bias

    @property
    def mlp_bias(self) -> bool:
        """True if gate, up and down projections have a bias."""
        return self.plans[0].mlp_bias

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised."""
        return self._attends.qk_norm is not None

    @property
    def _attends(self) -> LayerPlan:
        """Plan of the first layer with attention. If no layer has attention: plan of the first layer."""
        return self.plans[(*self.attending, 0)[0]]

    def rotary_bytes(self, positions: int) -> int:
        """Returns the bytes of all rotary tables for `positions` positions.

        Includes the factors by which some families multiply queries at each position (`RopeSpec.query_factors`).
        """
        sizes = zip(self.ropes, self.rope_dims, strict=True)
        return 4 * positions * sum(dim + bool(rope.query_beta) for rope, dim in sizes)

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one row's recurrent states in the `StateCache`, for up to `max_drafts` draft tokens."""
        return sum(row_bytes(each, max_drafts, dtype) for each in self.state_rules)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of all weights, with matrices in `dtype`."""
        return weight_bytes(self, dtype)

    @property
    def routed_elements(self) -> int:
        """Number of elements of temporary tensors per token, in the layer with experts that needs the most.

        The tensors are the inner activations and the outputs of a token's experts. 0 if no layer has experts.
        """
        plans = [plan.experts for plan in self.plans if plan.experts]
        each = [plan.routing.chosen * (plan.width + self.hidden_size) + self._of_shared(plan) for plan in plans]
        return max(each, default=0)

    def _of_shared(self, plan: ExpertsPlan) -> int:
        """Returns how many elements of temporary memory a shared expert needs for each token.

        This is an upper bound. It holds for a shared expert that is a separate MLP, and for one that is stored with the
        routed experts.
        """
        return max(3 * plan.shared, (plan.width + self.hidden_size) * (plan.shared == plan.width))

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of norm weights in a model of `dtype`.

        It is fp32 if a norm multiplies by its weight in fp32 and rounds to `dtype` after that. Otherwise it is `dtype`.
        """
        return dtype if self.plans[0].norm == "rms" else torch.float32


def supported_models() -> str:
    """Returns one line that lists every supported family and setting, for error messages."""
    families = ", ".join(FAMILIES)
    kinds = ", ".join(dict.fromkeys(kind for family in FAMILIES.values() for kind in family.rope_kinds))
    return (
        f"supported: {families}, and others by transformers' own modules (docs/models.md lists them); rope types "
        f"{kinds}, by family; full or sliding-window attention; hidden_act silu, or what the family's models have; "
        f"even head_dim up to {MAX_HEAD_DIM}; weights in bfloat16, float16 or float32, or quantised by "
        "compressed-tensors, fp8, AWQ, GPTQ or ModelOpt"
    )


def spec_from_config(config: PretrainedConfig) -> ModelSpec:
    """Checks a Hugging Face config, and returns the sizes and layer plans of its model.

    Args:
        config: a transformers config object, with `rope_parameters` or the older `rope_theta` and `rope_scaling`. Not
            modified.

    Returns:
        The frozen spec. Its dtype is float32 if the config names none, as in transformers.

    Raises:
        UnsupportedModel: the family, or a setting that changes the arithmetic, is not implemented. The message names
            the field, its value, and what is supported.
    """
    fields = ConfigFields(config, supported_models())
    family = _family(fields)
    described, whole = FAMILIES[family], fields
    if described.text_part:
        fields = ConfigFields(whole.get("text_config"), whole.supported)
        _refuse_quantised(whole)
    _refuse_unread_settings(fields, described.act, mixed=described.mixed_heads)
    layers = fields.size("num_hidden_layers")
    heads, first = fields.size("num_attention_heads"), fields.of_first_layer()
    kv_heads = first.size("num_key_value_heads") if first.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    head_dim = _head_dim(first, heads)
    plans = described.plans(fields, layers)  # before ropes_of, where transformers reads layer_types without a check
    return ModelSpec(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size(described.inner) if isinstance(described.inner, str) else described.inner(fields),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=fields.positive(described.eps),
        max_length=fields.size("max_position_embeddings"),
        ropes=ropes_of(fields, _rope_dims(plans, head_dim, described), described) if described.rope_kinds else (),
        plans=plans,
        tied=whole.flag("tie_word_embeddings"),
        dtype=_dtype(whole),
        scales=described.scales(fields),
    )


def _family(fields: ConfigFields) -> str:
    family = str(fields.get("model_type"))
    if family not in FAMILIES:
        fields.refuse("model_type", family, "one of " + ", ".join(FAMILIES))
    refuse_other_architectures(family, fields.get("architectures"))
    return family


def refuse_other_architectures(family: str, named: object) -> None:
    """Refuses a config whose `architectures` names anything except the causal model of its family.

    Args:
        family: `model_type` of the config, a key of `FAMILIES`.
        named: value of `architectures`. None or an empty list is accepted.

    Raises:
        UnsupportedModel: names the entry and what was expected.
    """
    named, wanted = list(named) if isinstance(named, tuple) else named, FAMILIES[family].architecture
    if named and named != [wanted]:
        raise UnsupportedModel(
            f"architectures={named!r} is not supported, wanted [{wanted!r}] for model_type {family!r}; "
            f"{supported_models()}"
        )


def _rope_dims(plans: tuple[LayerPlan, ...], head_dim: int, family: ModelFamily) -> tuple[int, ...]:
    """Returns head_dim for each rotary embedding of a family. With latent attention: size of a head's rotated part."""
    dims = {plan.rope: plan.latent.shared if plan.latent else plan.head_dim or head_dim for plan in plans}
    return tuple(dims.get(index, head_dim) for index in range(max(1, len(family.rope_layers))))


def _refuse_unread_settings(fields: ConfigFields, act: tuple[str, str] | None, *, mixed: bool) -> None:
    """Refuses settings that would change the result, and that a `ModelSpec` does not have.

    Args:
        fields: fields of the config.
        act: see `ModelFamily.act`.
        mixed: see `ModelFamily.mixed_heads`.
    """
    # this check is the first: a config with different layers raises an error when another check reads a field in which
    # they differ. Older versions of transformers only store the setting
    if not mixed and fields.get(
        "is_heterogeneous" if hasattr(fields.config, "is_heterogeneous") else "per_layer_config"
    ):
        fields.refuse("per_layer_config", "set", "layers of one shape")
    if act is not None and fields.get(act[0]) != act[1]:
        fields.refuse(act[0], fields.get(act[0]), repr(act[1]))
    _refuse_quantised(fields)


def _refuse_quantised(fields: ConfigFields) -> None:
    found = fields.get("quantization_config")
    if says_quantised(found):
        method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
        stored = "the path of its GGUF file" if method == "gguf" else "its directory"
        fields.refuse("quantization_config", found, f"{stored} in place of the live model")


def says_quantised(value: object) -> bool:
    """True if the value of a config's `quantization_config` means that weights are quantised.

    False for None, for a mapping in which all values are None or False, and for bitsandbytes with both of its loading
    options off.
    """
    if not isinstance(value, Mapping):
        return value is not None
    if value.get("load_in_4bit") is False and value.get("load_in_8bit") is False:
        # bitsandbytes sets its quant_method even if it is off
        return value.get("quant_method") not in (None, "bitsandbytes")
    return any(each not in (None, False) for each in value.values())


def _head_dim(fields: ConfigFields, heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_dim = fields.size("head_dim")
    else:
        hidden = fields.size("hidden_size")
        if hidden % heads:
            fields.refuse("hidden_size", hidden, f"a multiple of num_attention_heads={heads}, or a head_dim")
        head_dim = hidden // heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        fields.refuse("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}")
    return head_dim


def _dtype(fields: ConfigFields) -> torch.dtype:
    value = fields.get("dtype")
    if value is None:
        return torch.float32
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        fields.refuse("dtype", value, "bfloat16, float16 or float32")
    return dtype
