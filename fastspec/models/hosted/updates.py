"""Updates the weights of a hosted model that is in use. New values are checked first, then copied over the old ones.

A module of transformers holds the new values. Parameters without a new value are on the meta device there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from logging import CRITICAL
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging
from typing_extensions import override

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.experts import ExpertStack
from fastspec.kernels.common.weights import Weight
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorInfo
from fastspec.models.checkpoints.updates import WHERE, GivenTensors, NewWeights, check_dtype, check_range, check_shape
from fastspec.models.hosted.codes import ProductCodes, rounding_of
from fastspec.models.hosted.cuts import part_shell
from fastspec.models.hosted.info import HostedInfo, shell_of
from fastspec.models.hosted.load import Filler, bars, read_module, stored_values
from fastspec.models.hosted.model import HostedModel
from fastspec.models.hosted.probe import base_name
from fastspec.models.hosted.stored_names import load_stored
from fastspec.models.hosted.swaps import NormSwap
from fastspec.models.text_parts import text_name

_PRIVATE = ("dtype", "torch_dtype", "transformers_version", "architectures")  # fields that say nothing of the model


@dataclass(frozen=True, slots=True)
class HostedWeights:
    """Weights of a hosted model, which `load_hosted` has filled.

    Attributes:
        checkpoint: source of the weights.
        model: the model.
        dtype, device: dtype and device of the weights.
    """

    checkpoint: Checkpoint
    model: HostedModel
    dtype: torch.dtype
    device: torch.device

    @property
    def info(self) -> HostedInfo:
        """Description of the whole model, also if ranks share it."""
        info = self.model.info
        return info if info.cut is None else info.cut.whole

    @property
    def weights(self) -> list[Any]:
        """All parameters and matrices, without buffers."""
        parts = [*self.model.module.modules(), *self.model.base.modules()]
        return [
            each
            for part in parts
            for each in _held(part).values()
            if isinstance(each, nn.Parameter | Weight | ExpertStack)
        ]

    def fill(self) -> None:
        """Does nothing, because the weights are filled. For `Pending`."""

    def cancel(self) -> None:
        """Does nothing, because nothing is read. For `Pending`."""


@dataclass(frozen=True, slots=True)
class HostedUpdate:
    """Checked new values for some or all parameters of a hosted model. Implements `engine.weight_updates.Update`.

    Attributes:
        weights: the weights in use.
        source: transformers' module with the new values. Parameters without new values are on the meta device.
        names: names of the parameters with new values.
        whole: True if every parameter has a new value.
        codes: reader of new weights that are stored quantised. None: the new values are not quantised.
    """

    weights: HostedWeights
    source: nn.Module
    names: frozenset[str]
    whole: bool
    codes: ProductCodes | None = None

    def copy(self) -> None:
        """Copies the new values to the weights in use, on the current CUDA stream."""
        own, shell = self.weights, part_shell(self.weights.model.info)
        rounding = {name: kind for name, (_, kind) in rounding_of(own.checkpoint, shell).items()}
        with torch.no_grad(), nullcontext() if self.codes is None else self.codes.tensors.open():
            _Refiller(own.model, shell, self.source, own.dtype, own.device, False, self.codes, rounding).fill()


class _Refiller(Filler):
    """Overwrites the weights of a model in use with new values, one module at a time."""

    @override
    def fill(self) -> None:
        """Makes each module that has new values anew, and copies its tensors to the module in use."""
        self._stored = self.dtype  # new values have the dtypes of those in use
        for name, part in list(self.shell.named_modules()):
            like = self.source.get_submodule(name)
            if all(each.is_meta for each in (*like._parameters.values(), *like._buffers.values()) if each is not None):
                continue
            made = self._swapped(name, part)
            if made is None:
                self._copy(name, part, like)
            _overwrite(_in_use(self.model, name), made or part)
            self.weights.clear()
            self.held.clear()

    @override
    def _as_it_is(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else super()._as_it_is(tensor)


def checked_hosted_update(values: NewWeights, weights: HostedWeights) -> HostedUpdate:
    """Checks new values for weights of a hosted model, and returns an update that can copy them. Copies nothing yet.

    Args:
        values: a directory, a Hub id, a loaded model, a state_dict, or pairs of a name and a tensor. Names are those of
            transformers' module, or those of the checkpoint.
        weights: weights of the model.

    Raises:
        CheckpointError: an unknown name, a wrong shape or dtype, a bias without its matrix, a value beyond float16, or
            a checkpoint of another model.
        UnsupportedOption: single tensors for a checkpoint that is stored quantised.
    """
    if isinstance(values, str | os.PathLike | nn.Module):
        found = resolve(values, role=weights.checkpoint.role)
        _check_same_model(found, weights)
        codes = _codes_of(found, weights)
        _check_same_format(found, codes, weights)
        if found.module is None:
            return _of_directory(found, codes, weights)
        values = found.module.state_dict()
    if weights.checkpoint.quantisation is not None:
        raise UnsupportedOption(
            f"the {weights.checkpoint.role} {weights.checkpoint.name} is hosted and stored quantised, and is updated "
            "from a directory alone; save the new weights in that format and give the directory"
        )
    given = GivenTensors(values.items() if isinstance(values, Mapping) else values)
    return _of_tensors(given, weights)


def own_hosted_update(weights: HostedWeights) -> HostedUpdate:
    """Returns an update that restores the values in the directory of the model's own checkpoint."""
    checkpoint = weights.checkpoint
    return _of_directory(checkpoint, _codes_of(checkpoint, weights), weights)


