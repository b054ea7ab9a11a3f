"""Checkpoint tensors to the decoder's fused tensors, checked by name, shape and dtype before anything is
allocated.

Every linear is y = x @ W.T with W [out, in]. The q, k and v projections become one matrix, and so do gate and
up; the fused matrix is allocated on the device first, and each part is copied from the file (or the live
module) into its rows, so that the device never holds a matrix twice. A live module is only read: nothing is
shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tqdm import tqdm

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.kernels.common.rounding import kind_for
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.models.checkpoints.expert_tensors import by_expert, expert_weights
from fastspec.models.checkpoints.layouts import delta_order, qkv_order, rotary_order
from fastspec.models.checkpoints.live import ModuleTensors
from fastspec.models.checkpoints.loader import Loader, Rounding, TensorSource
from fastspec.models.checkpoints.names import EMBED, HEAD, NamedTensors, Stored
from fastspec.models.checkpoints.quantised.tensors import QuantisedShards
from fastspec.models.checkpoints.shapes import (
    NORM,
    NORM_BIAS,
    check_no_others,
    check_tensors,
    layer_norms,
    tensor_shapes,
)
from fastspec.models.checkpoints.shards import ShardTensors
from fastspec.models.checkpoints.sliced import SlicedTensors, slices_of
from fastspec.models.config import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.checkpoints.sources import Checkpoint
    from fastspec.models.config import ModelSpec
    from fastspec.models.families.plan import LayerPlan
    from fastspec.shapes import DeltaRule


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """Tensors of a recurrent layer besides its projections; sizes as in `DeltaRule`.

    Attributes:
        conv: [channels, 1, width], of the convolution.
        decay: fp32 [value_heads], log A (`A_log` in checkpoints).
        step: fp32 [value_heads], the bias that is added to a (`dt_bias`).
        norm: [value_dim], of the gated norm.
        gates: [2 * value_heads, hidden], the rows of b and a where these alone are not quantised; None: they lie in
            `LayerWeights.qkv`.
    """

    conv: Tensor
    decay: Tensor
    step: Tensor
    norm: Tensor
    gates: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. H query heads, Hkv key heads, D head_dim; a bias or norm is None where the spec has
    none.

    Where its plans ask for it, elements of a query or key head lie in another order than in the checkpoint, the same
    for both (`ModelSpec.head_order`), and norm weights are fp32 (`ModelSpec.norm_dtype`).

    Attributes:
        input_norm, post_norm: [hidden] norm weights before attention and before the MLP.
        attended_norm, mlp_norm: [hidden] norm weights of what attention and MLP add to the residual stream.
        input_norm_bias, post_norm_bias: [hidden].
        qkv: [(H + 2 * Hkv) * D, hidden], query rows first, then key, then value; after them the rows of an output
            gate. qkv_bias: its bias. Of a recurrent layer [DeltaRule.rows, hidden]: q, k, v, z, b and a.
        q_norm, k_norm: [D], or [H * D] and [Hkv * D] of a norm over all heads.
        o: [hidden, H * D]. o_bias: [hidden].
        gate_up: [2 * intermediate, hidden], gate rows first; without a gate half of it. gate_up_bias: its bias.
        down: [hidden, intermediate]. down_bias: [hidden].
        delta: what a recurrent layer has besides, whose `o` is [hidden, DeltaRule.values]; None: the layer attends.
        experts: the MLP is a mixture of experts; gate_up and down are those of a shared expert
            beside them, else None.
        sinks: [H], of each head the score of one more key without a value.
    """

    input_norm: Tensor | None
    post_norm: Tensor | None
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    gate_up: Weight | None
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    attended_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    input_norm_bias: Tensor | None = None
    post_norm_bias: Tensor | None = None
    delta: DeltaWeights | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None

    @property
    def mlp(self) -> tuple[Weight, Weight]:
        """gate_up and down, of a layer that has an MLP or a shared expert."""
        assert self.gate_up is not None, "a mixture without a shared expert has no MLP"
        assert self.down is not None, "gate_up does not come alone"
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of one decoder, of one dtype on one device.

    Attributes:
        embed: [V, hidden]. head: [V, hidden]; `head is embed` when tied.
        norm, norm_bias: [hidden], of the norm before the head.
    """

    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight
    norm_bias: Tensor | None = None

    def nbytes(self) -> int:
        """Bytes of device memory that the weights take; a tied head is counted once."""
        held: list[Any] = [self.embed, self.norm, self.norm_bias, self.head]
        for layer in self.layers:
            for part in (layer, layer.delta):
                held += [] if part is None else [getattr(part, each.name) for each in fields(part)]
        held = [each for each in held if not isinstance(each, DeltaWeights)]
        return sum({id(each): each.nbytes for each in held if each is not None}.values())


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """Weights that are allocated, and filled later.

    Attributes:
        weights: to be used by nothing that reads values before `fill` has returned.
        fill: reads the files; it may run in another thread. Raises CheckpointError as `allocate_weights`.
        cancel: makes `fill` end soon; the weights are not to be used then.
    """

    weights: DecoderWeights
    fill: Callable[[], None]
    cancel: Callable[[], None]


def allocate_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    release_source: bool = False,
    ops: Ops = TORCH_OPS,
) -> PendingWeights:
    """Allocates all weights of a checkpoint, fused, in `dtype` on `device`.

    A live module is copied here and now, for with `release_source` its memory makes room for the copy.

    Args:
        checkpoint: from `sources.resolve`.
        dtype: torch.bfloat16, torch.float16 or torch.float32; stored values are rounded to it.
        device: where the fused tensors are allocated.
        progress: shows a progress bar in bytes on standard error.
        release_source: frees a live module while it is copied: each parameter becomes an empty meta tensor
            once its copy is made, and the module cannot be used again, also if loading fails half way.
            Without it the module is left as it was. Means nothing for a directory.
        ops: whose weights they are.

    Returns:
        Contiguous tensors that share no memory with the source.

    Raises:
        CheckpointError: the stored tensors are not what the config says, or a value does not fit in float16.
        UnsupportedModel: a stored dtype, or the live module, is not supported.
        UnsupportedOption: `dtype` is none of the three.
    """
    if dtype not in DTYPES:
        raise UnsupportedOption(f"dtype={dtype} is not supported, wanted bfloat16, float16 or float32")
    source = source_of(checkpoint)
    whole, spec = _whole(checkpoint), checkpoint.native
    check_tensors(source.infos(), whole, checkpoint.name)
    if checkpoint.module is not None:
        check_no_others(source.infos(), whole, checkpoint.name)
    whole_infos = None if checkpoint.sliced is None else source.infos()
    source = _own(source, checkpoint)
    total = dtype.itemsize * sum(math.prod(source.infos()[name].shape) for name in tensor_shapes(spec))
    bar: tqdm[NoReturn] = tqdm(
        total=total, unit="B", unit_scale=True, desc=f"loading {checkpoint.role}", disable=not progress
    )
    later = checkpoint.module is None
    rounds_to = _rounding(checkpoint)
    loader = Loader(
        source, dtype, device, ops, bar, rounds_to=rounds_to, release=release_source, later=later, whole=whole_infos
    )
    with torch.no_grad():
        if spec.tied and release_source and HEAD in source.infos():
            source.release([HEAD])  # whose values are the embedding's, as `resolve` found
        weights = _assemble(loader, spec)

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams fill memory that was in use on this one

    def fill() -> None:
        with bar:
            loader.fill()

    return PendingWeights(weights, fill, loader.cancel)


def planned_bytes(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
    """Bytes that `allocate_weights` with these arguments takes; nothing is allocated, and no value is read."""
    if checkpoint.quantisation is None and checkpoint.rounded is None and checkpoint.sliced is None:
        return checkpoint.native.weight_bytes(dtype)
    rounds_to = _rounding(checkpoint)
    bar: tqdm[NoReturn] = tqdm(disable=True)
    source = _own(source_of(checkpoint), checkpoint)
    whole = None if checkpoint.sliced is None else source_of(checkpoint).infos()
    loader = Loader(source, dtype, device, ops, bar, rounds_to=rounds_to, planned=True, later=True, whole=whole)
    return _assemble(loader, checkpoint.native).nbytes()


def _rounding(checkpoint: Checkpoint) -> Rounding:
    """How matrices are rounded while they are loaded: those of layers, and of a draft the head, which is as large.

    A head of a target stays as it is, as in published checkpoints. One in 4 bits would lose the most: it has 8.
    """
    form, draft = checkpoint.rounded, checkpoint.role == "draft"

    def rounds_to(name: str, shape: tuple[int, int]) -> CodesKind | None:
        if form is None:
            return None
        if name in (EMBED, HEAD):
            head = draft and (name == HEAD or checkpoint.native.tied)
            return kind_for("int8" if form == "int4" else form, shape) if head else None
        return kind_for(form, shape)

    return rounds_to


def load_weights(checkpoint: Checkpoint, **options: Any) -> DecoderWeights:
    """What `allocate_weights` makes with the same arguments, filled; raises the same."""
    pending = allocate_weights(checkpoint, **options)
    pending.fill()
    return pending.weights


def _whole(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of what is stored, of which one rank may load a part."""
    return checkpoint.native if checkpoint.sliced is None else checkpoint.sliced.spec


