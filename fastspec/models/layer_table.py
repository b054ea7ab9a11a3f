"""LAYER: a table with one row for each tensor of a decoder layer. MODEL: a table of the tensors outside of layers.

Shapes, stored names, bytes, the slices that ranks load, and fields of loaded weights all come from these rows. A new
tensor of a family needs one row here, and one field in a class of weights below.

A row gives the shape of its tensor as names of axes. `axes_of` returns the axes of a layer by name. An axis has a
number of elements, and a rule by which tensor-parallel ranks share the elements:

| rule     | a rank's elements                                                                      |
|----------|----------------------------------------------------------------------------------------|
| whole    | all                                                                                    |
| heads    | an equal number of whole heads                                                         |
| kv_heads | whole heads, as above; with fewer heads than ranks, several ranks have the same head   |
| even     | an equal number                                                                        |
| packed   | a range of an expert's columns, a multiple of the columns that kernels read together   |
| vocab    | an equal number of rows of the LM head; all, if parts are not multiples of 16 rows     |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import torch

from fastspec.distributed.slices import Cut, RankShare
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.models.families.plan import LayerPlan
from fastspec.shapes import ConvRule, DeltaRule, MambaRule, SelectiveRule

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.config import ModelSpec

EMBED: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
INPUTS: Final = "model.embed_tokens_per_layer.weight"
CORRECTION: Final = "e_score_correction_bias"  # usual name of the correction that is added to a router's scores
CORRECTIONS: Final = (CORRECTION, "expert_bias")  # all names of this correction
SCALAR: Final = "layer_scalar"  # name of the factor on a layer's result
GATE_UP: Final = ("gate_proj", "up_proj")  # names of the gate and up matrices of one expert
DOWN: Final = "down_proj"
NORM: Final = "model.norm.weight"
NORM_BIAS: Final = "model.norm.bias"

Rule = Literal["whole", "heads", "kv_heads", "even", "packed", "vocab"]
Kind = Literal["matrix", "vector", "norm", "exact", "stack"]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class StateWeights:
    """Tensors of a recurrent layer besides its input and output projections. See `StateRule` for sizes.

    Fields that the rule does not need are None.

    Attributes:
        conv: [channels, 1, width], weights of the convolution.
        conv_bias: [channels].
        decay: log A (`A_log` in checkpoints), fp32 [value_heads]. Mamba-2: [heads]. Mamba-1: [channels, state_dim].
        step: bias of the time step (`dt_bias`), fp32 [value_heads], or [keys] with `by_channel`. Mamba-2: [heads].
            Mamba-1: [channels].
        skip: factor of x in the result of Mamba (`D`), fp32. Mamba-2: [heads]. Mamba-1: [channels].
        norm: [value_dim], weight of the gated norm. Mamba-2: [values].
        gates: [N, hidden], the second half of the input projections of a delta rule (b and a, with `by_channel` also
            z), if it is not stored in the format of the first half. None: it is part of `LayerWeights.qkv`.
        inner, out: input and output projection of the recurrent op, if the layer also has attention. None: they are
            `LayerWeights.qkv` and `LayerWeights.o`.
        select: [rank + 2 * state_dim, channels], the projection of x to the inner step, B and C of Mamba-1.
        step_out: [channels, rank], the projection of the inner step to the steps of all channels.
        step_norm, b_norm, c_norm: [rank], [state_dim] and [state_dim], weights of the norms of inner step, B and C.
        decay_out, gate_out: [keys, rank] and [values, rank], second projections of decays and of the gate z. None:
            they have one projection, in `LayerWeights.qkv`.
    """

    conv: Tensor
    conv_bias: Tensor | None = None
    decay: Tensor | None = None
    step: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
    gates: Weight | None = None
    inner: Weight | None = None
    out: Weight | None = None
    select: Weight | None = None
    step_out: Weight | None = None
    step_norm: Tensor | None = None
    b_norm: Tensor | None = None
    c_norm: Tensor | None = None
    decay_out: Weight | None = None
    gate_out: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Tensors of latent attention besides `qkv` and `o` of the layer; `LatentPlan` has the sizes and formulas.

    Attributes:
        norm: [rank], weight of the norm of c.
        expand: [H * (plain + value), rank], k1 of all heads and then v of all heads.
        q_norm, q_expand: [q_rank] and [H * dim, q_rank], norm and second projection of queries. None: queries have one
            projection.
    """

    norm: Tensor
    expand: Weight
    q_norm: Tensor | None = None
    q_expand: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeights:
    """Tensors of a block before the recurrent op of a layer, besides those of a usual layer; see `BlockPlan`.

    Attributes:
        norm: [2 * hidden], weight of the norm of the block's input.
        linear: [hidden, hidden], the last product of the block.
        gate_up_in, gate_up_out: [rank, hidden] and [2 * intermediate, rank], adapter of gate and up projections.
        qkv_in: [3 * rank, 2 * hidden], first products of the adapters of q, k and v. None: they have no adapters.
        q_out, k_out, v_out: [H * D, rank] and twice [Hkv * D, rank], second products of these adapters.
    """

    norm: Tensor
    linear: Weight
    gate_up_in: Weight
    gate_up_out: Weight
    qkv_in: Weight | None = None
    q_out: Weight | None = None
    k_out: Weight | None = None
    v_out: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one decoder layer: H query heads, Hkv KV heads, D head_dim.

    Fields that the plan does not need are None. Elements of query and key heads may be in another order than in the
    checkpoint, the same for both (`ModelSpec.head_order`). Norm weights have the dtype `ModelSpec.norm_dtype`.

    Attributes:
        input_norm, post_norm: [hidden], norm weights before attention and before the MLP.
        attended_norm, mlp_norm: [hidden], weights of the norms of the outputs of attention and MLP.
        input_norm_bias, post_norm_bias: [hidden].
        qkv: [(H + 2 * Hkv) * D, hidden]: query rows first, then key rows, value rows, and rows of an output gate.
            In a recurrent layer without attention: [rows, hidden], the input projection of its rule. With latent
            attention (`LatentPlan`): rows of q, or of the first projection of q, then c and r. None: the layer has
            only an MLP.
        qkv_bias: bias of qkv.
        q_norm, k_norm: [D], or [H * D] and [Hkv * D] for a norm over all heads.
        head_gate: [H, hidden], projection to the gate of each head's output.
        o: [hidden, H * D]; in a recurrent layer without attention [hidden, values].
        o_bias: [hidden].
        gate_up: [2 * intermediate, hidden], gate rows first. An MLP without a gate has only up rows.
        gate_up_bias: bias of gate_up.
        down: [hidden, intermediate].
        down_bias: [hidden].
        state: other tensors of a recurrent layer. None: the layer has no state.
        latent: other tensors of latent attention. None: the layer has none.
        experts: weights of a mixture of experts. gate_up and down are then those of a shared expert. None: a dense MLP.
        sinks: [H], for each head the score of one more key without a value.
        input_gate, input_projection: [inputs, hidden] and [hidden, inputs], gate and projection of the layer's own
            input (`LayerPlan.inputs`).
        input_projected_norm: [hidden], weight of the norm after input_projection.
        scalar: [1], the factor on the layer's result.
        block: other tensors of a block before the recurrent op. qkv, o, post_norm, gate_up and down are then those of
            the block, and qkv reads 2 * hidden. None: the layer has no such block.
    """

    qkv: Weight | None = None
    o: Weight | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    head_gate: Weight | None = None
    gate_up: Weight | None = None
    gate_up_bias: Tensor | None = None
    down: Weight | None = None
    down_bias: Tensor | None = None
    input_norm: Tensor | None = None
    input_norm_bias: Tensor | None = None
    post_norm: Tensor | None = None
    post_norm_bias: Tensor | None = None
    attended_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    state: StateWeights | None = None
    latent: LatentWeights | None = None
    experts: ExpertWeights | None = None
    input_gate: Weight | None = None
    input_projection: Weight | None = None
    input_projected_norm: Tensor | None = None
    scalar: Tensor | None = None
    block: BlockWeights | None = None

    @property
    def mlp(self) -> tuple[Weight, Weight]:
        """Matrices (gate_up, down) of a layer with a dense MLP or a shared expert."""
        assert self.gate_up is not None, "a mixture without a shared expert has no MLP"
        assert self.down is not None, "a layer with gate_up has down"
        return self.gate_up, self.down

    @property
    def mixer(self) -> tuple[Weight, Weight]:
        """Matrices (qkv, o) of a layer with attention or a recurrent state."""
        assert self.qkv is not None, "the layer has more than an MLP"
        assert self.o is not None, "a layer with qkv has o"
        return self.qkv, self.o

    def matrix(self, place: str) -> Weight | None:
        """Returns the matrix in the field `place`, such as "qkv" or "state.gates". None: there is no matrix."""
        found: object = self
        for name in place.split("."):
            found = getattr(found, name, None)
        return found if isinstance(found, Weight) else None


@dataclass(frozen=True, slots=True, eq=False)
class InputWeights:
    """Weights from which the per-layer inputs of Gemma 4 are computed, for L layers with inputs of P elements.

    Attributes:
        embed: [V, L * P], a second embedding, with a part for each layer.
        projection: [L * P, hidden], projection of the usual embedding of a token.
        norm: [P], weight of the norm after the projection.
    """

    embed: Weight
    projection: Weight
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of one decoder, of one dtype on one device.

    Attributes:
        embed, head: [V, hidden], embedding and LM head. If they are tied, both fields hold the same object.
        norm, norm_bias: [hidden], weight and bias of the norm before the head.
        inputs: weights of the per-layer inputs (Gemma 4). None: layers have no such inputs.
    """

    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight
    norm_bias: Tensor | None = None
    inputs: InputWeights | None = None

    def nbytes(self) -> int:
        """Returns the bytes of device memory. A tied head counts once."""
        return sum(each.nbytes for each in self._held())

    def matrices(self) -> list[Weight]:
        """Returns all matrices except those of routed experts. A tied head is listed once."""
        return [each for each in self._held() if isinstance(each, Weight)]

    def _held(self) -> list[Weight | ExpertWeights | Tensor]:
        held: list[Weight | ExpertWeights | Tensor | None] = [self.embed, self.norm, self.norm_bias, self.head]
        held += [] if self.inputs is None else [self.inputs.embed, self.inputs.projection, self.inputs.norm]
        parts = ((layer, layer.state, layer.latent, layer.block) for layer in self.layers)
        held += [tensor for part in parts for each in part for tensor in _held(each)]
        return list({id(each): each for each in held if each is not None}.values())


