"""A rank's own slices of a checkpoint, by the names of the whole tensors: nothing else of them is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.packing import can_pack
from fastspec.kernels.linear.plan import TREES_ON, split_for
from fastspec.models.config import ModelSpec
from fastspec.models.weights.names import HEAD
from fastspec.models.weights.shards import TensorInfo
from fastspec.parallel.slices import SIZES, Cut, Share, divides

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.kernels.common.codes import Codes, CodesKind
    from fastspec.models.weights.loader import TensorSource
    from fastspec.models.weights.sources import Checkpoint


_SAMPLE, _SAMPLES = 4096, 256  # bytes of a file that are looked at, at how many places


class Slice(NamedTuple):
    """What is read of a tensor: ranges of rows, under each other, and one of columns; None: all columns."""

    rows: tuple[Cut, ...]
    columns: Cut | None = None


class Sliced(NamedTuple):
    """What of a checkpoint one rank loads.

    Attributes:
        share: its part.
        spec: of the whole model.
    """

    share: Share
    spec: ModelSpec


def sliced(checkpoint: Checkpoint, share: Share) -> Checkpoint:
    """The checkpoint as one rank sees it: with the sizes of its part, and only its slices to be read.

    Raises:
        UnsupportedOption: a model that is not cut.
    """
    if checkpoint.spec.hosting:
        raise UnsupportedOption(
            f"{checkpoint.role}: {checkpoint.name} is hosted, and tensor_parallel cuts native families alone; leave "
            "tensor_parallel out"
        )
    whole = checkpoint.native
    return replace(checkpoint, spec=local_spec(whole, share), sliced=Sliced(share, whole))


def fingerprint(checkpoint: Checkpoint) -> str:
    """A short hash of a checkpoint: config, headers, sizes, and samples of the stored bytes of every file."""
    whole = checkpoint.spec if checkpoint.sliced is None else checkpoint.sliced.spec
    found = hashlib.sha256(repr((whole, checkpoint.stored, checkpoint.rounded)).encode())
    if checkpoint.directory is not None:
        for file in sorted(checkpoint.directory.glob("*.safetensors")):
            size = file.stat().st_size
            found.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                    opened.seek(start)
                    found.update(opened.read(_SAMPLE))
    elif checkpoint.module is not None:
        for name, tensor in checkpoint.module.named_parameters():
            found.update(repr((name, tuple(tensor.shape), tensor.detach().flatten()[:8].tolist())).encode())
    return found.hexdigest()[:16]


def why_whole(spec: ModelSpec, ranks: int) -> str | None:
    """What of a model's layers cannot be cut among so many ranks, for messages; None: nothing."""
    if spec.deltas:
        return "whose recurrent states are not cut"
    if spec.plans[0].qk_norm == "projection" and ranks > 1:
        return "whose norm of queries and keys is over all heads at once"
    if any(plan.experts for plan in spec.plans) and ranks > 1:
        return "whose layers are mixtures of experts"
    return None


def local_spec(spec: ModelSpec, share: Share) -> ModelSpec:
    """The spec of what one rank runs: fewer heads, and a narrower MLP.

    Raises:
        UnsupportedOption: a layer's arithmetic needs what other ranks have, between its two sums.
    """
    if (why := why_whole(spec, share.size)) is not None:
        raise UnsupportedOption(f"tensor_parallel={share.size} does not go with {spec.family}, {why}; use one GPU")
    heads, kv_heads = share.cut(spec.num_heads), share.kv_cut(spec.num_kv_heads)
    inner = share.cut(spec.intermediate_size)
    return replace(
        spec,
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        intermediate_size=inner.stop - inner.start,
    )


