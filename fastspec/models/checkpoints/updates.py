"""Updates the weights of a model that is in use. New values are checked first, then copied over the old ones in place.

New tensors have the names of a checkpoint. They are split, joined, packed and quantised as when the model was loaded.
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
from fastspec.models.checkpoints.parameter_names import check_copies, has_own_head, named
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.models.config import DTYPES, ModelSpec
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NewWeights: TypeAlias = "str | os.PathLike[str] | PreTrainedModel | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
WHERE = "the update"
_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")  # prefixes that DDP, torch.compile and PEFT add to names
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", ".base_layer")
_ADAPTER = ("lora_", "modules_to_save", "original_module")
_REBUILT = (reductions.rebuild_tensor, reductions.rebuild_cuda_tensor)


class GivenTensors(TensorSource):
    """New weights that the caller of an update passes, by name.

    Args:
        tensors: pairs of a name and a tensor. The parts that FSDP, DDP, torch.compile or PEFT add to names are removed.
            A tensor of another process is passed as the result of
            `torch.multiprocessing.reductions.reduce_tensor`.

    Raises:
        CheckpointError: there is no pair, two pairs have one name, or a tensor belongs to an adapter. Also for a value
            that is a tensor subclass, is sparse, is on the meta device, or is no tensor.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for given, tensor in tensors:
            name = _unwrapped(given)
            if name in self._tensors:
                raise CheckpointError(f"{WHERE}: {given!r} comes twice; give each tensor once")
            self._tensors[name] = _plain(name, tensor)
        if not self._tensors:
            raise CheckpointError(f"{WHERE} holds no tensor; give (name, tensor) pairs, a state_dict or a path")
        self._infos = {
            name: TensorInfo(tuple(each.shape), each.dtype if each.dtype in DTYPES else str(each.dtype), WHERE)
            for name, each in self._tensors.items()
        }

    @override
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @override
    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _unwrapped(name: str) -> str:
    """Removes the parts that FSDP, DDP, torch.compile or PEFT add to a tensor's name. Returns the model's own name.

    Raises:
        CheckpointError: the tensor belongs to an adapter.
    """
    if any(part.startswith(_ADAPTER) for part in name.split(".")):
        raise CheckpointError(
            f"{WHERE}: {name!r} is an adapter's; call merge_adapter() and leave these tensors out, or "
            "merge_and_unload()"
        )
    for part in _WRAPPERS:
        if name.startswith(part):
            name = name[len(part) :]
    for part in _INSIDE:
        name = name.replace(part, "")
    return name


def _opened(tensor: object) -> object:
    """Opens a handle of a tensor in another process. Returns any other object unchanged."""
    if isinstance(tensor, tuple | list) and len(tensor) == 2:
        rebuild = next((each for each in _REBUILT if each is tensor[0]), None)
        return tensor if rebuild is None else rebuild(*tensor[1])
    return tensor


