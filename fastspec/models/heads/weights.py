"""Weights of a learned drafter, called a head. They are allocated first and filled later, like those of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import kind_for
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.models.checkpoints.decoder_weights import layer_weights, norm_weight
from fastspec.models.checkpoints.tensor_source import TensorSource, Use
from fastspec.models.checkpoints.weight_loader import Loader, Rounding
from fastspec.models.heads.checkpoint import HeadCheckpoint, HeadTensors
from fastspec.models.heads.dflash_spec import DFlashSpec
from fastspec.models.heads.mtp_names import EMBED_NORM, FC, HIDDEN_NORM, NORM, part_name
from fastspec.models.heads.mtp_spec import MtpSpec, mtp_source
from fastspec.models.heads.some_rows import WithSomeRows, places_of
from fastspec.models.heads.spec import HeadSpec
from fastspec.models.layer_table import DecoderWeights


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of a learned drafter, called a head.

    Attributes:
        decoder: decoder layers, final norm, embedding and output matrix of the head. The last two may be the target's.
        others: name -> other tensor of the head. Matrices such as "fc.weight" are `Weight`s, norms and biases tensors.
    """

    decoder: DecoderWeights
    others: dict[str, Weight | Tensor]

    def matrix(self, name: str) -> Weight | None:
        """Returns the matrix `name` of the attribute `others`. None if there is no such matrix."""
        found = self.others.get(name)
        return found if isinstance(found, Weight) else None

    def vector(self, name: str) -> Tensor | None:
        """Returns the tensor `name` of `others`, such as a norm or a bias. None if there is none of this name."""
        found = self.others.get(name)
        return found if isinstance(found, Tensor) else None


@dataclass(frozen=True, slots=True)
class PendingHead:
    """Weights of a draft head that are allocated but not filled yet. For the attributes see `PendingWeights`."""

    weights: HeadWeights
    fill: Callable[[], None]
    cancel: Callable[[], None]
    checkpoint: HeadCheckpoint
    loader: Loader


def allocate_head(
    checkpoint: HeadCheckpoint,
    target: DecoderWeights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    progress: bool = True,
) -> PendingHead:
    """Allocates the weights of a draft head in `dtype` on `device`.

    If the head has no embedding or output matrix, the target's matrix is used, without a copy. The head's own matrices
    are quantised to the format `checkpoint.rounded`, except the embedding. The output matrix is quantised to at least 8
    bits, as in a draft model.

    Args:
        checkpoint: the head, from `resolve_head` or `resolve_mtp`.
        target: weights of the target.
        dtype, device: dtype and device of the target.
        ops: ops that will read the weights.
        progress: True to show a progress bar.

    Raises:
        CheckpointError: the files cannot be read, or a value does not fit in `dtype`. Only `fill` raises it.
    """
    spec, source = checkpoint.spec, _source_of(checkpoint)
    total = spec.weight_bytes(dtype)
    bar: tqdm[NoReturn] = tqdm(total=total, unit="B", unit_scale=True, desc="loading head", disable=not progress)
    loader = Loader(source, dtype, device, ops, bar, rounds_to=_rounding(checkpoint), later=True)
    with torch.no_grad():
        weights = _assemble(loader, spec, target)

    def fill() -> None:
        with bar:
            loader.fill()

    return PendingHead(weights, fill, loader.cancel, checkpoint, loader)