def _own(source: TensorSource, checkpoint: Checkpoint) -> TensorSource:
    """What is loaded here of a source."""
    if checkpoint.sliced is None:
        return source
    return SlicedTensors(source, slices_of(checkpoint.sliced.spec, checkpoint.sliced.share, checkpoint.sliced.unit))


def source_of(checkpoint: Checkpoint) -> TensorSource:
    """The tensors of a checkpoint by the names of parameters."""
    whole = _whole(checkpoint)
    if checkpoint.module is not None:
        return by_expert(ModuleTensors(checkpoint.module), whole, checkpoint.name)
    if checkpoint.directory is None:
        raise CheckpointError(f"{checkpoint.name}: has neither a directory nor a module; make it with resolve()")
    stored: Stored = by_expert(ShardTensors(checkpoint.directory), whole, checkpoint.name)
    if checkpoint.quantisation is not None:
        stored = QuantisedShards(stored, checkpoint.quantisation, tensor_shapes(whole))
    return named(stored, whole)


def named(stored: Stored, spec: ModelSpec) -> NamedTensors:
    """The tensors of a directory by the names of the parameters of `spec`."""
    return NamedTensors(stored, tensor_shapes(spec).keys(), spec.tied)


def _assemble(loader: Loader, spec: ModelSpec) -> DecoderWeights:
    embed = loader.weight(EMBED)
    head = embed if spec.tied else loader.weight(HEAD)  # what is largest is begun first
    layers = tuple(_layer(loader, spec, plan, f"model.layers.{index}.") for index, plan in enumerate(spec.plans))
    norm = _norm(loader, spec, NORM)
    bias = _norm(loader, spec, NORM_BIAS) if spec.plans[-1].norm_bias else None
    return DecoderWeights(embed=embed, layers=layers, norm=norm, head=head, norm_bias=bias)


