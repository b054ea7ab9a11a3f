"""Converts checkpoint tensors to the decoder's fused weights. Names, shapes and dtypes are checked before allocation.

Every linear layer is y = x @ W.T with W [out, in]. The q, k and v projections become one matrix, and so do gate and up.
This fused matrix is allocated on the device first. Then each part is copied from the file or the live module into its
rows. So a matrix is never on the device twice. A live module is only read, and shares no memory with the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from tqdm import tqdm

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import ExpertStack, ExpertWeights
from fastspec.kernels.common.rounding import kind_for
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.expert_tensors import by_expert
from fastspec.models.checkpoints.gguf.tensors import GgufTensors
from fastspec.models.checkpoints.live_module import ModuleTensors
from fastspec.models.checkpoints.parameter_names import named, with_usual_names
from fastspec.models.checkpoints.quantised.tensors import QuantisedShards
from fastspec.models.checkpoints.rank_slices import SlicedTensors
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.checkpoints.tensor_checks import check_no_others, check_tensors
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.checkpoints.weight_loader import Loader, Rounding
from fastspec.models.config import DTYPES
from fastspec.models.layer_table import (
    EMBED,
    HEAD,
    INPUTS,
    MODEL,
    NORM,
    NORM_BIAS,
    BlockWeights,
    DecoderWeights,
    InputWeights,
    LatentWeights,
    LayerWeights,
    StateWeights,
    TableRow,
    axes_of,
    rows_of,
    slices_of,
    tensor_shapes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.config import ModelSpec
    from fastspec.models.families.plan import LayerPlan


LENT: Final = ("qkv", "o", "post_norm", "gate_up", "down")  # fields of a block that several layers share


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """Weights that are allocated but not filled yet.

    Attributes:
        weights: the weights. Their values must not be read before `fill` has returned.
        fill: function that reads the files and fills the weights. It may run in another thread. It raises
            CheckpointError like `allocate_weights`.
        cancel: function that makes `fill` end soon. The weights must not be used afterwards.
        checkpoint: source of the weights.
        loader: object that can fill the weights again with other values.
    """

    weights: DecoderWeights
    fill: Callable[[], None]
    cancel: Callable[[], None]
    checkpoint: Checkpoint
    loader: Loader


def allocate_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    release_source: bool = False,
    ops: Ops = TORCH_OPS,
) -> PendingWeights:
    """Allocates the fused weights of a checkpoint in `dtype` on `device`. `PendingWeights.fill` fills them later.

    Weights from a live module are filled at once. With `release_source`, the module's memory is freed meanwhile, so
    that it can be used for the weights.

    Args:
        checkpoint: the checkpoint, from `resolve`.
        dtype: torch.bfloat16, torch.float16 or torch.float32. Stored values are rounded to it.
        device: device of the fused tensors.
        progress: True to show a progress bar in bytes on stderr.
        release_source: True to free a live module while it is copied. Each parameter becomes an empty meta tensor after
            its copy. The module cannot be used again, even if loading fails half way. No effect for a directory.
        ops: ops that will read the weights.

    Returns:
        The weights, which are contiguous tensors and share no memory with the source.

    Raises:
        CheckpointError: the stored tensors do not match the config, or a value does not fit in float16.
        UnsupportedModel: a stored dtype, or the live module, is not supported.
        UnsupportedOption: `dtype` is not one of these three.
    """
    if dtype not in DTYPES:
        raise UnsupportedOption(f"dtype={dtype} is not supported, wanted bfloat16, float16 or float32")
    source = source_of(checkpoint)
    whole, spec = whole_spec(checkpoint), checkpoint.native
    check_tensors(source.infos(), whole, checkpoint.name)
    if checkpoint.module is not None:
        check_no_others(source.infos(), whole, checkpoint.name)
    whole_infos = None if checkpoint.sliced is None else source.infos()
    source = own_part(source, checkpoint)
    infos = source.infos()
    total = dtype.itemsize * sum(math.prod(infos[name].shape) for name in tensor_shapes(spec))
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
            source.release([HEAD])  # its values are the embedding's, as `resolve` found
        weights = _assemble(loader, spec)

    if device.type == "cuda":
        # other streams will fill this memory, which work on this stream may still use
        torch.cuda.current_stream(device).synchronize()

    def fill() -> None:
        with bar:
            loader.fill()

    return PendingWeights(weights, fill, loader.cancel, checkpoint, loader)


def planned_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
    """Returns the number of bytes that `allocate_weights` would allocate. For the arguments see there.

    Allocates nothing, and reads no values.
    """
    plain = not checkpoint.in_codes and checkpoint.rounded is None and checkpoint.sliced is None
    if plain and ops.weight_format((1, 1), dtype, device) != "blocked":
        return checkpoint.native.weight_bytes(dtype)
    rounds_to = _rounding(checkpoint)
    bar: tqdm[NoReturn] = tqdm(disable=True)
    source = own_part(source_of(checkpoint), checkpoint)
    whole = None if checkpoint.sliced is None else source_of(checkpoint).infos()
    loader = Loader(source, dtype, device, ops, bar, rounds_to=rounds_to, planned=True, later=True, whole=whole)
    return _assemble(loader, checkpoint.native).nbytes()


def _rounding(checkpoint: Checkpoint) -> Rounding:
    """Returns a function that chooses the format to which a matrix of a checkpoint is quantised while it is loaded.

    The function takes the name and the shape (N, K) of a matrix. It returns None for a matrix that is not quantised.

    Matrices of layers are quantised to `checkpoint.rounded`. The LM head of a draft model is about as large as all its
    layers. It is quantised to at least 8 bits, because 4 bits would harm it most. The LM head of a target is not
    quantised, as in published checkpoints.
    """
    form, draft = checkpoint.rounded, checkpoint.role == "draft"

    def rounds_to(name: str, shape: tuple[int, int]) -> CodesKind | None:
        if form is None:
            return None
        if name == INPUTS:  # rows are read one by one
            return None
        if name in (EMBED, HEAD):
            head = draft and (name == HEAD or checkpoint.native.tied)
            return kind_for("int8" if form == "int4" else form, shape) if head else None
        return kind_for(form, shape)

    return rounds_to


def load_weights(checkpoint: Checkpoint, **options: Any) -> DecoderWeights:
    """Allocates weights and fills them at once. For arguments and errors see `allocate_weights`."""
    pending = allocate_weights(checkpoint, **options)
    pending.fill()
    return pending.weights


def whole_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Returns the spec of the whole model. With several ranks, `checkpoint.spec` describes only one rank's part."""
    return checkpoint.native if checkpoint.sliced is None else checkpoint.sliced.spec


