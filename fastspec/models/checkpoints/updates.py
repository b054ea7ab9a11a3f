"""New values for the weights of a model in use, at the addresses that the weights have: checked, then copied.

Tensors go by the names of a checkpoint. They are split, joined, packed and rounded as when the model was loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from typing_extensions import override

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import PendingWeights, own_part, source_of, whole_spec
from fastspec.models.checkpoints.expert_tensors import by_expert
from fastspec.models.checkpoints.parameter_names import has_own_head, named
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.models.config import DTYPES, ModelSpec
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NewWeights: TypeAlias = "str | os.PathLike[str] | PreTrainedModel | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
_WHERE = "the update"
_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")  # that may be before the names of a model
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", ".base_layer")
_ADAPTER = ("lora_", "modules_to_save", "original_module")
_REBUILT = (reductions.rebuild_tensor, reductions.rebuild_cuda_tensor)


class GivenTensors(TensorSource):
    """Tensors that a caller gives, by name.

    Args:
        tensors: pairs of a name and a tensor, or what `torch.multiprocessing.reductions.reduce_tensor` makes of one in
            another process. Names may have the prefixes of wrappers (`_WRAPPERS`). All are taken before anything is
            checked.

    Raises:
        CheckpointError: there are none, a name comes twice, a value is not a plain tensor with values, or an adapter's
            tensor is among them.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for given, tensor in tensors:
            name = _unwrapped(given)
            if name in self._tensors:
                raise CheckpointError(f"{_WHERE}: {given!r} comes twice; give each tensor once")
            self._tensors[name] = _plain(name, tensor)
        if not self._tensors:
            raise CheckpointError(f"{_WHERE} holds no tensor; give (name, tensor) pairs, a state_dict or a path")

    @override
    def infos(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tuple(each.shape), each.dtype if each.dtype in DTYPES else str(each.dtype), _WHERE)
            for name, each in self._tensors.items()
        }

    @override
    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _unwrapped(name: str) -> str:
    """Returns the name of a tensor in the model below FSDP, DDP, torch.compile or PEFT.

    Raises:
        CheckpointError: the tensor belongs to an adapter.
    """
    if any(part.startswith(_ADAPTER) for part in name.split(".")):
        raise CheckpointError(
            f"{_WHERE}: {name!r} is an adapter's; call merge_adapter() and leave these tensors out, or "
            "merge_and_unload()"
        )
    for part in _WRAPPERS:
        if name.startswith(part):
            name = name[len(part) :]
    for part in _INSIDE:
        name = name.replace(part, "")
    return name


def _opened(tensor: object) -> object:
    """Returns the tensor of another process, if this is a handle of one."""
    if isinstance(tensor, tuple | list) and len(tensor) == 2:
        rebuild = next((each for each in _REBUILT if each is tensor[0]), None)
        return tensor if rebuild is None else rebuild(*tensor[1])
    return tensor