_Group: TypeAlias = StateWeights | LatentWeights | BlockWeights  # fields of `LayerWeights` with tensors of their own


def _held(part: LayerWeights | _Group | None) -> Iterator[Weight | ExpertWeights | Tensor | None]:
    for each in () if part is None else fields(part):
        if not isinstance(held := getattr(part, each.name), _Group):
            yield held


class Axis(NamedTuple):
    """Elements along one axis of a tensor, and how ranks share them.

    Attributes:
        units: number of units, such as heads, on all ranks together.
        rule: see the table at the top of this module.
        each: number of elements in a unit.
    """

    units: int
    rule: Rule = "whole"
    each: int = 1

    @property
    def size(self) -> int:
        """Elements on all ranks together."""
        return self.units * self.each

    def part(self, share: RankShare, unit: int = 1) -> Cut:
        """Returns the range of elements that one rank has.

        Args:
            share: the rank.
            unit: the range of a "packed" axis is a multiple of this number.
        """
        if self.rule == "whole":
            return Cut(0, self.size)
        if self.rule == "kv_heads":
            found = share.kv_cut(self.units)
        elif self.rule == "vocab":
            found = share.vocab_cut(self.units)
        else:
            found = share.cut(self.units, unit if self.rule == "packed" else 1)
        return Cut(found.start * self.each, found.stop * self.each)

    def piece(self, parts: int) -> int:
        """Returns the number of elements that one matrix product covers if all numbers of ranks must give equal bits.

        This is one head, or one of `parts` equal parts of the axis. For `parts` see `RankShare`.
        """
        return self.each if self.rule in ("heads", "kv_heads") else self.size // parts