def _plain(name: str, tensor: object) -> Tensor:
    tensor = _opened(tensor)
    if type(tensor) not in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor):
        advice = "; gather it with full_tensor()" if hasattr(tensor, "full_tensor") else ""
        raise CheckpointError(f"{WHERE}: {name!r} is a {type(tensor).__name__}, wanted a plain tensor{advice}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise CheckpointError(f"{WHERE}: {name!r} has no values here ({tensor.device}, {tensor.layout})")
    return tensor.detach()


class _WithPresent(WrappedSource):
    """Tensors of an update, completed by the present values of all other tensors of the model.

    Args:
        source: the new tensors.
        loader: loader of the weights, which can read their present values.
    """

    def __init__(self, source: TensorSource, loader: Loader) -> None:
        super().__init__(source)
        self._new, self._loader = source.infos(), loader

    @override
    def read(self, name: str) -> Tensor:
        return super().read(name) if name in self._new else self._loader.present(name)

    @override
    def kind(self, name: str) -> CodesKind | None:
        return super().kind(name) if name in self._new else None  # of a quantised matrix all parts are new

    @override
    def codes(self, name: str, device: torch.device) -> Codes | None:
        return super().codes(name, device) if name in self._new else None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Checked new values for some or all tensors of a model.

    Attributes:
        source: the new tensors, by the names of the model's parameters.
        names: names of the tensors with new values.
        whole: True if every tensor of the model has a new value.
        loader: loader of the weights.
    """

    source: TensorSource
    names: frozenset[str]
    whole: bool
    loader: Loader

    def copy(self) -> None:
        """Copies the new values to the weights, on the current CUDA stream."""
        with torch.no_grad():
            source = self.source if self.whole else _WithPresent(self.source, self.loader)
            self.loader.refill(source, self.names)


def checked_update(values: NewWeights, weights: PendingWeights) -> WeightUpdate:
    """Checks new values for weights of a model, and returns an update that can copy them. Copies nothing yet.

    Args:
        values: a directory, a Hub id, a loaded model, a state_dict, or pairs of a name and a tensor.
        weights: weights of the model.

    Raises:
        CheckpointError: an unknown name, a wrong shape or stored format, some parts of a fused quantised matrix without
            the others, a value beyond float16, an adapter's tensor, or a checkpoint of another model.
        UnsupportedModel: a dtype other than bfloat16, float16 or float32.
        UnsupportedOption: a checkpoint with scales of K and V.
    """
    checkpoint, loader = weights.checkpoint, weights.loader
    spec = whole_spec(checkpoint)
    if isinstance(values, str | os.PathLike | nn.Module):
        source = _of_checkpoint(values, checkpoint)
    else:
        pairs = values.items() if isinstance(values, Mapping) else values
        given = by_expert(GivenTensors(pairs), spec, WHERE)
        check_copies(given, spec, WHERE)
        source = named(given, spec)
        if others := source.others():
            raise CheckpointError(
                f"{WHERE}: {listing(others)} unexpected; the {checkpoint.role} {checkpoint.name} has no such tensors. "
                "Names are those of its checkpoint; merge adapters before (merge_and_unload())"
            )
    names = _checked_names(source, spec)
    source = own_part(source, checkpoint)
    _check_parts(source, names, loader)
    if loader.dtype is torch.float16:
        _check_range(source, names)
    return WeightUpdate(source, names, names == tensor_shapes(spec).keys(), loader)


def own_update(weights: PendingWeights) -> WeightUpdate:
    """Returns an update that restores the values in the files of the model's own checkpoint."""
    checkpoint, loader = weights.checkpoint, weights.loader
    source = own_part(source_of(checkpoint), checkpoint)
    return WeightUpdate(source, frozenset(tensor_shapes(checkpoint.native)), True, loader)


def _of_checkpoint(values: str | os.PathLike[str] | nn.Module, checkpoint: Checkpoint) -> TensorSource:
    """Returns the tensors of another checkpoint of the same model.

    Args:
        values: a directory, a Hub id or a loaded model.
        checkpoint: checkpoint of the model in use.

    Raises:
        CheckpointError: the config is not the same.
        UnsupportedOption: one of the two has scales of K and V.
    """
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
    """Checks shapes and dtypes of new tensors. Returns the names of those that are parameters of the model."""
    wanted, infos = tensor_shapes(spec), source.infos()
    if spec.tied and {EMBED, HEAD} <= infos.keys() and has_own_head(source):
        raise CheckpointError(
            f"{WHERE}: {HEAD} is not {EMBED}, and this model ties them; leave {HEAD} out, or make a new generator"
        )
    names = frozenset(name for name in infos if name in wanted)
    for name in sorted(names):
        check_shape(name, infos[name], wanted[name])
        check_dtype(name, infos[name])
    if not names:
        raise CheckpointError(f"{WHERE} holds no tensor of the model")
    return names


def check_shape(name: str, info: TensorInfo, wanted: tuple[int, ...]) -> None:
    """Refuses a new tensor of another shape than that of the parameter."""
    if info.shape != wanted:
        raise CheckpointError(f"{WHERE}: {name} has shape {list(info.shape)}, wanted {list(wanted)}")


def check_dtype(name: str, info: TensorInfo) -> None:
    """Refuses a new tensor of a dtype that weights cannot be converted from."""
    if isinstance(info.dtype, str):
        raise UnsupportedModel(f"{WHERE}: {name} is of {info.dtype}, wanted bfloat16, float16 or float32")


def check_range(name: str, tensor: Tensor) -> None:
    """Refuses a new tensor with values that are not finite in float16."""
    if not bool(tensor.to(torch.float16).isfinite().all()):
        raise CheckpointError(f"{WHERE}: {name} has values beyond float16 (65504)")


def _check_parts(source: TensorSource, names: frozenset[str], loader: Loader) -> None:
    """Refuses new tensors that cannot be copied to the fused weights.

    If values of a fused weight cannot be read back, all its parts must be new. A new tensor must be stored in the same
    quantised format as the one from which the weight was loaded.

    Args:
        source: the new tensors.
        names: their names.
        loader: loader of the weights.
    """
    for part in loader.parts:
        new, old = [name for name in part.names if name in names], [name for name in part.names if name not in names]
        if new and old and part.place is None:
            raise CheckpointError(
                f"{WHERE}: {', '.join(new)} without {', '.join(old)}: they are one matrix of fewer bits here; give "
                "all of them"
            )
        for name in new:
            check_format(name, source, loader)


def check_format(name: str, source: TensorSource, loader: Loader) -> None:
    """Refuses a new tensor that is stored in another quantised format than the one from which a weight was loaded."""
    given, wanted = (each.kind(name) or "unquantised values" for each in (source, loader))
    if given != wanted:
        raise CheckpointError(
            f"{WHERE}: {name} is stored as {given}, but the generator was made from {wanted}; give {name} as "
            f"{wanted}, or make a new generator"
        )


def _check_range(source: TensorSource, names: frozenset[str]) -> None:
    """Refuses new tensors with values beyond float16, before anything is copied."""
    with source.open(), torch.no_grad():
        for name in sorted(names):
            if source.kind(name) is None:
                check_range(name, source.read(name))