def same_text_on(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Of the numbers of ranks that this one is among, those that give the same bits; this one alone where none does.

    On a GPU the sums over K of o and down are one tree where every part of it, of the most ranks, is a product of a
    kernel that has it.

    Args:
        checkpoint: one rank's part; what is rounded while it is loaded has scales of its own on each rank.
        dtype, device: of its weights.
    """
    assert checkpoint.sliced is not None, "as `sliced` made it"
    share, spec = checkpoint.sliced
    if checkpoint.rounded is not None:
        return (share.size,)
    if share.one_tree:
        return tuple(each for each in SIZES if each <= share.parts)
    plain = checkpoint.quantisation is None
    if not plain or device.type != "cuda" or torch.cuda.get_device_capability(device) != TREES_ON:
        return (share.size,)
    found = tuple(each for each in SIZES if all(_in_trees(spec, few, dtype) for few in SIZES if few <= each))
    return found if share.size in found else (share.size,)


def _in_trees(spec: ModelSpec, ranks: int, dtype: torch.dtype) -> bool:
    """Whether each of so many ranks has subtrees of the sums over K, and multiplies all else as one rank does."""
    if not divides(spec, ranks):
        return False
    hidden, heads, inner = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    rows = (heads // ranks, inner // ranks)
    trees = all(
        split_for((hidden, k // ranks), (hidden, k), tree=True).runs and can_pack((hidden, k // ranks), dtype)
        for k in (heads, inner)
    )
    return trees and all(can_pack((each, hidden), dtype) for each in rows)


def slices_of(spec: ModelSpec, share: Share) -> dict[str, Slice]:
    """What a rank reads of the tensors that are cut, by name; of all others it reads everything."""
    names, plan, dim = spec.names, spec.plans[0], spec.head_dim
    heads, kv_heads = share.cut(spec.num_heads), share.kv_cut(spec.num_kv_heads)
    inner = share.cut(spec.intermediate_size)

    def scaled(cut: Cut, by: int, offset: int = 0) -> Cut:
        return Cut(offset + cut.start * by, offset + cut.stop * by)

    found: dict[str, Slice] = {}

    def by_rows(parts: tuple[str, ...], cuts: list[Cut], sizes: list[int], bias: bool) -> None:
        """Rows of tensors that hold a part each, or of one that holds all parts under each other."""
        if len(parts) == len(cuts):
            each: list[tuple[Cut, ...]] = [(cut,) for cut in cuts]
        else:  # one tensor
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            each = [tuple(Cut(start + cut.start, start + cut.stop) for start, cut in zip(starts, cuts, strict=True))]
        for part, rows in zip(parts, each, strict=True):
            found[f"{part}.weight"] = Slice(rows)
            if bias:
                found[f"{part}.bias"] = Slice(rows)

    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    keys = scaled(kv_heads, dim)
    by_rows(names.qkv, [scaled(heads, dim), keys, keys], [q_rows, kv_rows, kv_rows], plan.qkv_bias)
    halves = 2 if plan.gated else 1
    by_rows(names.gate_up, [inner] * halves, [spec.intermediate_size] * halves, plan.mlp_bias)
    every_row = (Cut(0, spec.hidden_size),)
    found[f"{names.o}.weight"] = Slice(every_row, scaled(heads, dim))
    found[f"{names.down}.weight"] = Slice(every_row, inner)
    whole = {f"model.layers.{layer}.{name}": each for layer in range(spec.num_layers) for name, each in found.items()}
    if not spec.tied:
        whole[HEAD] = Slice((share.vocab_cut(spec.vocab_size),))
    return whole


class SlicedTensors:
    """A source of whole tensors, seen through slices: shapes are those of the slices, and so is what is read."""

    def __init__(self, source: TensorSource, slices: Mapping[str, Slice]) -> None:
        self._source, self._slices = source, slices
        self._infos = {name: self._cut(name, info) for name, info in source.infos().items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Of every tensor, with the shape of its slice."""
        return self._infos

    @contextmanager
    def open(self) -> Iterator[None]:
        """As of the source."""
        with self._source.open():
            yield

    def read(self, name: str) -> Tensor:
        """The slice of a tensor."""
        if (each := self._slices.get(name)) is None:
            return self._source.read(name)
        columns = slice(None) if each.columns is None else slice(*each.columns)
        parts = [self._source.read_part(name, slice(*rows), columns) for rows in each.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Part of the slice of a tensor."""
        tensor = self.read(name)[rows]
        return tensor if tensor.dim() == 1 else tensor[:, columns]

    def kind(self, name: str) -> CodesKind | None:
        """What the codes of the slice of a tensor will be; None: it is not quantised."""
        kind, each = self._source.kind(name), self._slices.get(name)
        return kind if kind is None or each is None else kind.of_part(each.rows, self._infos[name].shape[1])

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """The slice of a quantised matrix, all of which is read; None: it is not quantised."""
        codes, each = self._source.codes(name, device), self._slices.get(name)
        return codes if codes is None or each is None else codes.part(each.rows, each.columns)

    def release(self, names: list[str]) -> None:
        """As of the source."""
        self._source.release(names)

    def _cut(self, name: str, info: TensorInfo) -> TensorInfo:
        each = self._slices.get(name)
        if each is None:
            return info
        rows = sum(cut.stop - cut.start for cut in each.rows)
        columns = info.shape[1:] if each.columns is None else (each.columns.stop - each.columns.start,)
        return replace(info, shape=(rows, *columns))
