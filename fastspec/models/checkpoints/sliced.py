"""A rank's own slices of a checkpoint, by the names of the whole tensors: nothing else of them is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fastspec.distributed.slices import SIZES, Cut, Share, divides
from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.codes import join
from fastspec.kernels.common.packing import can_pack
from fastspec.kernels.gpu import generation_of
from fastspec.kernels.product.plan import split_for
from fastspec.models.checkpoints.names import HEAD
from fastspec.models.checkpoints.shapes import DOWN, GATE_UP
from fastspec.models.checkpoints.shards import TensorInfo
from fastspec.models.config import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.kernels.common.codes import Codes, CodesKind
    from fastspec.models.checkpoints.loader import TensorSource
    from fastspec.models.checkpoints.sources import Checkpoint
    from fastspec.models.families.plan import LayerNames, LayerPlan
    from fastspec.models.heads.checkpoint import HeadCheckpoint
    from fastspec.shapes import DeltaRule


_SAMPLE, _SAMPLES = 4096, 256  # bytes of a file that are looked at, at how many places
_MXFP4_UNIT = 64  # columns of a matrix in mxfp4 that kernels read together


class Slice(NamedTuple):
    """What is read of a tensor: ranges of rows, under each other, and one of columns; None: all columns."""

    rows: tuple[Cut, ...]
    columns: Cut | None = None


class Sliced(NamedTuple):
    """What of a checkpoint one rank loads.

    Attributes:
        share: its part.
        spec: of the whole model.
        unit: columns of experts that stay together, as packed weights need them.
    """

    share: Share
    spec: ModelSpec
    unit: int = 1


def sliced(checkpoint: Checkpoint, share: Share) -> Checkpoint:
    """The checkpoint as one rank sees it: with the sizes of its part, and only its slices to be read.

    Raises:
        UnsupportedOption: a layer's arithmetic needs what other ranks have, in an order that is not known here.
    """
    if checkpoint.native.head_order is not None and checkpoint.native.plans[0].qk_norm == "projection":
        raise UnsupportedOption(
            f"tensor_parallel={share.size} does not go with {checkpoint.native.family}, whose norms are over all heads "
            "at once and whose rope is interleaved; use one GPU"
        )
    whole = checkpoint.native
    mxfp4 = checkpoint.quantisation is not None and checkpoint.quantisation.method == "mxfp4" and not share.one_tree
    unit = _MXFP4_UNIT if mxfp4 and _experts_divide(whole, _MXFP4_UNIT) else 1
    return replace(checkpoint, spec=local_spec(whole, share, unit), sliced=Sliced(share, whole, unit))


def _experts_divide(spec: ModelSpec, unit: int) -> bool:
    return all(plan.experts is None or plan.experts.width % unit == 0 for plan in spec.plans)


def fingerprint(checkpoint: Checkpoint | HeadCheckpoint) -> str:
    """A short hash of a checkpoint: config, headers, sizes, and samples of the stored bytes of every file."""
    cut, of_hosted = getattr(checkpoint, "sliced", None), getattr(checkpoint.spec, "cut", None)
    whole = (checkpoint.spec if of_hosted is None else of_hosted.whole) if cut is None else cut.spec
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


def local_spec(spec: ModelSpec, share: Share, unit: int = 1) -> ModelSpec:
    """The spec of what one rank runs: fewer heads, and narrower MLPs and experts.

    Args:
        unit: columns of experts that stay together.
    """
    heads, kv_heads = share.cut(spec.num_heads), share.kv_cut(spec.num_kv_heads)
    inner = share.cut(spec.intermediate_size)
    return replace(
        spec,
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        intermediate_size=inner.stop - inner.start,
        plans=tuple(_local_plan(plan, share, unit) for plan in spec.plans),
    )


def _local_plan(plan: LayerPlan, share: Share, unit: int) -> LayerPlan:
    experts, rule = plan.experts, plan.delta
    if experts is not None:
        width, shared = share.cut(experts.width, unit), share.cut(experts.shared)
        experts = replace(experts, width=width.stop - width.start, shared=shared.stop - shared.start)
    if rule is not None:
        rule = rule._replace(key_heads=rule.key_heads // share.size, value_heads=rule.value_heads // share.size)
    return replace(plan, experts=experts, delta=rule)


def same_text_on(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Of the numbers of ranks that this one is among, those that give the same bits; this one alone where none does.

    On a GPU the sums over K of o and down are one tree where every part of it, of the most ranks, is a product of a
    kernel that has it.

    Args:
        checkpoint: one rank's part; what is rounded while it is loaded has scales of its own on each rank.
        dtype, device: of its weights.
    """
    assert checkpoint.sliced is not None, "as `sliced` made it"
    share, spec = checkpoint.sliced[:2]
    if checkpoint.rounded is not None:
        return (share.size,)
    if share.one_tree:
        return tuple(each for each in SIZES if each <= share.parts)
    plain = checkpoint.quantisation is None and not spec.routed_elements and not spec.deltas
    if not plain or not generation_of(device).hopper:
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


def slices_of(spec: ModelSpec, share: Share, unit: int = 1) -> dict[str, Slice]:
    """What a rank reads of the tensors that are cut, by name; of all others it reads everything.

    Args:
        spec: of the whole model. unit: as in `local_spec`.
    """
    of_plan = {plan: _slices_of_layer(spec, plan, share, unit) for plan in dict.fromkeys(spec.plans)}
    found = {
        f"model.layers.{layer}.{name}": each for layer, plan in enumerate(spec.plans) for name, each in of_plan[plan]
    }
    if not spec.tied:
        found[HEAD] = Slice((share.vocab_cut(spec.vocab_size),))
    return found


