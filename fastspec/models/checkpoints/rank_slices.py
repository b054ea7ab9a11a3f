"""Cuts a checkpoint's tensors to the slices that one rank of a tensor-parallel group loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fastspec.distributed.slices import SIZES, RankShare, divides
from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.codes import join
from fastspec.kernels.common.packing import can_pack
from fastspec.kernels.gpu import generation_of
from fastspec.kernels.product.plan import split_for
from fastspec.models.checkpoints.checkpoint import Checkpoint, Sliced
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource
from fastspec.models.config import ModelSpec
from fastspec.models.layer_table import Slice

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.kernels.common.codes import Codes, CodesKind
    from fastspec.models.families.plan import LayerPlan


_MXFP4_UNIT = 64  # columns of an mxfp4 matrix that kernels read together


def sliced(checkpoint: Checkpoint, share: RankShare) -> Checkpoint:
    """Returns a copy of a checkpoint for one rank. Its `spec` has the sizes of the part that this rank loads.

    Args:
        checkpoint: checkpoint of the whole model.
        share: index of this rank, and number of ranks.

    Raises:
        UnsupportedOption: a layer has norms over all heads and interleaved RoPE, which ranks do not support together.
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


def local_spec(spec: ModelSpec, share: RankShare, unit: int = 1) -> ModelSpec:
    """Returns the spec of one rank's part of a model. It has fewer heads, and narrower MLPs and experts.

    Args:
        spec: spec of the whole model.
        share: index of this rank, and number of ranks.
        unit: number of columns that kernels read together. The columns of an expert are cut at multiples of it.
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


def _local_plan(plan: LayerPlan, share: RankShare, unit: int) -> LayerPlan:
    experts, rule = plan.experts, plan.state
    if experts is not None:
        width, shared = share.cut(experts.width, unit), share.cut(experts.shared)
        experts = replace(experts, width=width.stop - width.start, shared=shared.stop - shared.start)
    if plan.kv_heads is not None:
        of_heads = share.kv_cut(plan.kv_heads)
        plan = replace(plan, kv_heads=of_heads.stop - of_heads.start)
    if plan.width is not None:
        of_width = share.cut(plan.width)
        plan = replace(plan, width=of_width.stop - of_width.start)
    return replace(plan, experts=experts, state=None if rule is None else rule.cut(share.size))


def same_text_on(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Returns the sizes of tensor-parallel groups that compute bit-identical results, including the present size.

    On a GPU, the sums over K in the o and down projections must be added in one binary tree over all ranks. The kernels
    must support this for every rank's part in every group. If matrices are quantised while they are loaded, each rank
    has its own scales. Then only the present size is returned.

    Args:
        checkpoint: one rank's part, from `sliced`.
        dtype, device: dtype and device of the weights.
    """
    assert checkpoint.sliced is not None, "as `sliced` made it"
    share, spec = checkpoint.sliced[:2]
    if checkpoint.rounded is not None:
        return (share.size,)
    if share.one_tree:
        return tuple(each for each in SIZES if each <= share.parts)
    plain = not checkpoint.in_codes and not spec.routed_elements and not spec.state_rules
    if not plain or device.type != "cuda" or not generation_of(device).hopper:
        return (share.size,)
    found = tuple(each for each in SIZES if all(_in_trees(spec, few, dtype) for few in SIZES if few <= each))
    return found if share.size in found else (share.size,)


def _in_trees(spec: ModelSpec, ranks: int, dtype: torch.dtype) -> bool:
    """True if a group of `ranks` ranks computes bit-identical results to one rank.

    In the o and down projections the sum over K is a binary tree, and each rank must sum whole subtrees. In other
    products each rank computes whole sums.

    Args:
        spec: spec of the whole model.
        ranks: number of ranks.
        dtype: dtype of the weights.
    """
    if not divides(spec, ranks):
        return False
    hidden, heads, inner = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    rows = (heads // ranks, inner // ranks)
    trees = all(
        split_for((hidden, k // ranks), (hidden, k), tree=True).runs and can_pack((hidden, k // ranks), dtype)
        for k in (heads, inner)
    )
    return trees and all(can_pack((each, hidden), dtype) for each in rows)


class SlicedTensors(WrappedSource):
    """Tensors of a source, cut to the slices of one rank. They have the names of the whole tensors.

    Args:
        source: the whole tensors.
        slices: name of a tensor -> its slice. Tensors without an entry stay whole.
    """

    def __init__(self, source: TensorSource, slices: Mapping[str, Slice]) -> None:
        super().__init__(source)
        self._slices = slices
        self._infos = {name: self._cut(name, info) for name, info in source.infos().items()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every tensor, with the shape of its slice."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns the slice of the tensor `name`."""
        if (each := self._slices.get(name)) is None:
            return self._source.read(name)
        columns = slice(None) if each.columns is None else slice(*each.columns)
        parts = [self._source.read_part(name, slice(*rows), columns) for rows in each.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the slice of the tensor `name`."""
        return TensorSource.read_part(self, name, rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format of the slice of the matrix `name`. None: it is not quantised."""
        kind, each = self._source.kind(name), self._slices.get(name)
        return kind if kind is None or each is None else kind.of_part(each.rows, self._infos[name].shape[1])

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns the slice of the quantised matrix `name` on a device. None: it is not quantised."""
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
        # the slice ends inside a stored word or group, so the whole matrix is read
        whole = self._source.codes(name, device)
        assert whole is not None, "parts of it are"
        return whole.part(each.rows, each.columns)

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Returns a range of rows and columns of the slice of the quantised matrix `name`. None: not quantised."""
        codes = self.codes(name, device)
        if codes is None:
            return None
        (top, bottom), (left, right) = (
            place.indices(size)[:2] for place, size in zip((rows, columns), codes.shape, strict=True)
        )
        return codes.part([(top, bottom)], (left, right))

    def _cut(self, name: str, info: TensorInfo) -> TensorInfo:
        each = self._slices.get(name)
        if each is None:
            return info
        rows = sum(cut.stop - cut.start for cut in each.rows)
        columns = info.shape[1:] if each.columns is None else (each.columns.stop - each.columns.start,)
        return replace(info, shape=(rows, *columns))