def _norm(loader: Loader, spec: ModelSpec, name: str, order: list[int] | None = None) -> Tensor:
    """A norm's weight as the sum of it and what the kind of norm adds to it, or a norm's bias."""
    plus_one = spec.plans[0].norm == "rms_plus_one"
    return loader.tensor(name, order=order, dtype=spec.norm_dtype(loader.dtype), plus=1.0 if plus_one else 0.0)


def _layer(loader: Loader, spec: ModelSpec, plan: LayerPlan, prefix: str) -> LayerWeights:
    names = spec.names

    def bias(part: str) -> Tensor | None:
        return loader.tensor(f"{prefix}{part}.bias") if plan.mlp_bias else None

    given: dict[str, Any] = {"input_norm": None, "post_norm": None}
    for field, part in layer_norms(spec).items():
        given[field] = _norm(loader, spec, f"{prefix}{part}.weight")
        if plan.norm_bias:
            given[f"{field}_bias"] = _norm(loader, spec, f"{prefix}{part}.bias")
    rule = plan.delta
    given |= _attention(loader, spec, plan, prefix) if rule is None else _delta(loader, spec, rule, prefix)
    gate_up, down = names.gate_up, names.down
    if plan.experts is not None:
        given["experts"] = expert_weights(loader, names, plan.experts, prefix)
        gate_up, down = names.shared_gate_up, names.shared_down
    has_mlp = plan.experts is None or (plan.experts.shared > 0 and not given["experts"].joined)
    return LayerWeights(
        gate_up=loader.weight(*(f"{prefix}{part}.weight" for part in gate_up), gated=plan.gated) if has_mlp else None,
        gate_up_bias=loader.tensor(*(f"{prefix}{part}.bias" for part in gate_up)) if plan.mlp_bias else None,
        down=loader.weight(f"{prefix}{down}.weight", tree=plan.experts is None) if has_mlp else None,
        down_bias=bias(down),
        **given,
    )


