"""Quantised weights of hosted models: weights that are stored quantised, or are quantised while they are loaded.

Weights of linear layers and of experts stay quantised. All other tensors of a quantised checkpoint are dequantised.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastspec.distributed.slices import Cut
from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import ExpertStack
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
from fastspec.models.hosted.experts import StoredExperts, expert_matrices, refuse_joined
from fastspec.models.hosted.info import HostedCut, HostedInfo, shell_of
from fastspec.models.hosted.stored_names import not_ignored
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
        UnsupportedModel: a module other than nn.Linear is stored quantised, or experts in another layout.
        CheckpointError: a stored tensor of a matrix is missing, or does not match the config.
    """
    shell = shell_of(info.kind, info.config)
    shapes = {
        name + _WEIGHT: tuple(part.weight.shape) for name, part in shell.named_modules() if type(part) is nn.Linear
    }
    matrices = expert_matrices(shell, shards.infos())
    shapes |= {name: each.shape for name, each in matrices.items()}
    found = QuantisedShards(shards, quantisation, shapes)
    known = {name for name, _ in shell.named_parameters()} | matrices.keys()
    others = not_ignored((name for name in found.infos() if parameter(name, known) not in known), shell)
    refuse_joined(shell, others)
    left = [name for name in others if isinstance(found.infos()[name].dtype, str)]
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
        self._shell = shell_of(info.kind, info.config)
        known = [name for name, _ in self._shell.named_parameters()]
        quantised = [name for name in self._whole.infos() if self._whole.kind(name) is not None]
        self.experts = StoredExperts(self._whole, self._shell, expert_matrices(self._shell, self._whole.infos()))
        self._stored = {parameter(name, known): name for name in quantised if name not in self.experts.kinds}
        self._cut = info.cut is not None
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

    def expert_stacks(
        self, layer: str, dtype: torch.dtype, device: torch.device, ops: Ops, *, planned: bool = False
    ) -> tuple[ExpertStack, ExpertStack] | None:
        """Reads the stacks of a module of experts, see `StoredExperts.read`. None if ranks share the model."""
        return None if self._cut else self.experts.read(layer, dtype, device, ops, planned=planned)

    def warn_of_dequantised_experts(self, name: str, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        """Warns if experts are dequantised while they are loaded. The warning has their size before and after.

        Args:
            name: name of the checkpoint.
            dtype, device, ops: see `expert_stacks`.
        """
        layers = self.experts.layers
        left = [each for each in layers if self.expert_stacks(each, dtype, device, ops, planned=True) is None]
        if not left:
            return
        codes, elements = self.experts.sizes(left)
        warnings.warn(
            f"{name}: quantised experts of {len(left)} layer(s) are dequantised: {codes / 2**30:.3f} GiB of codes take "
            f"{elements * dtype.itemsize / 2**30:.3f} GiB in {dtype}. They stay in their codes in bfloat16 on one GPU, "
            "if the gate is silu and their sizes fit the kernels",
            stacklevel=2,
        )

    def values(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> dict[str, Tensor]:
        """Reads all tensors: stored name -> tensor. Quantised tensors are dequantised to `dtype`.

        transformers fills a module with the result. Experts that stay quantised are not read. Their parameters get NaN,
        in a tensor that takes no memory.

        Args:
            dtype: dtype of activations.
            device, ops: see `expert_stacks`.
        """
        layers = self.experts.layers
        kept = [each for each in layers if self.expert_stacks(each, dtype, device, ops, planned=True) is not None]
        left = self.experts.names(kept)
        found = {}
        with self._whole.open():
            for name in not_ignored(self._whole.infos().keys() - left, self._shell):
                value = self._whole.read(name)
                found[name] = value.to(dtype) if self._whole.kind(name) else value
        for layer in kept:
            for name, each in self._shell.get_submodule(layer).named_parameters(prefix=layer):
                found[name] = torch.full((), torch.nan, dtype=dtype, device="cpu").expand(each.shape)
        return found


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
        codes = ProductCodes(checkpoint, info)
        kinds = codes.kinds()
        for layer in codes.experts.layers:
            for stack in codes.expert_stacks(layer, dtype, device, ops, planned=True) or ():
                total += stack.nbytes - math.prod(stack.shape) * dtype.itemsize
    elif checkpoint.rounded is not None:
        kinds = rounding_of(checkpoint, part_shell(info))
    else:
        return total
    for shape, kind in kinds.values():
        if ops.keeps_codes(shape, kind, dtype, device):
            kept = Weight.empty_codes(shape, kind, False, dtype, torch.device("meta"))
            total += kept.nbytes - math.prod(shape) * dtype.itemsize
    return total
