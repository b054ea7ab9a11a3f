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
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.config import DTYPES
from fastspec.models.weights.live import ModuleTensors
from fastspec.models.weights.loader import Loader, TensorSource, WeightFormat
from fastspec.models.weights.names import EMBED, HEAD, NamedTensors, Stored
from fastspec.models.weights.quantised.tensors import QuantisedShards
from fastspec.models.weights.shards import ShardTensors, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.config import ModelSpec
    from fastspec.models.weights.sources import Checkpoint

NORM: Final = "model.norm.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. H query heads, Hkv key heads, D head_dim; a bias or norm is None where the spec has
    none.

    Attributes:
        input_norm, post_norm: [hidden] RMSNorm weights before attention and before the MLP.
        qkv: [(H + 2 * Hkv) * D, hidden], query rows first, then key, then value. qkv_bias: its bias.
        q_norm, k_norm: [D].
        o: [hidden, H * D]. o_bias: [hidden].
        gate_up: [2 * intermediate, hidden], gate rows first. gate_up_bias: its bias.
        down: [hidden, intermediate]. down_bias: [hidden].
    """

    input_norm: Tensor
    post_norm: Tensor
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


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of one decoder, of one dtype on one device.

    Attributes:
        embed: [V, hidden]. norm: [hidden], the final RMSNorm. head: [V, hidden]; `head is embed` when tied.
    """

    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight

    def nbytes(self) -> int:
        """Bytes of device memory that the weights take; a tied head is counted once."""
        held: list[Weight | Tensor | None] = [self.embed, self.norm, self.head]
        for layer in self.layers:
            held += [getattr(layer, field.name) for field in fields(layer)]
        return sum({id(each): each.nbytes for each in held if each is not None}.values())


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec must hold, head included unless tied."""
    hidden, inter, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    linears = {
        "self_attn.q_proj": (q_rows, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, spec.o_bias),
        "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
        "mlp.up_proj": (inter, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inter, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, hidden), NORM: (hidden,)}
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (dim,)
    return shapes


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
    weight_format: WeightFormat = TORCH_OPS.weight_format,
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
        weight_format: as in `Ops`: the format in which a weight is used.

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
    loader = Loader(source, dtype, device, weight_format, bar, release=release_source, later=later)
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
    norm = loader.tensor(NORM)
    head = embed if spec.tied else loader.weight(HEAD)
    return DecoderWeights(embed=embed, layers=layers, norm=norm, head=head)


def _layer(loader: Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    def tensor(kind: str, *names: str, when: bool) -> Tensor | None:
        return loader.tensor(*(f"{prefix}{name}.{kind}" for name in names)) if when else None

    def weight(*names: str, gated: bool = False) -> Weight:
        return loader.weight(*(f"{prefix}{name}.weight" for name in names), gated=gated)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        input_norm=loader.tensor(f"{prefix}input_layernorm.weight"),
        post_norm=loader.tensor(f"{prefix}post_attention_layernorm.weight"),
        qkv=weight(*qkv),
        qkv_bias=tensor("bias", *qkv, when=spec.qkv_bias),
        q_norm=tensor("weight", "self_attn.q_norm", when=spec.qk_norm),
        k_norm=tensor("weight", "self_attn.k_norm", when=spec.qk_norm),
        o=weight("self_attn.o_proj"),
        o_bias=tensor("bias", "self_attn.o_proj", when=spec.o_bias),
        gate_up=weight(*gate_up, gated=True),
        gate_up_bias=tensor("bias", *gate_up, when=spec.mlp_bias),
        down=weight("mlp.down_proj"),
        down_bias=tensor("bias", "mlp.down_proj", when=spec.mlp_bias),
    )
