"""Checkpoint tensors to the decoder's fused tensors, checked by name, shape and dtype before anything is
allocated.

Every linear is y = x @ W.T with W [out, in]. The q, k and v projections become one matrix, and so do gate and
up; the fused matrix is allocated on the device first, and each part is copied from the file (or the live
module) into its rows, so that the device never holds a matrix twice. A live module is only read: nothing is
shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from tqdm import tqdm

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import kind_for
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.models.config import DTYPES
from fastspec.models.weights.live import ModuleTensors
from fastspec.models.weights.loader import Loader, Rounding, TensorSource
from fastspec.models.weights.names import EMBED, HEAD, NamedTensors, Stored
from fastspec.models.weights.quantised.tensors import QuantisedShards
from fastspec.models.weights.shards import ShardTensors, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.config import ModelSpec
    from fastspec.models.weights.sources import Checkpoint

NORM: Final = "model.norm.weight"
NORM_BIAS: Final = "model.norm.bias"


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
        qkv: [(H + 2 * Hkv) * D, hidden], query rows first, then key, then value. qkv_bias: its bias.
        q_norm, k_norm: [D], or [H * D] and [Hkv * D] of a norm over all heads.
        o: [hidden, H * D]. o_bias: [hidden].
        gate_up: [2 * intermediate, hidden], gate rows first; without a gate half of it. gate_up_bias: its bias.
        down: [hidden, intermediate]. down_bias: [hidden].
    """

    input_norm: Tensor | None
    post_norm: Tensor | None
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    attended_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    input_norm_bias: Tensor | None = None
    post_norm_bias: Tensor | None = None


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
        held: list[Weight | Tensor | None] = [self.embed, self.norm, self.norm_bias, self.head]
        for layer in self.layers:
            held += [getattr(layer, field.name) for field in fields(layer)]
        return sum({id(each): each.nbytes for each in held if each is not None}.values())


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec must hold, head included unless tied."""
    hidden, norm_bias = spec.hidden_size, spec.plans[0].norm_bias
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, hidden), NORM: (hidden,)}
    if norm_bias:
        shapes[NORM_BIAS] = (hidden,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, hidden)
    of_layer = _layer_shapes(spec)
    for layer in range(spec.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of one layer's tensors, below its prefix."""
    plan, names, hidden, dim = spec.plans[0], spec.names, spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {}

    def add(parts: tuple[str, ...], rows: list[int], columns: int, bias: bool) -> None:
        for part, each in zip(parts, rows if len(parts) == len(rows) else [sum(rows)], strict=True):
            shapes[f"{part}.weight"] = (each, columns)
            if bias:
                shapes[f"{part}.bias"] = (each,)

    add(names.qkv, [q_rows, kv_rows, kv_rows], hidden, plan.qkv_bias)
    add((names.o,), [hidden], q_rows, plan.o_bias)
    add(names.gate_up, [spec.intermediate_size] * (2 if plan.gated else 1), hidden, plan.mlp_bias)
    add((names.down,), [hidden], spec.intermediate_size, plan.mlp_bias)
    for norm in _layer_norms(spec).values():
        shapes[f"{norm}.weight"] = (hidden,)
        if plan.norm_bias:
            shapes[f"{norm}.bias"] = (hidden,)
    if plan.qk_norm is not None:
        whole = plan.qk_norm == "projection"
        shapes[f"{names.q_norm}.weight"] = (q_rows if whole else dim,)
        shapes[f"{names.k_norm}.weight"] = (kv_rows if whole else dim,)
    return shapes


def _layer_norms(spec: ModelSpec) -> dict[str, str]:
    """Names of the norms of the residual stream, and of what is added to it, by the field of `LayerWeights`."""
    plan, names = spec.plans[0], spec.names
    norms = {"input_norm": names.input_norm, "post_norm": names.post_norm} if plan.pre_norm else {}
    if plan.parallel:
        del norms["post_norm"]
    if plan.post_norm:
        norms |= {"attended_norm": names.attended_norm, "mlp_norm": names.mlp_norm}
    return norms