class Slice(NamedTuple):
    """Part of a tensor that a rank loads: ranges of rows, which are stacked, and a range of columns.

    `columns` is None if all columns are loaded.
    """

    rows: tuple[Cut, ...]
    columns: Cut | None = None


Order = Callable[["ModelSpec", LayerPlan], "list[int] | None"]
Condition = Callable[[LayerPlan], bool]


def _always(plan: LayerPlan) -> bool:
    return True


def _never(plan: LayerPlan) -> bool:
    return False


def _as_stored(spec: ModelSpec, plan: LayerPlan) -> None:
    """Returns None: rows are in the stored order. It is the default `order` of a row."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One tensor of a layer, which may be fused from several stored tensors.

    Attributes:
        name: name of the row. Families use it as a key of `ModelFamily.names`, to rename the stored tensors.
        stored: names in a checkpoint, without the layer's prefix and `leaf`; {} is the index of an expert. Empty: only
            families that give it names use the row.
        rows: axes along the first dimension. Each entry has the axis, or the axes, of one stored tensor. A family may
            store all of these tensors as one.
        columns: axes of the other dimensions.
        kind: "matrix": a `Weight`. "stack": the same matrix of all experts. "vector": in the model's dtype. "norm":
            in `ModelSpec.norm_dtype`. "exact": in fp32.
        when: function of a plan that is true if the layer has this tensor.
        bias: function of a plan that is true if each stored tensor has a bias. The field of biases is `<field>_bias`.
        order: function that returns the index of the stored row for each row of the loaded tensor. None: as stored.
        field: field of `LayerWeights`, or of a part of it ("experts.router"). Empty: the name of the row.
        leaf: last part of stored names.
        gated: True if the first half of the rows is a gate, for plans whose MLP has one.
        tree: see `Weight.tree`.
        apart: field for the second half of the stored tensors, if it is not stored in the format of the first half.
            Empty: all have one format.
        joins: for a tensor of a shared expert, name of the row with the same tensor of routed experts. The shared
            expert's tensor may be loaded into the weight of that row, as one more expert.
        mixed: True if rows of several axes are stored together, head by head. Ranks then split these axes together.
    """

    name: str
    stored: tuple[str, ...]
    rows: tuple[str | tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    kind: Kind = "matrix"
    when: Condition = _always
    bias: Condition = _never
    order: Order = _as_stored
    field: str = ""
    leaf: str = ".weight"
    gated: bool = False
    tree: bool = False
    apart: str = ""
    joins: str = ""
    mixed: bool = False

    @property
    def place(self) -> str:
        """Field of `LayerWeights` into which the tensor is loaded."""
        return self.field or self.name

    @property
    def takes_shared(self) -> bool:
        """True if a shared expert's tensor may be loaded into the weight of this row, as one more expert."""
        return any(row.joins == self.name for row in LAYER)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes along the first dimension, in the order in which their elements are stacked."""
        return tuple(axis for part in self.rows for axis in ((part,) if isinstance(part, str) else part))

    def cut(self, axes: Mapping[str, Axis]) -> Literal["rows", "columns"] | None:
        """Returns the dimension of the tensor that is split over ranks. None: every rank has the whole tensor.

        `axes`: name of an axis -> its size and the way ranks split it, from `axes_of`.
        """
        if any(axes[axis].rule != "whole" for axis in self.axes):
            return "rows"
        return "columns" if self.columns and axes[self.columns[0]].rule != "whole" else None

    def names(self, renamed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Returns the row's stored names, without `leaf`. For `renamed` see `ModelFamily.names`."""
        return renamed.get(self.name, self.stored)

    def groups(self, stored: int) -> tuple[tuple[str, ...], ...]:
        """Returns, for each stored tensor, its axes along the first dimension.

        `stored` is the number of tensors in the checkpoint. A single tensor has all axes.
        """
        if stored == len(self.rows):
            return tuple((part,) if isinstance(part, str) else part for part in self.rows)
        return (self.axes,)


def qkv_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored row for each loaded row of q, k, v and output gate. None: as stored.

    With an output gate, a checkpoint stores the rows of each head's query, followed by the rows of its gate. The loaded
    matrix has the rows of all gates last.
    """
    dim, heads, kv_rows = spec.head_dim, spec.num_heads, spec.num_kv_heads * spec.head_dim
    in_head = spec.head_order or list(range(dim))
    if spec.head_order is None and not plan.output_gate:
        return None
    each = (2 if plan.output_gate else 1) * dim
    queries = [head * each + at for head in range(heads) for at in in_head]
    keys = [heads * each + head * dim + at for head in range(spec.num_kv_heads) for at in in_head]
    first = heads * each + kv_rows
    gates = [head * each + dim + at for head in range(heads) for at in range(dim)] if plan.output_gate else []
    return [*queries, *keys, *range(first, first + kv_rows), *gates]


def _head_norm_order(spec: ModelSpec, plan: LayerPlan, heads: int) -> list[int] | None:
    if spec.head_order is None:
        return None
    count = heads if plan.qk_norm == "projection" else 1
    return [head * spec.head_dim + at for head in range(count) for at in spec.head_order]


def q_norm_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored element for each loaded element of q_norm. None: as stored."""
    return _head_norm_order(spec, plan, spec.num_heads)


def k_norm_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored element for each loaded element of k_norm. None: as stored."""
    return _head_norm_order(spec, plan, spec.num_kv_heads)


def delta_order(spec: ModelSpec, plan: LayerPlan) -> list[int]:
    """Returns the index of the stored row for each loaded row of q, k, v, z, b and a (gated delta rule).

    A checkpoint stores them by key head: first q, k, v and z of each key head, then b and a of each key head.
    """
    rule = plan.state
    assert isinstance(rule, DeltaRule), "the layer has the gated delta rule"
    served = rule.value_heads // rule.key_heads
    own = served * rule.value_dim
    each = 2 * rule.key_dim + 2 * own

    def of_heads(start: int, size: int) -> list[int]:
        """Returns indices of stored rows: those from `start` to `start + size - 1` of each key head's q, k, v and z."""
        return [head * each + at for head in range(rule.key_heads) for at in range(start, start + size)]

    def gates(start: int) -> list[int]:
        """Returns indices of the stored rows of b (`start` = 0) or of a (`start` = `served`), for all key heads."""
        first = rule.key_heads * each
        return [first + head * 2 * served + at for head in range(rule.key_heads) for at in range(start, start + served)]

    q, k = of_heads(0, rule.key_dim), of_heads(rule.key_dim, rule.key_dim)
    v, z = of_heads(2 * rule.key_dim, own), of_heads(2 * rule.key_dim + own, own)
    return [*q, *k, *v, *z, *gates(0), *gates(served)]


def latent_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored row for each loaded row of q, c and r (`LatentPlan`). None: as stored.

    If queries have two projections, the rows of the first one take the place of q.
    """
    latent, order = plan.latent, _latent_head_order(spec, plan)
    assert latent is not None, "the layer has latent attention"
    if order is None or latent.q_rank:
        return None if order is None else [*range(latent.q_rank + latent.rank), *_shared_order(spec, plan)]
    queries = [head * latent.dim + at for head in range(spec.num_heads) for at in order]
    return [*queries, *range(len(queries), len(queries) + latent.rank), *_shared_order(spec, plan)]


def _shared_order(spec: ModelSpec, plan: LayerPlan) -> list[int]:
    """Returns the index of the stored row for each loaded row of r (`LatentPlan`)."""
    latent, order = plan.latent, _latent_head_order(spec, plan)
    assert latent is not None
    assert order is not None
    first = (latent.q_rank or spec.num_heads * latent.dim) + latent.rank
    return [first + at - latent.plain for at in order if at >= latent.plain]


def latent_q_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored row for each loaded row of the second projection of queries. None: as stored."""
    order = _latent_head_order(spec, plan)
    assert plan.latent is not None
    return order and [head * plan.latent.dim + at for head in range(spec.num_heads) for at in order]


def latent_expand_order(spec: ModelSpec, plan: LayerPlan) -> list[int]:
    """Returns the index of the stored row for each loaded row of k1 and v (`LatentPlan`).

    A checkpoint stores k1 and v of each head together. The loaded matrix has k1 of all heads, then v of all heads.
    """
    latent = plan.latent
    assert latent is not None, "the layer has latent attention"
    each, heads = latent.plain + latent.value, range(spec.num_heads)
    keys = [head * each + at for head in heads for at in range(latent.plain)]
    return keys + [head * each + at for head in heads for at in range(latent.plain, each)]


def _latent_head_order(spec: ModelSpec, plan: LayerPlan) -> list[int] | None:
    """Returns the index of the stored element for each loaded element of a query head. None: as stored.

    `ModelSpec.head_order` is for heads whose rotated elements are stored first. Here they are stored last.
    """
    if plan.rope is None or spec.head_order is None or plan.latent is None:
        return None
    plain, shared = plan.latent.plain, plan.latent.shared
    return [plain + at if at < shared else at - shared for at in spec.head_order]


def _norms_heads(plan: LayerPlan) -> bool:
    return plan.qk_norm is not None


def _norms_keys(plan: LayerPlan) -> bool:
    return plan.qk_norm is not None and plan.caches


def _biased_qkv(plan: LayerPlan) -> bool:
    return plan.qkv_bias


def _owns(plan: LayerPlan) -> bool:
    return plan.owns


def _adapts(plan: LayerPlan) -> bool:
    return plan.block is not None and plan.block.adapts


def _projects_v(plan: LayerPlan) -> bool:
    return plan.caches and not plan.value_is_key and plan.latent is None and plan.owns


def _latent_queries(plan: LayerPlan) -> bool:
    return plan.latent is not None and plan.latent.q_rank > 0


def _latent_alone(plan: LayerPlan) -> bool:
    return plan.latent is not None and not plan.latent.q_rank


def _by_head(plan: LayerPlan) -> bool:
    return isinstance(plan.state, DeltaRule) and not plan.state.by_channel


def _by_channel(plan: LayerPlan) -> bool:
    return isinstance(plan.state, DeltaRule) and plan.state.by_channel


def _low_rank(plan: LayerPlan) -> bool:
    return isinstance(plan.state, DeltaRule) and plan.state.rank > 0


def _shows_k(plan: LayerPlan) -> bool:
    return plan.caches and plan.value_is_key


def _asks(name: str) -> Condition:
    """Returns a condition that is true if the field `name` of the `ExpertsPlan` is set."""
    return lambda plan: bool(getattr(plan.experts, name))


def _alone(plan: LayerPlan) -> bool:
    return not plan.attends


def _beside(plan: LayerPlan) -> bool:
    return plan.attends


def _biased(plan: LayerPlan) -> bool:
    return plan.state_bias


def _biased_conv(plan: LayerPlan) -> bool:
    return plan.conv_bias


def _biased_mlp(plan: LayerPlan) -> bool:
    return plan.mlp_bias


def _has_inputs(plan: LayerPlan) -> bool:
    return plan.inputs > 0


def _norms_state(plan: LayerPlan) -> bool:
    return isinstance(plan.state, MambaRule) and plan.state.norm is not None


_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_DELTA = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
_CHANNEL_DELTA = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "g", "b", "f"))
_LOW_RANK_DELTA = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a"))
_CHANNEL_CONVS = tuple(f"self_attn.{part}_conv1d" for part in "qkv")
_EXPERT, _SHARED = "mlp.experts.{}.", "mlp.shared_expert."
_ROUTER = "mlp.gate"
_MLP = ("mlp.gate_proj", "mlp.up_proj")
_BLOCK = "shared_transformer."
_MLP_ADAPTER = f"{_BLOCK}feed_forward.gate_up_proj_adapter"
_HEADS_ADAPTER = f"{_BLOCK}self_attn.linear_{{}}_adapter"
_ADAPTER = ("adapter",)
_AFTER_ATTENTION = "post_attention_layernorm"
_CHANNELS = ("keys", "keys", "values")
_HIDDEN = ("hidden",)
_LATENT = ("latent",)
_HEADS = ("value_heads",)
_TAPS = ("one", "taps")
_MAMBA = ("values", "values", "groups", "groups", "value_heads")  # z, x, B, C and the steps