def _plain(name: str, tensor: object) -> Tensor:
    tensor = _opened(tensor)
    if type(tensor) not in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor):
        advice = "; gather it with full_tensor()" if hasattr(tensor, "full_tensor") else ""
        raise CheckpointError(f"{_WHERE}: {name!r} is a {type(tensor).__name__}, wanted a plain tensor{advice}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise CheckpointError(f"{_WHERE}: {name!r} has no values here ({tensor.device}, {tensor.layout})")
    return tensor.detach()


class _WithPresent(WrappedSource):
    """New tensors, and the present values of the others.

    Args:
        source: the new ones.
        loader: loader of the weights.
    """

    def __init__(self, source: TensorSource, loader: Loader) -> None:
        super().__init__(source)
        self._new, self._loader = source.infos(), loader

    @override
    def read(self, name: str) -> Tensor:
        return super().read(name) if name in self._new else self._loader.present(name)

    @override
    def kind(self, name: str) -> CodesKind | None:
        return super().kind(name) if name in self._new else None  # of codes all parts are new

    @override
    def codes(self, name: str, device: torch.device) -> Codes | None:
        return super().codes(name, device) if name in self._new else None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New values of some or all tensors of a model, checked.

    Attributes:
        source: the new tensors, by the names of parameters.
        names: names of the tensors with new values.
        whole: True if these are all tensors of the model.
        loader: loader of the weights.
    """

    source: TensorSource
    names: frozenset[str]
    whole: bool
    loader: Loader

    def copy(self) -> None:
        """Copies the values to the weights, on the current stream."""
        with torch.no_grad():
            source = self.source if self.whole else _WithPresent(self.source, self.loader)
            self.loader.refill(source, self.names)


def checked_update(values: NewWeights, weights: PendingWeights) -> WeightUpdate:
    """Reads and checks new values for the weights of a model. The weights do not change.

    Args:
        values: a directory, a Hub id, a loaded model, a state_dict, or pairs of a name and a tensor.
        weights: weights of the model.

    Raises:
        CheckpointError: a name that the model does not have, a wrong shape or dtype, a matrix whose other parts are
            missing, a value beyond float16, an adapter's tensor, or another model.
        UnsupportedOption: a checkpoint with scales of K and V.
    """
    checkpoint, loader = weights.checkpoint, weights.loader
    spec = whole_spec(checkpoint)
    if isinstance(values, str | os.PathLike | nn.Module):
        source = _of_checkpoint(values, checkpoint)
    else:
        pairs = values.items() if isinstance(values, Mapping) else values
        source = named(by_expert(GivenTensors(pairs), spec, _WHERE), spec)
        if others := source.others():
            raise CheckpointError(
                f"{_WHERE}: {listing(others)} unexpected; the {checkpoint.role} {checkpoint.name} has no such tensors. "
                "Names are those of its checkpoint; merge adapters before (merge_and_unload())"
            )
    names = _checked_names(source, spec)
    source = own_part(source, checkpoint)
    _check_parts(source, names, loader)
    if loader.dtype is torch.float16:
        _check_range(source, names)
    return WeightUpdate(source, names, names == tensor_shapes(spec).keys(), loader)


def own_update(weights: PendingWeights) -> WeightUpdate:
    """Returns an update with the values that the weights had first, from the checkpoint.

    Raises:
        ValueError: they came from a loaded model.
    """
    checkpoint, loader = weights.checkpoint, weights.loader
    if checkpoint.module is not None:
        raise ValueError(
            f"the {checkpoint.role} {checkpoint.name} was a loaded model, and has no file to read again; give its "
            "weights to wake(weights)"
        )
    source = own_part(source_of(checkpoint), checkpoint)
    return WeightUpdate(source, frozenset(tensor_shapes(checkpoint.native)), True, loader)


def _of_checkpoint(values: str | os.PathLike[str] | nn.Module, checkpoint: Checkpoint) -> TensorSource:
    """The tensors of another checkpoint of the same model."""
    found = resolve(values, role=checkpoint.role)  # type: ignore[arg-type]
    spec = whole_spec(checkpoint)
    if not isinstance(found.spec, ModelSpec) or replace(found.spec, dtype=spec.dtype) != spec:
        raise CheckpointError(
            f"{found.name}: its config is not that of the {checkpoint.role} {checkpoint.name}, and an update has new "
            "values for the same model; make a new generator"
        )
    if found.cache_scales or checkpoint.cache_scales:
        raise UnsupportedOption(
            f"{found.name}: checkpoints with scales of K and V are not updated; make a new generator"
        )
    return source_of(found)


def _checked_names(source: TensorSource, spec: ModelSpec) -> frozenset[str]:
    """Checks shapes and dtypes; returns the names of the parameters."""
    wanted, infos = tensor_shapes(spec), source.infos()
    if spec.tied and {EMBED, HEAD} <= infos.keys() and has_own_head(source):
        raise CheckpointError(
            f"{_WHERE}: {HEAD} is not {EMBED}, and this model ties them; leave {HEAD} out, or make a new generator"
        )
    names = frozenset(name for name in infos if name in wanted)
    for name in sorted(names):
        info = infos[name]
        if info.shape != wanted[name]:
            raise CheckpointError(f"{_WHERE}: {name} has shape {list(info.shape)}, wanted {list(wanted[name])}")
        if isinstance(info.dtype, str):
            raise UnsupportedModel(f"{_WHERE}: {name} is of {info.dtype}, wanted bfloat16, float16 or float32")
    if not names:
        raise CheckpointError(f"{_WHERE} holds no tensor of the model")
    return names


def _check_parts(source: TensorSource, names: frozenset[str], loader: Loader) -> None:
    """Refuses a part of a matrix whose other parts cannot be read back, and tensors that are stored otherwise."""
    for part in loader.parts:
        new, old = [name for name in part.names if name in names], [name for name in part.names if name not in names]
        if new and old and part.place is None:
            raise CheckpointError(
                f"{_WHERE}: {', '.join(new)} without {', '.join(old)}: they are one matrix of fewer bits here; give "
                "all of them"
            )
        for name in new:
            if source.kind(name) != loader.kind(name):
                raise CheckpointError(
                    f"{_WHERE}: {name} is stored as {source.kind(name) or 'plain values'}, and the weights were loaded "
                    f"from {loader.kind(name) or 'plain values'}; give it in that form, or make a new generator"
                )


def _check_range(source: TensorSource, names: frozenset[str]) -> None:
    """Refuses values beyond float16 before anything is copied."""
    with source.open(), torch.no_grad():
        for name in sorted(names):
            if source.kind(name) is None and not bool(source.read(name).to(torch.float16).isfinite().all()):
                raise CheckpointError(f"{_WHERE}: {name} has values beyond float16 (65504)")