def check_tensors(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Compares what a checkpoint holds with what its config promises, before anything is allocated.

    Args:
        infos: the stored tensors. spec: of the same checkpoint. name: the checkpoint, for messages.

    Raises:
        CheckpointError: names are missing, or a shape is not the config's.
        UnsupportedModel: a tensor is stored in a dtype other than bfloat16, float16 or float32.
    """
    wanted = tensor_shapes(spec)
    missing = [tensor for tensor in wanted if tensor not in infos]
    if missing:
        raise CheckpointError(
            f"{name}: {listing(missing)} missing; the config of this {spec.family} model needs them{_advice(missing)}"
        )
    if spec.tied and HEAD in infos:
        wanted[HEAD] = wanted[EMBED]
    for tensor, shape in wanted.items():
        info = infos[tensor]
        if info.shape != shape:
            raise CheckpointError(
                f"{name}: {tensor} in {info.where} has shape {list(info.shape)}, wanted {list(shape)} from the "
                f"config (vocab_size={spec.vocab_size}, hidden_size={spec.hidden_size}, "
                f"intermediate_size={spec.intermediate_size}, num_attention_heads={spec.num_heads}, "
                f"num_key_value_heads={spec.num_kv_heads}, head_dim={spec.head_dim})"
            )
        if isinstance(info.dtype, str):
            raise UnsupportedModel(
                f"{name}: {tensor} in {info.where} is stored as {info.dtype}, wanted BF16, F16 or F32: load an "
                "unquantised checkpoint"
            )


def _advice(missing: list[str]) -> str:
    if missing == [HEAD]:
        return (
            "; tie_word_embeddings is false in the config, or absent, which transformers reads as false: it would fill "
            "the head with random numbers. If the head is the embedding, set tie_word_embeddings to true in config.json"
        )
    return ""


def check_no_others(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Refuses parameters of a live model that its config has no place for: its layers compute with them.

    Raises:
        CheckpointError: names them.
    """
    wanted = {*tensor_shapes(spec), HEAD}
    extra = [tensor for tensor in infos if tensor not in wanted]
    if extra:
        raise CheckpointError(
            f"{name}: {listing(extra)} unexpected; the config of this {spec.family} model with {spec.num_layers} "
            "layers has no place for them"
        )


def listing(names: list[str]) -> str:
    """The number of names and the first three of them, for messages."""
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor(s) ({shown}{more})"


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
    source = _source_of(checkpoint)
    spec = checkpoint.native
    check_tensors(source.infos(), spec, checkpoint.name)
    if checkpoint.module is not None:
        check_no_others(source.infos(), spec, checkpoint.name)
    total = dtype.itemsize * sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    bar: tqdm[NoReturn] = tqdm(
        total=total, unit="B", unit_scale=True, desc=f"loading {checkpoint.role}", disable=not progress
    )
    later = checkpoint.module is None
    rounds_to = _rounding(checkpoint)
    loader = Loader(source, dtype, device, ops, bar, rounds_to=rounds_to, release=release_source, later=later)
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
    if checkpoint.quantisation is None and checkpoint.rounded is None:
        return checkpoint.spec.weight_bytes(dtype)
    rounds_to = _rounding(checkpoint)
    bar: tqdm[NoReturn] = tqdm(disable=True)
    loader = Loader(_source_of(checkpoint), dtype, device, ops, bar, rounds_to=rounds_to, planned=True, later=True)
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


def _source_of(checkpoint: Checkpoint) -> TensorSource:
    if checkpoint.module is not None:
        return ModuleTensors(checkpoint.module)
    if checkpoint.directory is None:
        raise CheckpointError(f"{checkpoint.name}: has neither a directory nor a module; make it with resolve()")
    stored: Stored = ShardTensors(checkpoint.directory)
    if checkpoint.quantisation is not None:
        stored = QuantisedShards(stored, checkpoint.quantisation, tensor_shapes(checkpoint.native))
    return named(stored, checkpoint.native)


def named(stored: Stored, spec: ModelSpec) -> NamedTensors:
    """The tensors of a directory by the names of the parameters of `spec`."""
    return NamedTensors(stored, tensor_shapes(spec).keys(), spec.tied)


def _assemble(loader: Loader, spec: ModelSpec) -> DecoderWeights:
    embed = loader.weight(EMBED)
    layers = tuple(_layer(loader, spec, f"model.layers.{index}.") for index in range(spec.num_layers))
    norm = _norm(loader, spec, NORM)
    head = embed if spec.tied else loader.weight(HEAD)
    bias = _norm(loader, spec, NORM_BIAS) if spec.plans[-1].norm_bias else None
    return DecoderWeights(embed=embed, layers=layers, norm=norm, head=head, norm_bias=bias)


def _norm(loader: Loader, spec: ModelSpec, name: str, order: list[int] | None = None) -> Tensor:
    """A norm's weight as the sum of it and what the kind of norm adds to it, or a norm's bias."""
    plus_one = spec.plans[0].norm == "rms_plus_one"
    return loader.tensor(name, order=order, dtype=spec.norm_dtype(loader.dtype), plus=1.0 if plus_one else 0.0)


def _layer(loader: Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    plan, names, head_order = spec.plans[0], spec.names, spec.head_order

    def order(heads: int, others: int = 0) -> list[int] | None:
        """The order of the rows of that many heads, and of other rows behind them, which stay as they are."""
        if head_order is None:
            return None
        turned = [head * spec.head_dim + at for head in range(heads) for at in head_order]
        return [*turned, *range(len(turned), len(turned) + others)]

    def bias(parts: tuple[str, ...], when: bool, order: list[int] | None = None) -> Tensor | None:
        return loader.tensor(*(f"{prefix}{part}.bias" for part in parts), order=order) if when else None

    def weight(parts: tuple[str, ...], **options: Any) -> Weight:
        return loader.weight(*(f"{prefix}{part}.weight" for part in parts), **options)

    def head_norm(part: str, heads: int) -> Tensor | None:
        if plan.qk_norm is None:
            return None
        return _norm(loader, spec, f"{prefix}{part}.weight", order(heads if plan.qk_norm == "projection" else 1))

    norms: dict[str, Tensor | None] = {"input_norm": None, "post_norm": None}
    for field, part in _layer_norms(spec).items():
        norms[field] = _norm(loader, spec, f"{prefix}{part}.weight")
        if plan.norm_bias:
            norms[f"{field}_bias"] = _norm(loader, spec, f"{prefix}{part}.bias")
    qkv_order = order(spec.num_heads + spec.num_kv_heads, spec.num_kv_heads * spec.head_dim)
    return LayerWeights(
        qkv=weight(names.qkv, order=qkv_order),
        qkv_bias=bias(names.qkv, spec.qkv_bias, qkv_order),
        q_norm=head_norm(names.q_norm, spec.num_heads),
        k_norm=head_norm(names.k_norm, spec.num_kv_heads),
        o=weight((names.o,)),
        o_bias=bias((names.o,), spec.o_bias),
        gate_up=weight(names.gate_up, gated=plan.fused_gate),
        gate_up_bias=bias(names.gate_up, spec.mlp_bias),
        down=weight((names.down,)),
        down_bias=bias((names.down,), spec.mlp_bias),
        **norms,
    )