def _attention(loader: Loader, spec: ModelSpec, plan: LayerPlan, prefix: str) -> dict[str, Any]:
    """The fields of attention in `LayerWeights`."""
    names, order = spec.names, qkv_order(spec, plan)

    def bias(parts: tuple[str, ...], when: bool, order: list[int] | None = None) -> Tensor | None:
        return loader.tensor(*(f"{prefix}{part}.bias" for part in parts), order=order) if when else None

    def head_norm(part: str, heads: int) -> Tensor | None:
        if plan.qk_norm is None:
            return None
        of_heads = rotary_order(spec, heads if plan.qk_norm == "projection" else 1)
        return _norm(loader, spec, f"{prefix}{part}.weight", of_heads)

    return {
        "qkv": loader.weight(*(f"{prefix}{part}.weight" for part in names.qkv), order=order),
        "qkv_bias": bias(names.qkv, plan.qkv_bias, order),
        "q_norm": head_norm(names.q_norm, spec.num_heads),
        "k_norm": head_norm(names.k_norm, spec.num_kv_heads),
        "o": loader.weight(f"{prefix}{names.o}.weight", tree=True),
        "o_bias": bias((names.o,), plan.o_bias),
        "sinks": loader.tensor(f"{prefix}{names.sinks}") if plan.sinks else None,
    }


def _delta(loader: Loader, spec: ModelSpec, rule: DeltaRule, prefix: str) -> dict[str, Any]:
    """The fields of a recurrent layer in `LayerWeights`, in place of those of attention."""
    names = spec.names
    qkv, gates = _projections(loader, rule, [f"{prefix}{part}.weight" for part in names.delta])
    own = DeltaWeights(
        conv=loader.tensor(f"{prefix}{names.delta_conv}.weight"),
        decay=loader.tensor(f"{prefix}{names.delta_decay}", dtype=torch.float32),
        step=loader.tensor(f"{prefix}{names.delta_step}", dtype=torch.float32),
        norm=loader.tensor(f"{prefix}{names.delta_norm}.weight"),
        gates=gates,
    )
    return {
        "qkv": qkv,
        **dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "o_bias")),
        "o": loader.weight(f"{prefix}{names.delta_out}.weight"),
        "delta": own,
    }


def _projections(loader: Loader, rule: DeltaRule, parts: list[str]) -> tuple[Weight, Weight | None]:
    """The projections of a recurrent layer as one matrix, or those of b and a apart where they alone are plain."""
    order = delta_order(rule) if len(parts) == 2 else None  # others are stored as they are multiplied
    if loader.same_format(*parts):
        return loader.weight(*parts, order=order), None
    half, rows = len(parts) // 2, rule.channels + rule.values
    first, behind = (None, None) if order is None else (order[:rows], [at - rows for at in order[rows:]])
    return loader.weight(*parts[:half], order=first), loader.weight(*parts[half:], order=behind)


def layer_weights(loader: Loader, spec: ModelSpec, index: int) -> LayerWeights:
    """One layer of a model, by the names of its parameters."""
    return _layer(loader, spec, spec.plans[index], f"model.layers.{index}.")


def norm_weight(loader: Loader, spec: ModelSpec, name: str) -> Tensor:
    """A norm of the kind that a model has, as its ops want it."""
    return _norm(loader, spec, name)
