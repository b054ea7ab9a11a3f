"""Quantised experts of hosted models. A module of experts is replaced by one whose op reads only the chosen experts.

Publishers store the matrices of each expert apart, and transformers joins them to stacks while it loads them. Its
conversions give the stack of each matrix, so names of all its families are known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fastspec.errors import UnsupportedModel
from fastspec.kernels.common.codes import BITS
from fastspec.kernels.common.experts import ExpertStack, ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.models.checkpoints.parameter_names import parameter
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.models.hosted.swaps import Running, expert_layers, our_op

_JOINS: Final = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # conversions that stack experts
_WIDTH: Final = 64  # elements of a test input
_SCALES: Final = (1.0, 40.0, 1000.0)  # factors of test inputs; large ones show the limits of a clamped gate


class ExpertMatrix(NamedTuple):
    """Place of one expert's stored matrix in a parameter of transformers' module.

    Attributes:
        stack: name of the parameter [E, N, K].
        expert: index of the expert.
        order: index among the matrices that are joined along N, 0 for the gate and 1 for up.
        shape: shape of the stored matrix.
    """

    stack: str
    expert: int
    order: int
    shape: tuple[int, int]


def expert_matrices(shell: nn.Module, names: Iterable[str]) -> dict[str, ExpertMatrix]:
    """Finds the matrices of experts among stored tensors. Returns stored name (`<module>.weight`) -> place.

    Args:
        shell: transformers' model on the meta device.
        names: names of stored tensors. A quantised matrix has several, such as `<module>.weight_packed`.
    """
    stacks = {
        f"{layer}.{name}": each for layer in expert_layers(shell) for name, each in _parameters_of(shell, layer).items()
    }
    if not stacks:
        return {}
    mapping: Any = get_model_conversion_mapping(shell)  # type: ignore[arg-type]
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    joins = [each for each in mapping if isinstance(each, WeightConverter)]
    found = {}
    for name in {f"{each.rpartition('.')[0]}.weight" for each in names}:
        renamed, pattern = rename_source_key(name, renamings, joins)
        stack, number = parameter(renamed, stacks.keys()), re.search(r"\.(\d+)\.\w+\.weight$", name)
        join = next((each for each in joins if pattern in each.source_patterns), None)
        if stack not in stacks or number is None or join is None or pattern is None:
            continue
        if [type(each).__name__ for each in join.operations] not in _JOINS or stacks[stack].dim() != 3:
            continue  # refused later, because its tensor has no other place
        sources, (_, rows, width) = join.source_patterns, stacks[stack].shape
        order = sources.index(pattern)
        found[name] = ExpertMatrix(stack, int(number[1]), order, (rows // len(sources), width))
    return found


def _parameters_of(shell: nn.Module, layer: str) -> dict[str, nn.Parameter]:
    return {name: each for name, each in shell.get_submodule(layer)._parameters.items() if each is not None}


class StoredExperts:
    """Reads the quantised matrices of a hosted model's experts.

    Args:
        source: tensors of the checkpoint, in which a quantised matrix is one tensor.
        shell: transformers' model on the meta device.
        matrices: result of `expert_matrices`.

    Attributes:
        kinds: stored name -> quantised format, for every quantised matrix.
    """

    def __init__(self, source: TensorSource, shell: nn.Module, matrices: Mapping[str, ExpertMatrix]) -> None:
        self._source, self._places = source, matrices
        there = {name: each for name, each in matrices.items() if name in source.infos()}
        stacks: dict[str, list[tuple[ExpertMatrix, str]]] = {}
        for name, each in there.items():
            stacks.setdefault(each.stack, []).append((each, name))
        self._names: dict[str, list[tuple[str, ...]]] = {}
        for stack, given in stacks.items():
            rows: dict[int, list[str]] = {}
            for place, name in sorted(given):
                rows.setdefault(place.expert, []).append(name)
            self._names[stack] = [tuple(each) for each in rows.values()]
        self.kinds = {name: kind for name in sorted(there) if (kind := source.kind(name)) is not None}
        quantised = {matrices[name].stack.rpartition(".")[0] for name in self.kinds}
        self._layers = {layer: shell.get_submodule(layer) for layer in expert_layers(shell) if layer in quantised}

    @property
    def layers(self) -> list[str]:
        """Names of the modules with quantised experts."""
        return list(self._layers)

    def names(self, layers: Collection[str]) -> set[str]:
        """Returns the stored names of all matrices of experts in some modules."""
        return {
            name
            for stack, experts in self._names.items()
            if stack.rpartition(".")[0] in layers
            for each in experts
            for name in each
        }

    def sizes(self, layers: Collection[str]) -> tuple[int, int]:
        """Returns (bytes of the codes, number of elements) of the quantised experts in some modules."""
        codes = elements = 0
        for name, kind in self.kinds.items():
            place = self._places[name]
            if place.stack.rpartition(".")[0] in layers:
                elements += math.prod(place.shape)
                codes += math.prod(place.shape) * BITS[kind.format] // 8
        return codes, elements

    def read(
        self, layer: str, dtype: torch.dtype, device: torch.device, ops: Ops, *, planned: bool = False
    ) -> tuple[ExpertStack, ExpertStack] | None:
        """Reads the stacks (gate and up, down) of a module of experts in their codes.

        Returns None if the module has no quantised experts, or if `ops` cannot read all of them. Then the experts are
        dequantised.

        Args:
            layer: name of the module.
            dtype: dtype of the activations.
            device: device of the stacks.
            ops: ops that will read the stacks.
            planned: True to make stacks without memory, so that their bytes can be counted.
        """
        part = self._layers.get(layer)
        names = [self._names.get(f"{layer}.{name}") for name in ("gate_up_proj", "down_proj")]
        if part is None or not all(names) or not has_plain_gate(part):
            return None
        kept = self._stacks(names, dtype, device, ops, planned=True)
        if not all(each.in_codes for each in kept) or planned:
            return kept if all(each.in_codes for each in kept) else None
        return self._stacks(names, dtype, device, ops, planned=False)

    def _stacks(
        self, names: list[Any], dtype: torch.dtype, device: torch.device, ops: Ops, *, planned: bool
    ) -> tuple[ExpertStack, ExpertStack]:
        loader = Loader(self._source, dtype, device, ops, tqdm(disable=True), planned=planned, later=planned)
        return loader.stack(names[0], gated=True), loader.stack(names[1])


def has_plain_gate(part: Any) -> bool:
    """True if a module of experts computes down(silu(gate(x)) * up(x)) without biases.

    The module's own function of gate and up must have the same bits for test inputs.
    """
    plain = part.has_gate and part.is_concatenated and not (part.has_bias or part.is_transposed)
    if not plain or getattr(part, "has_post_expert_norm", False):
        return False
    cpu = torch.device("cpu")
    scales = torch.tensor(_SCALES, dtype=torch.float32, device=cpu)[:, None]
    generator = torch.Generator(cpu).manual_seed(0)
    x = torch.randn(len(_SCALES), _WIDTH, generator=generator, dtype=torch.float32, device=cpu) * scales
    gate, up = x.chunk(2, dim=-1)
    try:
        found = part._apply_gate(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # raised by one that reads parameters
        return False
    return torch.equal(found, F.silu(gate) * up)


class QuantisedExperts(nn.Module):
    """Routed experts whose weights stay quantised. An op of this package reads the chosen ones.

    Args:
        running: the hosted model.
        stacks: gate and up [E, 2 I, K], and down [E, K, I].
    """

    _running: Running

    def __init__(self, running: Running, stacks: tuple[ExpertStack, ExpertStack]) -> None:
        super().__init__()
        self._running = proxy(running)  # a weak reference, because `running` owns this module
        self.stacks = stacks

    def forward(self, hidden: Tensor, index: Tensor, factors: Tensor) -> Tensor:
        """Computes the weighted sum of each token's experts.

        Args:
            hidden: [T, K], the tokens.
            index: [T, k], ids of the k experts of each token.
            factors: [T, k], factors on the outputs of these experts.

        Returns:
            [T, K] in the dtype of `hidden`.
        """
        running, (gate_up, down) = self._running, self.stacks
        with our_op(running):
            weights = ExpertWeights(Weight(hidden[:0]), gate_up, down)  # the model's own router has chosen
            ids, numbers = index.int().contiguous(), factors.float().contiguous()
            out: Tensor = running.ops.experts(hidden.contiguous(), ids, numbers, weights, None, residual=None)
        return out.to(hidden.dtype)


def refuse_joined(shell: nn.Module, names: Iterable[str]) -> None:
    """Refuses quantised experts that are stored in one tensor, or whose matrices transformers does not only stack.

    Args:
        shell: transformers' model on the meta device.
        names: stored names of tensors that belong to no matrix and are no parameter of the model.

    Raises:
        UnsupportedModel: a tensor belongs to a module of experts.
    """
    layers = expert_layers(shell)
    for name in sorted(names):
        if any(f"{layer}." in name for layer in layers):
            raise UnsupportedModel(
                f"{name} belongs to quantised experts in a layout that hosted models do not read; wanted a checkpoint "
                "with the matrices of each expert apart, or the original weights"
            )