def _check_same_model(found: Checkpoint, weights: HostedWeights) -> None:
    """Refuses a checkpoint with another config."""
    own, checkpoint = weights.info, weights.checkpoint
    other = found.spec
    differs = "model_type"
    if isinstance(other, HostedInfo) and other.kind is own.kind:
        here, there = _fields(own.config), _fields(other.config)
        differs = next((key for key in sorted({*here, *there}) if here.get(key) != there.get(key)), "")
    if differs:
        raise CheckpointError(
            f"{found.name}: its config is not that of the {checkpoint.role} {checkpoint.name} ({differs}), and an "
            "update has new values for the same model; make a new generator"
        )


def _check_same_format(found: Checkpoint, codes: ProductCodes | None, weights: HostedWeights) -> None:
    """Refuses a checkpoint that is quantised in another way. `codes` are those of `found`, see `_codes_of`."""
    checkpoint = weights.checkpoint
    own = _codes_of(checkpoint, weights)
    if (codes and (codes.kinds(), codes.experts.kinds)) != (own and (own.kinds(), own.experts.kinds)):
        raise CheckpointError(
            f"{found.name}: is stored in another format than the {checkpoint.role} {checkpoint.name}; save it in that "
            "format, or make a new generator"
        )


def _codes_of(checkpoint: Checkpoint, weights: HostedWeights) -> ProductCodes | None:
    """Returns the reader of a checkpoint's quantised weights. None: it is not stored quantised."""
    return None if checkpoint.quantisation is None else ProductCodes(checkpoint, weights.model.info)


def _fields(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _PRIVATE and not key.startswith("_")}


def _of_directory(found: Checkpoint, codes: ProductCodes | None, weights: HostedWeights) -> HostedUpdate:
    """Reads all tensors of a directory into a new module. For `codes` see `_codes_of`."""
    assert found.directory is not None, "a hosted checkpoint is a directory or a module"
    values = stored_values(found.directory, weights.model, weights.dtype, weights.device, codes)
    source = read_module(values or found.directory, weights.info, weights.dtype, found.name)
    return _checked(source, weights, codes)


def _of_tensors(given: GivenTensors, weights: HostedWeights) -> HostedUpdate:
    """Makes a module that has the given tensors, and all others on the meta device."""
    info, infos = weights.info, given.infos()
    source = shell_of(info.kind, info.config)
    places = _places(source)
    for place in places.values():  # some modules draw random values on the host
        if not place.tensor.is_meta:
            _put(source, place, place.tensor.detach().to("meta"))
    named: dict[str, str] = {}  # name in the module -> given name
    for name in infos:
        own = name if name in places or not info.whole else text_name(name)
        if own is not None:  # else it belongs to another part of the whole model
            named[own] = name
    if others := sorted(named.keys() - places.keys()):
        values = {own: given.read(name) for own, name in named.items()}
        _fill_by_stored_names(source, places, values, others, weights)
        return _checked(source, weights)
    for own, name in named.items():
        _check_info(own, infos[name], places[own].tensor)
    for place in {places[own].names: places[own] for own in named}.values():
        tensor = _one_of(place, {name: given.read(named[name]) for name in place.names if name in named})
        _put(source, place, tensor.to(_dtype_in_use(weights, place.names[0])))
    return _checked(source, weights)