def own_part(source: TensorSource, checkpoint: Checkpoint) -> TensorSource:
    """Returns a source of the slices that this rank loads. If one rank loads the whole model, returns `source` itself.

    Args:
        source: source of the whole tensors, by the names of the model's parameters.
        checkpoint: checkpoint of the model. Its `sliced` says which part this rank loads.
    """
    if checkpoint.sliced is None:
        return source
    return SlicedTensors(source, slices_of(checkpoint.sliced.spec, checkpoint.sliced.share, checkpoint.sliced.unit))


def source_of(checkpoint: Checkpoint) -> TensorSource:
    """Returns a source of a checkpoint's whole tensors, by the names of the model's parameters."""
    whole = whole_spec(checkpoint)
    if checkpoint.module is not None:
        return with_usual_names(by_expert(ModuleTensors(checkpoint.module), whole, checkpoint.name), whole)
    if checkpoint.gguf_header is not None:
        return GgufTensors(checkpoint.gguf_header, whole, in_codes=checkpoint.rounded is None)
    if checkpoint.directory is None:
        raise CheckpointError(f"{checkpoint.name}: has neither a directory nor a module; make it with resolve()")
    stored: TensorSource = by_expert(ShardTensors(checkpoint.directory), whole, checkpoint.name)
    if checkpoint.quantisation is not None:
        stored = QuantisedShards(stored, checkpoint.quantisation, tensor_shapes(whole), whole)
    return named(stored, whole)