def _rows(when: Condition, *rows: TableRow) -> tuple[TableRow, ...]:
    """Returns the rows with one more condition, `when`: a layer has their tensors only if it is true for its plan."""

    def both(own: Condition) -> Condition:
        return lambda plan: when(plan) and own(plan)

    return tuple(replace(row, when=both(row.when)) for row in rows)


LAYER: Final[tuple[TableRow, ...]] = (
    *_rows(
        lambda plan: plan.attends,
        TableRow("qkv", _QKV, ("q", "k", "v"), ("read",), when=_projects_v, bias=_biased_qkv, order=qkv_order),
        TableRow("qk", _QKV[:2], ("q", "k"), ("read",), when=_shows_k, bias=_biased_qkv, field="qkv"),
        TableRow("q", _QKV[:1], ("q",), ("read",), when=lambda plan: not plan.caches, bias=_biased_qkv, field="qkv"),
        TableRow("o", ("self_attn.o_proj",), _HIDDEN, ("heads",), when=_owns, bias=lambda plan: plan.o_bias, tree=True),
        TableRow("head_gate", ("self_attn.g_proj",), ("query_heads",), ("read",), when=lambda plan: plan.head_gate),
        TableRow("q_norm", ("self_attn.q_norm",), ("q_norm",), (), "norm", when=_norms_heads, order=q_norm_order),
        TableRow("k_norm", ("self_attn.k_norm",), ("k_norm",), (), "norm", when=_norms_keys, order=k_norm_order),
        TableRow("sinks", ("self_attn.sinks",), ("query_heads",), (), "vector", when=lambda plan: plan.sinks, leaf=""),
    ),
    *_rows(
        lambda plan: plan.latent is not None,
        TableRow(
            "latent",
            ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
            ("q", ("latent_rank", "latent_shared")),
            ("read",),
            when=_latent_alone,
            field="qkv",
            order=latent_order,
        ),
        TableRow(
            "latent_in",
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            ("latent_q_rank", ("latent_rank", "latent_shared")),
            ("read",),
            when=_latent_queries,
            field="qkv",
            order=latent_order,
        ),
        TableRow(
            "latent_q_norm",
            ("self_attn.q_a_layernorm",),
            ("latent_q_rank",),
            (),
            "norm",
            when=_latent_queries,
            field="latent.q_norm",
        ),
        TableRow(
            "latent_q_expand",
            ("self_attn.q_b_proj",),
            ("q",),
            ("latent_q_rank",),
            when=_latent_queries,
            field="latent.q_expand",
            order=latent_q_order,
        ),
        TableRow("latent_norm", ("self_attn.kv_a_layernorm",), ("latent_rank",), (), "norm", field="latent.norm"),
        TableRow(
            "latent_expand",
            ("self_attn.kv_b_proj",),
            (("latent_keys", "heads"),),
            ("latent_rank",),
            field="latent.expand",
            order=latent_expand_order,
            mixed=True,
        ),
    ),
    *_rows(
        _by_channel,
        TableRow(
            "channel_delta",
            _CHANNEL_DELTA,
            ("keys", "keys", "values", "values", "value_heads", "keys"),
            ("read",),
            when=lambda plan: not _low_rank(plan),
            field="qkv",
            apart="state.gates",
        ),
        TableRow(
            "channel_delta_in",
            _LOW_RANK_DELTA,
            ("keys", "keys", "values", "value_heads", "state_rank", "state_rank"),
            ("read",),
            when=_low_rank,
            field="qkv",
            apart="state.gates",
        ),
        TableRow(
            "channel_decay_out",
            ("self_attn.f_b_proj",),
            ("keys",),
            ("state_rank",),
            when=_low_rank,
            field="state.decay_out",
        ),
        TableRow(
            "channel_gate_out",
            ("self_attn.g_b_proj",),
            ("values",),
            ("state_rank",),
            when=_low_rank,
            field="state.gate_out",
        ),
        TableRow("channel_out", ("self_attn.o_proj",), _HIDDEN, ("values",), field="o"),
        TableRow("channel_conv", _CHANNEL_CONVS, _CHANNELS, _TAPS, "vector", field="state.conv"),
        TableRow("channel_decay", ("self_attn.A_log",), _HEADS, (), "exact", field="state.decay", leaf=""),
        TableRow("channel_step", ("self_attn.dt_bias",), ("keys",), (), "exact", field="state.step", leaf=""),
        TableRow("channel_norm", ("self_attn.o_norm",), ("value_dim",), (), "vector", field="state.norm"),
    ),
    *_rows(
        _by_head,
        TableRow(
            "delta",
            _DELTA,
            (_CHANNELS, "values", "value_heads", "value_heads"),
            ("read",),
            field="qkv",
            apart="state.gates",
        ),
        TableRow(
            "delta_grouped",
            (),
            ((*_CHANNELS, "values"), ("value_heads", "value_heads")),
            ("read",),
            field="qkv",
            apart="state.gates",
            order=delta_order,
            mixed=True,
        ),
        TableRow("delta_out", ("linear_attn.out_proj",), _HIDDEN, ("values",), field="o"),
        TableRow("delta_conv", ("linear_attn.conv1d",), (_CHANNELS,), _TAPS, "vector", field="state.conv"),
        TableRow("delta_decay", ("linear_attn.A_log",), _HEADS, (), "exact", field="state.decay", leaf=""),
        TableRow("delta_step", ("linear_attn.dt_bias",), _HEADS, (), "exact", field="state.step", leaf=""),
        TableRow("delta_norm", ("linear_attn.norm",), ("value_dim",), (), "vector", field="state.norm"),
    ),
    *_rows(
        lambda plan: isinstance(plan.state, ConvRule),
        TableRow("conv", ("conv.in_proj",), (("values",) * 3,), ("read",), field="qkv", bias=_biased),
        TableRow("conv_out", ("conv.out_proj",), _HIDDEN, ("values",), field="o", bias=_biased),
        TableRow("conv_taps", ("conv.conv",), ("values",), _TAPS, "vector", field="state.conv", bias=_biased_conv),
    ),
    *_rows(
        lambda plan: isinstance(plan.state, MambaRule),
        TableRow("mamba", ("mamba.in_proj",), (_MAMBA,), ("read",), when=_alone, bias=_biased, field="qkv"),
        TableRow("mamba_out", ("mamba.out_proj",), _HIDDEN, ("values",), when=_alone, bias=_biased, field="o"),
        TableRow("mamba_beside", ("mamba.in_proj",), (_MAMBA,), _HIDDEN, when=_beside, field="state.inner"),
        TableRow("mamba_out_beside", ("mamba.out_proj",), _HIDDEN, ("values",), when=_beside, field="state.out"),
        TableRow(
            "mamba_conv", ("mamba.conv1d",), (_MAMBA[1:4],), _TAPS, "vector", field="state.conv", bias=_biased_conv
        ),
        TableRow("mamba_decay", ("mamba.A_log",), _HEADS, (), "exact", field="state.decay", leaf=""),
        TableRow("mamba_step", ("mamba.dt_bias",), _HEADS, (), "exact", field="state.step", leaf=""),
        TableRow("mamba_skip", ("mamba.D",), _HEADS, (), "exact", field="state.skip", leaf=""),
        TableRow("mamba_norm", ("mamba.norm",), ("values",), (), "vector", when=_norms_state, field="state.norm"),
    ),
    *_rows(
        lambda plan: isinstance(plan.state, SelectiveRule),
        TableRow("selective", ("mamba.in_proj",), (("values", "values"),), ("read",), bias=_biased, field="qkv"),
        TableRow("selective_out", ("mamba.out_proj",), _HIDDEN, ("values",), bias=_biased, field="o"),
        TableRow(
            "selective_conv", ("mamba.conv1d",), ("values",), _TAPS, "vector", field="state.conv", bias=_biased_conv
        ),
        TableRow("select", ("mamba.x_proj",), (("state_rank", "state", "state"),), ("values",), field="state.select"),
        TableRow("step_norm", ("mamba.dt_layernorm",), ("state_rank",), (), "norm", field="state.step_norm"),
        TableRow("b_norm", ("mamba.b_layernorm",), ("state",), (), "norm", field="state.b_norm"),
        TableRow("c_norm", ("mamba.c_layernorm",), ("state",), (), "norm", field="state.c_norm"),
        TableRow("step_out", ("mamba.dt_proj",), ("values",), ("state_rank",), field="state.step_out"),
        TableRow("selective_step", ("mamba.dt_proj",), ("values",), (), "exact", field="state.step", leaf=".bias"),
        TableRow("selective_decay", ("mamba.A_log",), ("values",), ("state",), "exact", field="state.decay", leaf=""),
        TableRow("selective_skip", ("mamba.D",), ("values",), (), "exact", field="state.skip", leaf=""),
    ),
    *_rows(
        lambda plan: plan.feeds and plan.experts is None,
        TableRow("gate_up", _MLP, ("gate", "inner"), _HIDDEN, when=_owns, bias=_biased_mlp, gated=True),
        TableRow("down", ("mlp.down_proj",), _HIDDEN, ("inner",), when=_owns, bias=_biased_mlp, tree=True),
    ),
    *_rows(
        lambda plan: plan.block is not None,
        TableRow("block_norm", (f"{_BLOCK}input_layernorm",), ("read",), (), "norm", when=_owns, field="block.norm"),
        TableRow("block_linear", ("linear",), _HIDDEN, _HIDDEN, field="block.linear"),
        TableRow("block_mlp_in", (f"{_MLP_ADAPTER}.0",), _ADAPTER, _HIDDEN, field="block.gate_up_in"),
        TableRow("block_mlp_out", (f"{_MLP_ADAPTER}.1",), (("gate", "inner"),), _ADAPTER, field="block.gate_up_out"),
        TableRow(
            "block_qkv_in",
            tuple(f"{_HEADS_ADAPTER.format(part)}.0" for part in "qkv"),
            _ADAPTER * 3,
            ("read",),
            when=_adapts,
            field="block.qkv_in",
        ),
        *(
            TableRow(
                f"block_{part}_out",
                (f"{_HEADS_ADAPTER.format(part)}.1",),
                (part,),
                _ADAPTER,
                when=_adapts,
                field=f"block.{part}_out",
            )
            for part in "qkv"
        ),
    ),
    *_rows(
        lambda plan: plan.experts is not None,
        TableRow("experts.router", (_ROUTER,), ("experts",), _HIDDEN, bias=_asks("router_bias")),
        TableRow(
            "experts.correction",
            (f"{_ROUTER}.{CORRECTION}",),
            ("experts",),
            (),
            "exact",
            when=_asks("correction"),
            leaf="",
        ),
        TableRow("experts.latent_in", ("mlp.fc1_latent_proj",), _LATENT, _HIDDEN, when=_asks("latent")),
        TableRow("experts.latent_out", ("mlp.fc2_latent_proj",), _HIDDEN, _LATENT, when=_asks("latent")),
        TableRow(
            "experts.gate_up",
            tuple(_EXPERT + part for part in GATE_UP),
            ("width_gate", "width"),
            _LATENT,
            "stack",
            bias=_asks("bias"),
            gated=True,
        ),
        TableRow("experts.down", (_EXPERT + DOWN,), _LATENT, ("width",), "stack", bias=_asks("bias")),
        TableRow(
            "shared_gate_up",
            tuple(_SHARED + part for part in GATE_UP),
            ("shared_gate", "shared"),
            _HIDDEN,
            when=_asks("shared"),
            field="gate_up",
            gated=True,
            joins="experts.gate_up",
        ),
        TableRow(
            "shared_down",
            (_SHARED + DOWN,),
            _HIDDEN,
            ("shared",),
            when=_asks("shared"),
            field="down",
            joins="experts.down",
        ),
        TableRow(
            "experts.shared_gate",
            ("mlp.shared_expert_gate",),
            ("one",),
            _HIDDEN,
            when=_asks("shared_gate"),
            joins="experts.router",
        ),
    ),
    *_rows(
        lambda plan: plan.pre_norm,
        TableRow(
            "input_norm",
            ("input_layernorm",),
            _HIDDEN,
            (),
            "norm",
            when=lambda plan: plan.mixes,
            bias=lambda plan: plan.norm_bias,
        ),
        TableRow(
            "post_norm",
            (_AFTER_ATTENTION,),
            _HIDDEN,
            (),
            "norm",
            when=lambda plan: plan.feeds and not plan.parallel and plan.owns,
            bias=lambda plan: plan.norm_bias,
        ),
    ),
    *_rows(
        lambda plan: plan.post_norm,
        TableRow("attended_norm", (_AFTER_ATTENTION,), _HIDDEN, (), "norm"),
        TableRow("mlp_norm", ("post_feedforward_layernorm",), _HIDDEN, (), "norm"),
    ),
    *_rows(
        _has_inputs,
        TableRow("input_gate", ("per_layer_input_gate",), ("inputs",), _HIDDEN),
        TableRow("input_projection", ("per_layer_projection",), _HIDDEN, ("inputs",)),
        TableRow("input_projected_norm", ("post_per_layer_input_norm",), _HIDDEN, (), "norm"),
    ),
    TableRow("scalar", (SCALAR,), ("one",), (), "vector", when=lambda plan: plan.scaled, leaf=""),
)
MODEL: Final[tuple[TableRow, ...]] = (
    TableRow("embed", ("model.embed_tokens",), ("vocab",), _HIDDEN),
    TableRow("norm", ("model.norm",), _HIDDEN, (), "norm", bias=lambda plan: plan.norm_bias),
    TableRow("head", ("lm_head",), ("head",), _HIDDEN),
    *_rows(
        _has_inputs,
        TableRow("inputs.embed", ("model.embed_tokens_per_layer",), ("vocab",), ("all_inputs",)),
        TableRow("inputs.projection", ("model.per_layer_model_projection",), ("all_inputs",), _HIDDEN),
        TableRow("inputs.norm", ("model.per_layer_projection_norm",), ("inputs",), (), "norm"),
    ),
)


