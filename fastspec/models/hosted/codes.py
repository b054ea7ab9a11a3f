"""Quantised weights of hosted models: weights that are stored quantised, or are quantised while they are loaded.

Weights of linear layers stay quantised. All other tensors of a quantised checkpoint are dequantised.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastspec.distributed.slices import Cut
from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import kind_for, rounded
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.models.checkpoints.parameter_names import parameter
from fastspec.models.checkpoints.quantised.configs import Quantisation
from fastspec.models.checkpoints.quantised.tensors import QuantisedShards
from fastspec.models.checkpoints.rank_slices import SlicedTensors
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.hosted.cuts import part_shell
from fastspec.models.hosted.info import HostedCut, HostedInfo, shell_of
from fastspec.models.hosted.swaps import is_product
from fastspec.models.layer_table import Slice

if TYPE_CHECKING:
    from fastspec.models.checkpoints.checkpoint import Checkpoint

_WEIGHT = ".weight"


def quantised_products(shards: TensorSource, quantisation: Quantisation, info: HostedInfo) -> QuantisedShards:
    """Returns the tensors of a quantised checkpoint. The stored parts of each quantised weight become one tensor.

    Args:
        shards: the stored tensors.
        quantisation: quantisation settings of the config.
        info: the hosted model.

    Raises:
        UnsupportedModel: a module other than nn.Linear is stored quantised.
        CheckpointError: a stored tensor of a matrix is missing, or does not match the config.
    """
    shell = shell_of(info.kind, info.config)
    shapes = {
        name + _WEIGHT: tuple(part.weight.shape) for name, part in shell.named_modules() if type(part) is nn.Linear
    }
    found = QuantisedShards(shards, quantisation, shapes)
    known = {name for name, _ in shell.named_parameters()}
    left = sorted(name for name in found.infos() if isinstance(found.infos()[name].dtype, str) and name not in known)
    if left:
        raise UnsupportedModel(f"{left[0]} is stored quantised, and is no plain matrix product of a hosted model")
    return found


class ProductCodes:
    """Reads the quantised weights of a hosted model's linear layers. A weight is selected by its parameter name.

    Args:
        checkpoint: checkpoint in a directory with quantised weights.
        info: the hosted model.

    Raises:
        CheckpointError, UnsupportedModel: see `quantised_products`.
    """

    def __init__(self, checkpoint: Checkpoint, info: HostedInfo) -> None:
        if checkpoint.directory is None or checkpoint.quantisation is None:
            raise CheckpointError(f"{checkpoint.name}: is not a directory that is stored quantised")
        self._whole = quantised_products(ShardTensors(checkpoint.directory), checkpoint.quantisation, info)
        shell = shell_of(info.kind, info.config)
        known = [name for name, _ in shell.named_parameters()]
        quantised = [name for name in self._whole.infos() if self._whole.kind(name) is not None]
        self._stored = {parameter(name, known): name for name in quantised}
        self.tensors: TensorSource = self._whole
        if info.cut is not None:
            slices = self._slices(info.cut)
            self.tensors = SlicedTensors(self._whole, slices)

    def _slices(self, cut: HostedCut) -> dict[str, Slice]:
        """Returns stored name -> this rank's slice, for each quantised weight that is split over ranks."""
        found = {}
        for name, stored in self._stored.items():
            kind, (rows, columns) = cut.kinds.get(name.removesuffix(_WEIGHT)), self._whole.infos()[stored].shape
            if kind == "rows":
                found[stored] = Slice((cut.share.cut(rows),))
            elif kind == "columns":
                found[stored] = Slice((Cut(0, rows),), cut.share.cut(columns))
        return found

    def kinds(self) -> dict[str, tuple[tuple[int, int], CodesKind]]:
        """Returns name of the parameter -> (shape (N, K), quantised format) for every quantised weight."""
        found = {}
        for name, stored in self._stored.items():
            kind, shape = self.tensors.kind(stored), self.tensors.infos()[stored].shape
            assert kind is not None, "only quantised ones are listed"
            found[name] = (shape[0], shape[1]), kind
        return found

    def weight(self, name: str, dtype: torch.dtype, device: torch.device, ops: Ops) -> Weight | None:
        """Reads the quantised weight of a parameter. The attribute `tensors` must be open.

        Returns None if the parameter is not stored quantised, or if `ops` do not support its format.

        Args:
            name: name of the parameter.
            dtype: dtype of activations.
            device: device of the result.
            ops: ops that will read the weight.
        """
        stored = self._stored.get(name)
        kind = None if stored is None else self.tensors.kind(stored)
        if stored is None or kind is None:
            return None
        rows, columns = self.tensors.infos()[stored].shape
        codes = self.tensors.codes(stored, device) if ops.keeps_codes((rows, columns), kind, dtype, device) else None
        if codes is None:
            return None
        made = Weight.empty_codes(codes.shape, codes.kind, False, dtype, device)
        made.fill_codes(codes)
        return made

    def values(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Reads all tensors: stored name -> tensor. Quantised tensors are dequantised to `dtype`.

        transformers fills a module with the result.
        """
        with self._whole.open():
            return {
                name: self._whole.read(name).to(dtype) if self._whole.kind(name) else self._whole.read(name)
                for name in self._whole.infos()
            }


def rounding_of(checkpoint: Checkpoint, shell: nn.Module) -> dict[str, tuple[tuple[int, int], CodesKind]]:
    """Returns the weights to quantise while they are loaded: name of the module -> (shape (N, K), quantised format).

    These are weights of linear layers. The LM head is among them only for a draft model, and only if the head does not
    share its weight with the embedding. The result is empty if no weights are to be quantised.

    Args:
        checkpoint: checkpoint of the hosted model.
        shell: the model on the meta device.
    """
    form, found = checkpoint.rounded, dict[str, tuple[tuple[int, int], CodesKind]]()
    if form is None:
        return found
    head, embedding = shell.get_output_embeddings(), shell.get_input_embeddings()  # type: ignore[operator]
    own = checkpoint.role == "draft" and head.weight is not embedding.weight
    for name, part in shell.named_modules():
        if not is_product(part) or (part is head and not own):
            continue
        columns, rows = part.weight.shape if not isinstance(part, nn.Linear) else part.weight.shape[::-1]
        # the output matrix in 4 bits would harm most, so it has 8 bits
        kind = kind_for("int8" if form == "int4" and part is head else form, (rows, columns))
        if kind is not None:
            found[name] = (rows, columns), kind
    return found


def rounded_weight(rows: Tensor, kind: CodesKind, ops: Ops) -> Weight:
    """Quantises a matrix [N, K]. If `ops` cannot read the quantised format, the result is dequantised again.

    Args:
        rows: the matrix.
        kind: the quantised format.
        ops: ops that will read the weight.
    """
    codes = rounded(rows, kind)
    if not ops.keeps_codes((rows.shape[0], rows.shape[1]), kind, rows.dtype, rows.device):
        return ops.store(codes.dequantise(rows.dtype), False)
    made = Weight.empty_codes(codes.shape, kind, False, rows.dtype, rows.device)
    made.fill_codes(codes)
    return made


def hosted_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
    """Returns the bytes of a hosted model's weights on a device, with activations of `dtype`."""
    info = checkpoint.spec
    assert isinstance(info, HostedInfo), "a native model is counted by `planned_bytes`"
    total = info.weight_bytes(dtype)
    if checkpoint.quantisation is not None:
        kinds = ProductCodes(checkpoint, info).kinds()
    elif checkpoint.rounded is not None:
        kinds = rounding_of(checkpoint, part_shell(info))
    else:
        return total
    for shape, kind in kinds.values():
        if ops.keeps_codes(shape, kind, dtype, device):
            kept = Weight.empty_codes(shape, kind, False, dtype, torch.device("meta"))
            total += kept.nbytes - math.prod(shape) * dtype.itemsize
    return total
