"""A caller's live transformers model as a source of weights: checked, read, and changed only when asked
to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.live_checks import check_unchanged
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource
from fastspec.models.config import DTYPES, supported_models
from fastspec.models.families import FAMILIES
from fastspec.models.layer_table import CORRECTION

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_LAYERS: Final = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, nn.LayerNorm, nn.Dropout, nn.Conv1d)


def check_module(module: nn.Module) -> None:
    """Refuses every live module that is not a plain, whole, supported transformers model on one device.

    Subclasses, adapters, quantised layers, wrappers, hooks and replaced methods are refused too: their forward pass is
    not the one that the decoder computes, whatever their weights look like.

    Raises:
        UnsupportedModel: naming the class, the submodule, the devices, or what was changed.
    """
    import transformers
    from transformers.activations import GELUTanh, SiLUActivation

    kind = type(module)
    supported = [
        getattr(transformers, family.architecture, None) for family in FAMILIES.values() if not family.text_part
    ]
    if kind.__name__ in [family.architecture for family in FAMILIES.values() if family.text_part]:
        raise UnsupportedModel(
            f"a live {kind.__name__} is not supported; save it and pass the directory, of which the text model is read"
        )
    if kind not in supported:
        raise UnsupportedModel(
            f"a module of class {kind.__name__} is not supported; merge adapters (merge_and_unload()), unwrap "
            f"compiled or parallel wrappers, and pass the plain transformers model; {supported_models()}"
        )
    for name, part in module.named_modules():
        plain = (
            type(part) in PLAIN_LAYERS
            or type(part) in (SiLUActivation, GELUTanh)
            or type(part).__module__ == kind.__module__
        )
        if not plain:
            raise UnsupportedModel(
                f"{kind.__name__}: submodule {name!r} is a {type(part).__module__}.{type(part).__name__}; merge "
                f"adapters and load the model unquantised; {supported_models()}"
            )
    check_devices(module, kind.__name__)
    check_unchanged(module)


def check_devices(module: nn.Module, name: str) -> None:
    """Refuses a module whose parameters are on several devices, or on none."""
    placed = {str(where) for where in (getattr(module, "hf_device_map", None) or {}).values()}
    held = {str(parameter.device) for parameter in module.parameters()}
    if len(placed) > 1 or len(held) > 1 or "disk" in placed:
        raise UnsupportedModel(
            f"{name} is spread over {sorted(placed | held)}; wanted one device: load it without device_map, or pass "
            "its directory"
        )
    if "meta" in held:
        raise UnsupportedModel(
            f"{name} has parameters on the meta device: it is offloaded, or its weights were released by an earlier "
            "release_source=True; load it again, or pass its directory"
        )


class ModuleTensors(TensorSource):
    """The parameters of a live model, by their checkpoint names.

    Args:
        module: a supported model. Only `release` changes it.

    Raises:
        UnsupportedModel: see `check_module`.
    """

    def __init__(self, module: nn.Module) -> None:
        check_module(module)
        self._module = module
        self._parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        # of routers: a buffer there, and a weight like any other
        self._buffers = {name: each for name, each in module.named_buffers() if name.endswith(CORRECTION)}
        self._parameters |= self._buffers
        where = type(module).__name__
        self._infos = {
            name: TensorInfo(tuple(p.shape), p.dtype if p.dtype in DTYPES else str(p.dtype), where)
            for name, p in self._parameters.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every parameter by name; a tied head is listed under both names."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """The parameter itself, detached; the caller copies it."""
        return self._parameters[name].detach()

    def release(self, names: list[str]) -> None:
        """Puts an empty meta tensor in place of each named parameter, so that its memory can go.

        The module cannot run afterwards. Memory stays in use while the caller holds a parameter elsewhere.
        """
        for name in names:
            if name in self._buffers:
                continue
            owner, _, attribute = name.rpartition(".")
            empty = torch.empty_like(self._parameters.pop(name), device="meta")
            setattr(self._module.get_submodule(owner), attribute, nn.Parameter(empty, requires_grad=False))