def axes_of(spec: ModelSpec, plan: LayerPlan, reads: int | None = None) -> dict[str, Axis]:
    """Returns the axes of a layer: name in the table -> axis.

    Args:
        spec: spec of the model.
        plan: plan of the layer.
        reads: input width of the first product of the layer. None: hidden_size.
    """
    heads, kv_heads, dim = spec.heads_of(plan)
    width = plan.width or spec.intermediate_size
    over_all = plan.qk_norm == "projection"
    found = {
        "one": Axis(1),
        "hidden": Axis(spec.hidden_size),
        "read": Axis(reads or (spec.hidden_size if plan.block is None else 2 * spec.hidden_size)),
        "adapter": Axis(0 if plan.block is None else plan.block.rank),
        "vocab": Axis(spec.vocab_size),
        "head": Axis(spec.vocab_size, "vocab"),
        "q": Axis((1 + plan.output_gate) * heads, "heads", dim),
        "k": Axis(kv_heads, "kv_heads", dim),
        "v": Axis(kv_heads, "kv_heads", dim),
        "heads": Axis(heads, "heads", dim if plan.latent is None else plan.latent.value),
        "query_heads": Axis(heads, "heads"),
        "q_norm": Axis(heads * dim if over_all else dim),
        "k_norm": Axis(kv_heads * dim if over_all else dim),
        "gate": Axis(plan.gated * width, "even"),
        "inner": Axis(width, "even"),
        "inputs": Axis(plan.inputs),
        "all_inputs": Axis(plan.inputs * spec.num_layers),
    }
    if (latent := plan.latent) is not None:
        found |= {
            "latent_rank": Axis(latent.rank),
            "latent_shared": Axis(latent.shared),
            "latent_q_rank": Axis(latent.q_rank),
            "latent_keys": Axis(heads, "heads", latent.plain),
        }
    if (rule := plan.state) is not None:
        found["taps"] = Axis(rule.width)
    if isinstance(rule, DeltaRule):
        found |= {
            "keys": Axis(rule.keys, "even"),
            "values": Axis(rule.values, "even"),
            "value_heads": Axis(rule.value_heads, "even"),
            "value_dim": Axis(rule.value_dim),
            "state_rank": Axis(rule.rank),
        }
    elif isinstance(rule, ConvRule):
        found["values"] = Axis(rule.channels, "even")
    elif isinstance(rule, SelectiveRule):
        sizes = {"values": rule.channels, "state_rank": rule.rank, "state": rule.state_dim}
        found |= {name: Axis(size) for name, size in sizes.items()}
    elif rule is not None:
        found |= {
            "values": Axis(rule.heads, "even", rule.head_dim),
            "groups": Axis(rule.groups, "even", rule.state_dim),
            "value_heads": Axis(rule.heads, "even"),
        }
    if (experts := plan.experts) is not None:
        found |= {
            "experts": Axis(experts.count),
            "latent": Axis(experts.latent or spec.hidden_size),
            "width": Axis(experts.width, "packed"),
            "width_gate": Axis(experts.gated * experts.width, "packed"),
            "shared": Axis(experts.shared, "even"),
            "shared_gate": Axis(experts.gated * experts.shared, "even"),
        }
    return found


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint, derived from the table.

    Attributes:
        name: name without the layer's prefix.
        kind: `TableRow.kind` of its row. A bias has kind "norm" or "vector".
        rows: axes of its first dimension, in the order in which their elements are stacked.
        columns: axes of the other dimensions.
        mixed: True if rows of all axes are stored together, head by head.
    """

    name: str
    kind: Kind
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...] = ()
    mixed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (sum(axis.size for axis in self.rows), *(axis.size for axis in self.columns))

    def part(self, share: RankShare, unit: int) -> Slice | None:
        """Returns the slice that a rank loads. None: the whole tensor. For `unit` see `Axis.part`."""
        if any(axis.rule != "whole" for axis in self.rows):
            if self.mixed:
                return Slice((share.cut(self.shape[0]),))
            starts = [sum(axis.size for axis in self.rows[:index]) for index in range(len(self.rows))]
            cuts = [axis.part(share, unit) for axis in self.rows]
            return Slice(tuple(Cut(at + cut.start, at + cut.stop) for at, cut in zip(starts, cuts, strict=True)))
        if self.columns and self.columns[0].rule != "whole":
            return Slice((Cut(0, self.shape[0]),), self.columns[0].part(share, unit))
        return None


def rows_of(spec: ModelSpec, plan: LayerPlan) -> tuple[TableRow, ...]:
    """Returns the rows of `LAYER` whose tensors a layer has."""
    return tuple(row for row in LAYER if row.when(plan) and row.names(spec.names))


def stored_tensors(spec: ModelSpec, plan: LayerPlan, reads: int | None = None) -> Iterator[StoredTensor]:
    """Yields every stored tensor of a layer. For the arguments see `axes_of`."""
    axes, rows = axes_of(spec, plan, reads), rows_of(spec, plan)
    for stack, some in groupby(rows, lambda row: row.kind == "stack"):
        fused = tuple(some)
        for expert in range(axes["experts"].units if stack else 1):
            for row in fused:
                yield from _stored(row, row.names(spec.names), axes, plan, expert)


def _stored(
    row: TableRow, names: tuple[str, ...], axes: Mapping[str, Axis], plan: LayerPlan, expert: int = 0
) -> Iterator[StoredTensor]:
    for name, group in zip(names, row.groups(len(names)), strict=True):
        rows = tuple(axes[axis] for axis in group if axes[axis].size)
        columns, at = tuple(axes[axis] for axis in row.columns), name.format(expert)
        yield StoredTensor(f"{at}{row.leaf}", row.kind, rows, columns, row.mixed)
        if row.bias(plan):
            yield StoredTensor(f"{at}.bias", "norm" if row.kind == "norm" else "vector", rows)


def _by_layer(spec: ModelSpec) -> Iterator[tuple[str, StoredTensor]]:
    """Yields (full name, stored tensor) for every tensor of a model. A tied head is left out."""
    plan = spec.plans[0]
    for row in MODEL:
        if row.when(plan) and (row.name != "head" or not spec.tied):
            yield from ((tensor.name, tensor) for tensor in _stored(row, row.stored, axes_of(spec, plan), plan))
    of_plan = {plan: tuple(stored_tensors(spec, plan)) for plan in dict.fromkeys(spec.plans)}
    for layer, plan in enumerate(spec.plans):
        yield from ((f"model.layers.{layer}.{tensor.name}", tensor) for tensor in of_plan[plan])


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Returns the shape of every tensor that a checkpoint of this spec must have, by name. A tied head is left out."""
    return {name: tensor.shape for name, tensor in _by_layer(spec)}