def head_bytes(checkpoint: HeadCheckpoint, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
    """Returns the number of bytes of a draft head's own weights on a device. Allocates nothing and reads no values.

    If the head drafts only some of the target's ids, the tables that map its ids are included.

    Args:
        checkpoint: the head.
        dtype: dtype of its weights that are not quantised.
        device: the device.
        ops: ops that will read the weights.
    """
    spec, ids = checkpoint.spec, checkpoint.vocab_map
    tables = 0 if ids is None else 8 * (len(ids) + spec.target.vocab_size)
    if checkpoint.rounded is None:
        return spec.weight_bytes(dtype) + tables
    bar: tqdm[NoReturn] = tqdm(disable=True)
    how: dict[str, Any] = {"rounds_to": _rounding(checkpoint), "planned": True, "later": True}
    loader = Loader(_source_of(checkpoint), dtype, device, ops, bar, **how)
    # shared matrices need no additional bytes
    nothing = Weight.empty((0, 0), "rows", False, dtype, torch.device("meta"))
    shared = DecoderWeights(embed=nothing, layers=(), norm=nothing.data, head=nothing)
    weights = _assemble(loader, spec, shared)
    mask = spec.hidden_size * dtype.itemsize if isinstance(spec, DFlashSpec) and spec.mask_file is not None else 0
    return weights.decoder.nbytes() + sum(each.nbytes for each in weights.others.values()) + mask + tables


def _rounding(checkpoint: HeadCheckpoint) -> Rounding:
    form = checkpoint.rounded
    uses: dict[str, Use] = {"embed_tokens.weight": "table", "lm_head.weight": "head", **checkpoint.spec.uses}

    def rounds_to(name: str, shape: tuple[int, int]) -> CodesKind | None:
        use = uses.get(name, "product")
        if form is None or use == "table":
            return None
        return kind_for("int8" if form == "int4" and use == "head" else form, shape)

    return rounds_to


def _source_of(checkpoint: HeadCheckpoint) -> TensorSource:
    if checkpoint.source is None or not isinstance(checkpoint.spec, MtpSpec):
        own = HeadTensors(checkpoint.directory)
        if checkpoint.rows_of is None or checkpoint.vocab_map is None:
            return own
        return WithSomeRows(own, places_of(own, checkpoint.spec, checkpoint.rows_of), checkpoint.vocab_map)
    return mtp_source(checkpoint)


def _of_mtp(loader: Loader, spec: MtpSpec, target: DecoderWeights) -> HeadWeights:
    others: dict[str, Weight | Tensor] = {}
    for index in range(1 if spec.shares_parts else spec.num_layers):
        for name in (NORM, EMBED_NORM, HIDDEN_NORM):
            part = f"{part_name(name, index)}.weight"
            others[part] = norm_weight(loader, spec.decoder, part)
        part = f"{part_name(FC, index)}.weight"
        others[part] = loader.weight(part)
    layers = tuple(layer_weights(loader, spec.decoder, index) for index in range(spec.num_layers))
    head = loader.weight("lm_head.weight", use="head") if spec.own_head else target.head
    others |= {name: loader.weight(name, use="head") for name in spec.outputs[1:]}
    norm = others.pop(f"{NORM}.weight")
    assert isinstance(norm, Tensor), "it has one axis"
    return HeadWeights(DecoderWeights(embed=target.embed, layers=layers, norm=norm, head=head), others)


def _assemble(loader: Loader, spec: HeadSpec, target: DecoderWeights) -> HeadWeights:
    if isinstance(spec, MtpSpec):
        return _of_mtp(loader, spec, target)
    layers = tuple(layer_weights(loader, spec.decoder, index, f"layers.{index}.") for index in range(spec.num_layers))
    embed, head = target.embed, target.head
    if spec.own_embed:
        embed = loader.weight("embed_tokens.weight", use="tied" if spec.tied_head and not spec.own_head else "table")
    if spec.own_head:
        head = loader.weight("lm_head.weight", use="head")
    elif spec.tied_head:
        head = embed
    decoder = DecoderWeights(
        embed=embed, layers=layers, norm=norm_weight(loader, spec.decoder, "norm.weight"), head=head
    )
    others: dict[str, Weight | Tensor] = {}
    taken = {name for part in loader.parts for name in part.names} | set(sum(spec.joined.values(), ()))
    for name, shape in spec.tensors.items():
        if name not in taken:
            use = spec.uses.get(name, "product")
            others[name] = loader.weight(name, use=use) if len(shape) == 2 else loader.tensor(name)
    for name, parts in spec.joined.items():
        others[name] = loader.weight(*parts) if len(spec.tensors[parts[0]]) == 2 else loader.tensor(*parts)
    return HeadWeights(decoder, others)