def _assemble(loader: Loader, spec: ModelSpec) -> DecoderWeights:
    embed = loader.weight(EMBED, use="tied" if spec.tied else "table")
    head = embed if spec.tied else loader.weight(HEAD, use="head")  # the largest tensors are filled first
    layers: list[LayerWeights] = []
    for index, plan in enumerate(spec.plans):
        lender = None if plan.block is None or plan.block.lender is None else layers[plan.block.lender]
        layers.append(layer_weights(loader, spec, index, lender=lender))
    norm = norm_weight(loader, spec, NORM)
    bias = norm_weight(loader, spec, NORM_BIAS) if spec.plans[-1].norm_bias else None
    inputs = _inputs(loader, spec) if spec.plans[0].inputs else None
    return DecoderWeights(embed=embed, layers=tuple(layers), norm=norm, head=head, norm_bias=bias, inputs=inputs)


def _inputs(loader: Loader, spec: ModelSpec) -> InputWeights:
    """Makes the weights by which a model computes an additional input of every layer from the token ids."""
    embed, projection, norm = (f"{row.stored[0]}{row.leaf}" for row in MODEL if row.name.startswith("inputs."))
    table = loader.weight(embed, use="table")
    return InputWeights(table, loader.weight(projection), norm_weight(loader, spec, norm))


def norm_weight(loader: Loader, spec: ModelSpec, name: str, order: list[int] | None = None) -> Tensor:
    """Makes the weight or the bias of a norm. 1 is added if the model's norms multiply by 1 + weight.

    Args:
        loader: loader of the model's weights.
        spec: spec of the model.
        name: name of the stored tensor.
        order: for each element of the result, its index in the stored tensor. None: the same order.
    """
    plus_one = spec.plans[0].norm == "rms_plus_one"
    return loader.tensor(name, order=order, dtype=spec.norm_dtype(loader.dtype), plus=1.0 if plus_one else 0.0)


def layer_weights(
    loader: Loader, spec: ModelSpec, index: int, prefix: str | None = None, lender: LayerWeights | None = None
) -> LayerWeights:
    """Makes the weights of decoder layer `index`.

    Args:
        loader: loader of the model's weights.
        spec: spec of the model.
        index: index of the layer, from 0.
        prefix: prefix of the layer's stored names. None: "model.layers.{index}.".
        lender: weights of the layer `BlockPlan.lender`. None: the layer has all weights itself.
    """
    prefix = f"model.layers.{index}." if prefix is None else prefix
    return _Layer(loader, spec, spec.plans[index], prefix, lender).weights()