def layer_shapes(spec: ModelSpec, layer: int, prefix: str, reads: int) -> Shapes:
    """Returns the shape of every tensor of one layer, by its name after `prefix`. For `reads` see `axes_of`."""
    return {f"{prefix}{tensor.name}": tensor.shape for tensor in stored_tensors(spec, spec.plans[layer], reads)}


def slices_of(spec: ModelSpec, share: RankShare, unit: int = 1) -> dict[str, Slice]:
    """Returns the slices that a rank loads, by tensor name. Tensors that are not split have no entry.

    Args:
        spec: spec of the whole model.
        share: the rank.
        unit: see `Axis.part`.
    """
    found = ((name, tensor.part(share, unit)) for name, tensor in _by_layer(spec))
    return {name: part for name, part in found if part is not None}


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors of a model, if its matrices have the dtype `dtype`. A tied head counts once."""
    sizes = {"norm": spec.norm_dtype(dtype).itemsize, "exact": torch.float32.itemsize}
    return sum(math.prod(each.shape) * sizes.get(each.kind, dtype.itemsize) for _, each in _by_layer(spec))


def pieces_of(row: TableRow, spec: ModelSpec, plan: LayerPlan, own: Mapping[str, Axis], parts: int) -> list[int]:
    """Returns the number of rows of each piece of a rank's weight. Each piece has a matrix product of its own.

    The shapes of the pieces are the same for any number of ranks. So the bits of results do not depend on that number.

    Args:
        row: row of the table for the weight.
        spec, plan: spec and layer plan of the whole model.
        own: axes of this rank's part of the layer.
        parts: see `RankShare`.
    """
    whole = axes_of(spec, plan)
    sizes = ((own[axis].size, whole[axis].piece(parts)) for axis in row.axes if own[axis].size)
    return [piece for size, piece in sizes for _ in range(size // piece)]