def _one_of(place: _Place, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the new value of a parameter, which is given under one or more of its names. Refuses different values."""
    first, *copies = values.values()
    if not all(torch.equal(first, copy) for copy in copies):
        raise CheckpointError(
            f"{WHERE}: {' is not '.join(place.names)}, and this model ties them; leave one out, or make a new generator"
        )
    return first


def _check_info(name: str, info: TensorInfo, wanted: Tensor) -> None:
    check_shape(name, info, tuple(wanted.shape))
    if wanted.is_floating_point():  # buffers may have whole numbers
        check_dtype(name, info)


def _fill_by_stored_names(
    source: nn.Module,
    places: Mapping[str, _Place],
    values: dict[str, Tensor],
    others: list[str],
    weights: HostedWeights,
) -> None:
    """Puts tensors with the names of a checkpoint, which transformers renames, into a module on the meta device.

    Args:
        source: the module.
        places: its parameters and buffers, see `_places`.
        values: the new tensors. They stay on the device of the weights if they are there.
        others: names that the module does not have.
        weights: the weights in use.
    """
    for place in places.values():
        _put(source, place, torch.empty_like(place.tensor, dtype=_dtype_in_use(weights, place.names[0]), device="meta"))
    try:
        with _silent(), bars(shown=False):
            load_stored(source, values, weights.device)
    except CheckpointError as error:
        checkpoint, kind = weights.checkpoint, weights.info.kind.__name__
        raise CheckpointError(
            f"{WHERE}: {listing(others)} unexpected; the {checkpoint.role} {checkpoint.name} is hosted, and has no "
            f"such tensors. Give names of {kind}, or names of a checkpoint; as such, {error}"
        ) from error
    state = source.state_dict()
    for place in {place.names: place for place in places.values()}.values():
        if new := {name: state[name] for name in place.names if not state[name].is_meta}:
            _put(source, place, _one_of(place, new))


@contextmanager
def _silent() -> Iterator[None]:
    """Context in which transformers logs nothing, because the error tells what is wrong."""
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _checked(source: nn.Module, weights: HostedWeights, codes: ProductCodes | None = None) -> HostedUpdate:
    """Checks a module with new values, and returns its update."""
    for path, part in source.named_modules():
        own = {name: each for name, each in part._parameters.items() if each is not None}
        new = sorted(name for name, each in own.items() if not each.is_meta)
        if new and len(new) < len(own):
            old = sorted(own.keys() - set(new))
            raise CheckpointError(
                f"{WHERE}: {path} has a new {', '.join(new)} without {', '.join(old)}; give them together"
            )
    parameters = dict(source.named_parameters())
    names = frozenset(name for name, each in parameters.items() if not each.is_meta)
    if not names:
        raise CheckpointError(f"{WHERE} holds no tensor of the model")
    if weights.dtype is torch.float16:
        for name in sorted(names):
            check_range(name, parameters[name])
    return HostedUpdate(weights, source, names, len(names) == len(parameters), codes)


class _Place(NamedTuple):
    """A parameter or buffer of a module, on the meta device.

    Attributes:
        tensor: the parameter or buffer.
        names: its names. A shared parameter has several.
    """

    tensor: Tensor
    names: tuple[str, ...]


def _places(module: nn.Module) -> dict[str, _Place]:
    """Returns the place of each name that the module's state_dict has."""
    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: _Place(tensor, tuple(names[id(tensor)])) for name, tensor in state.items()}


def _put(module: nn.Module, place: _Place, tensor: Tensor) -> None:
    """Replaces a parameter or buffer, under all its names."""
    made = nn.Parameter(tensor, requires_grad=False) if isinstance(place.tensor, nn.Parameter) else tensor
    for name in place.names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made)


def _in_use(model: HostedModel, name: str) -> nn.Module:
    """Returns the submodule with this name of the model that passes run."""
    base = base_name(model.module)
    if base and f"{name}.".startswith(f"{base}."):
        name = name[len(base) + 1 :]
        return model.base.get_submodule(name)  # type: ignore[no-any-return]
    found: nn.Module = model.module.get_submodule(name)
    return found


def _dtype_in_use(weights: HostedWeights, name: str) -> torch.dtype:
    """Returns the dtype that a parameter has in the model that passes run."""
    owner, _, leaf = name.rpartition(".")
    part = _in_use(weights.model, owner)
    held = getattr(part, leaf, None)
    if isinstance(part, NormSwap) or not isinstance(held, Tensor | Weight):
        return weights.dtype
    return held.dtype


def _held(part: nn.Module) -> dict[tuple[str, int], Tensor | Weight | ExpertStack]:
    """Returns what a module itself holds: (name, index) -> tensor, matrix or stack of experts.

    The index is of a tuple.
    """
    found: dict[tuple[str, int], Tensor | Weight | ExpertStack] = {}
    for name, value in (*part._parameters.items(), *part._buffers.items(), *vars(part).items()):
        for index, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(each, Tensor | Weight | ExpertStack):
                found[name, index] = each
    return found


def _overwrite(part: nn.Module, made: nn.Module) -> None:
    """Copies the values of `made` over those of `part`, a module of the same kind. Values on the meta device stay."""
    held = _held(part)
    for key, new in _held(made).items():
        old = held[key]
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if not new.is_meta:
                old.copy_(new)
        else:
            old.copy_from(new)  # type: ignore[union-attr, arg-type]  # both are of one class