Named = Iterator["tuple[str, Slice]"]


def _slices_of_layer(spec: ModelSpec, plan: LayerPlan, share: Share, unit: int) -> list[tuple[str, Slice]]:
    names, hidden = spec.names, Cut(0, spec.hidden_size)
    found = list(
        _of_attention(spec, plan, share) if plan.delta is None else _of_delta(names, plan.delta, share, hidden)
    )
    if plan.experts is not None:
        experts = plan.experts
        inner = share.cut(experts.width, unit)
        for expert in range(experts.count):
            at = f"{names.experts}.{expert}."
            found += _by_rows(tuple(at + part for part in GATE_UP), [inner] * 2, [experts.width] * 2, experts.bias)
            found.append((f"{at}{DOWN}.weight", Slice((hidden,), inner)))
        if not experts.shared:
            return found
        (gate_up, down, size, bias) = names.shared_gate_up, names.shared_down, experts.shared, False
    else:
        (gate_up, down, size, bias) = names.gate_up, names.down, spec.intermediate_size, plan.mlp_bias
    inner, halves = share.cut(size), 2 if plan.gated else 1
    found += _by_rows(gate_up, [inner] * halves, [size] * halves, bias)
    found.append((f"{down}.weight", Slice((hidden,), inner)))
    return found


def _of_attention(spec: ModelSpec, plan: LayerPlan, share: Share) -> Named:
    names, dim = spec.names, spec.head_dim
    heads, kv_heads = share.cut(spec.num_heads), share.kv_cut(spec.num_kv_heads)
    each = (1 + plan.output_gate) * dim  # rows of a query head
    q_rows, kv_rows = spec.num_heads * each, spec.num_kv_heads * dim
    keys = _times(kv_heads, dim)
    yield from _by_rows(names.qkv, [_times(heads, each), keys, keys], [q_rows, kv_rows, kv_rows], plan.qkv_bias)
    yield f"{names.o}.weight", Slice((Cut(0, spec.hidden_size),), _times(heads, dim))
    if plan.sinks:
        yield names.sinks, Slice((heads,))


def _of_delta(names: LayerNames, rule: DeltaRule, share: Share, hidden: Cut) -> Named:
    keys, values = share.cut(rule.keys), share.cut(rule.values)
    heads, channels = share.cut(rule.value_heads), _under([keys, keys, values], [rule.keys, rule.keys, rule.values])
    if len(names.delta) == 2:  # whose rows are grouped by key head
        first, second = share.cut(rule.channels + rule.values), share.cut(2 * rule.value_heads)
        rows: list[tuple[Cut, ...]] = [(first,), (second,)]
    else:
        rows = [channels, (values,), (heads,), (heads,)]
    yield from ((f"{part}.weight", Slice(each)) for part, each in zip(names.delta, rows, strict=True))
    yield f"{names.delta_conv}.weight", Slice(channels)
    yield names.delta_decay, Slice((heads,))
    yield names.delta_step, Slice((heads,))
    yield f"{names.delta_out}.weight", Slice((hidden,), values)


def _by_rows(parts: tuple[str, ...], cuts: list[Cut], sizes: list[int], bias: bool) -> Named:
    """Rows of tensors that hold a part each, or of one that holds all parts under each other."""
    rows = [(cut,) for cut in cuts] if len(parts) == len(cuts) else [_under(cuts, sizes)]
    for part, each in zip(parts, rows, strict=True):
        yield f"{part}.weight", Slice(each)
        if bias:
            yield f"{part}.bias", Slice(each)


def _under(cuts: list[Cut], sizes: list[int]) -> tuple[Cut, ...]:
    """Ranges of matrices of so many rows, in the one in which they lie under each other."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(Cut(start + cut.start, start + cut.stop) for start, cut in zip(starts, cuts, strict=True))


def _times(cut: Cut, by: int) -> Cut:
    return Cut(cut.start * by, cut.stop * by)


class SlicedTensors:
    """A source of whole tensors, seen through slices: shapes are those of the slices, and so is what is read."""

    def __init__(self, source: TensorSource, slices: Mapping[str, Slice]) -> None:
        self._source, self._slices = source, slices
        self._infos = {name: self._cut(name, info) for name, info in source.infos().items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor, with the shape of its slice."""
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
        """The slice of a quantised matrix; None: it is not quantised."""
        each = self._slices.get(name)
        if each is None:
            return self._source.codes(name, device)
        columns = slice(None) if each.columns is None else slice(*each.columns)
        found = [self._source.codes_part(name, slice(*rows), columns, device) for rows in each.rows]
        parts = [codes for codes in found if codes is not None]
        if not parts:
            return None
        codes = parts[0] if len(parts) == 1 else join(parts)
        codes = codes if codes.kind == self.kind(name) else codes.by_rows()
        if codes.kind == self.kind(name):
            return codes
        whole = self._source.codes(name, device)  # in whose words or groups a range ends
        assert whole is not None, "parts of it are"
        return whole.part(each.rows, each.columns)

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Rows and columns of the slice of a quantised matrix."""
        codes = self.codes(name, device)
        if codes is None:
            return None
        (top, bottom), (left, right) = (
            place.indices(size)[:2] for place, size in zip((rows, columns), codes.shape, strict=True)
        )
        return codes.part([(top, bottom)], (left, right))

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