class _Layer:
    """Makes the weights of one layer. The table `layer_table.LAYER` has a row for each weight that a layer can have.

    Args:
        loader: loader of the model's weights.
        spec: spec of the model.
        plan: description of the layer's computation.
        prefix: prefix of the layer's stored names.
        lender: weights of the layer `BlockPlan.lender`. None: the layer has all weights itself.
    """

    def __init__(
        self, loader: Loader, spec: ModelSpec, plan: LayerPlan, prefix: str, lender: LayerWeights | None = None
    ) -> None:
        self._loader, self._spec, self._plan, self._prefix = loader, spec, plan, prefix
        self._lender = lender
        self._rows = rows_of(spec, plan)
        self._joined = self._joins_shared()
        self._made: dict[str, Weight | ExpertStack | Tensor | None] = {}

    def weights(self) -> LayerWeights:
        """Allocates the weights of the layer, and registers the copy of each tensor with the loader."""
        for row in self._rows:
            if not (self._joined and row.joins):
                self._take(row)
        fields: dict[str, Any] = {name: made for name, made in self._made.items() if "." not in name}
        parts: dict[str, dict[str, Any]] = {}
        for name, made in self._made.items():
            part, _, field = name.partition(".")
            if field:
                parts.setdefault(part, {})[field] = made
        if "state" in parts:
            fields["state"] = StateWeights(**parts["state"])
        if "latent" in parts:
            fields["latent"] = LatentWeights(**parts["latent"])
        if "block" in parts:
            if self._lender is not None and self._lender.block is not None:
                fields |= {name: getattr(self._lender, name) for name in LENT}
                parts["block"]["norm"] = self._lender.block.norm
            fields["block"] = BlockWeights(**parts["block"])
        if "experts" in parts:
            fields["experts"] = ExpertWeights(**parts["experts"], joined=self._joined)
        return LayerWeights(**fields)

    def _take(self, row: TableRow) -> None:
        """Makes the weight that a row of the table `LAYER` describes, and its bias if it has one."""
        loader, order, place = self._loader, row.order(self._spec, self._plan), row.place
        names, biases = self._names(row, row.leaf), self._names(row, ".bias") if row.bias(self._plan) else []
        if row.kind == "stack":
            self._take_stack(row, names, biases)
            return
        if row.kind == "norm":
            self._made[place] = norm_weight(loader, self._spec, names[0], order)
            if biases:
                self._made[f"{place}_bias"] = norm_weight(loader, self._spec, biases[0])
            return
        if row.kind == "matrix":
            self._take_matrix(row, names, order)
        else:
            self._made[place] = loader.tensor(*names, order=order, dtype=torch.float32 if row.kind == "exact" else None)
        if biases:
            self._made[f"{place}_bias"] = loader.tensor(*biases, order=order)

    def _take_matrix(self, row: TableRow, names: list[str], order: list[int] | None) -> None:
        loader, more = self._loader, self._joining(row)
        if self._joined and row.takes_shared:  # rows of the router, then the row of the shared expert's gate
            self._made[row.place] = Weight(loader.tensor(*names, *(name for each in more for name in each)))
        elif row.apart and not loader.same_format(*names):
            half, rows = len(names) // 2, sum(axes_of(self._spec, self._plan)[axis].size for axis in row.axes[:-2])
            first, last = (None, None) if order is None else (order[:rows], [at - rows for at in order[rows:]])
            self._made[row.place] = loader.weight(*names[:half], order=first)
            self._made[row.apart] = loader.weight(*names[half:], order=last)
        else:
            gated = row.gated and bool(self._plan.gating)
            self._made[row.place] = loader.weight(*names, gated=gated, order=order, tree=row.tree)

    def _take_stack(self, row: TableRow, names: list[str], biases: list[str]) -> None:
        experts = self._plan.experts
        assert experts is not None, "other layers have no stack"
        by_expert = [tuple(names[expert :: experts.count]) for expert in range(experts.count)]
        if self._joined:
            (shared,), matrices = self._joining(row), 1 + experts.gated if row.gated else None
            made = self._loader.stack_with_shared(by_expert, shared, experts.shared_parts, matrices)
        else:
            made = self._loader.stack(by_expert, gated=row.gated)
        self._made[row.place] = made
        if biases:
            of_all = [name for expert in range(experts.count) for name in biases[expert :: experts.count]]
            self._made[f"{row.place}_bias"] = self._loader.tensor(*of_all).view(experts.count, -1)

    def _names(self, row: TableRow, leaf: str) -> list[str]:
        """Returns the stored names of the tensors for one row of the table `LAYER`.

        A row of kind "stack" has a name for each matrix of each expert.

        Args:
            row: the row.
            leaf: name of the parameter: ".weight" or ".bias".
        """
        count = self._plan.experts.count if row.kind == "stack" and self._plan.experts is not None else 1
        names = row.names(self._spec.names)
        return [f"{self._prefix}{name.format(expert)}{leaf}" for name in names for expert in range(count)]

    def _joining(self, row: TableRow) -> list[tuple[str, ...]]:
        """Returns the stored names of the shared expert's tensors that become part of the weight of `row`.

        There is one tuple for each row of the table `LAYER` that joins `row`. Empty: none does.
        """
        joining = [other for other in self._rows if self._joined and other.joins == row.name]
        return [tuple(self._names(other, other.leaf)) for other in joining]

    def _joins_shared(self) -> bool:
        """True if the shared expert is loaded as more experts after the routed ones, in the same stack.

        The shared expert must be as wide as some routed ones together, and neither may be quantised. One process must
        load the whole layer, because ranks cut shared and routed experts differently.
        """
        experts = self._plan.experts
        plain = experts is not None and not (experts.bias or experts.router_bias or experts.latent)
        if experts is None or not experts.shared_parts or not plain:
            return False
        matrices = [row for row in self._rows if row.joins or (row.takes_shared and row.kind == "matrix")]
        shared = [name for row in matrices for name in self._names(row, row.leaf)]
        routed = [name for row in self._rows if row.kind == "stack" for name in self._names(row, row.leaf)]
        return self._loader.same_format(*routed, *shared) and self._loader.joins_shared(*shared)
