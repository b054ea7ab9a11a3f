"""Reads weights from a user's live transformers model.

Checks first that the model computes what its config says. Changes the model only if the user asked to free its memory.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource
from fastspec.models.config import DTYPES, MAKING, spec_from_config, supported_models
from fastspec.models.families import FAMILIES
from fastspec.models.layer_table import CORRECTIONS, SCALAR

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.config import ModelSpec
    from fastspec.models.rope import RopeSpec


# hooks of transformers that do not change a layer's result: they mark it for gradients, or record it
HARMLESS_HOOKS: Final = ("transformers.modeling_utils", "transformers.utils.output_capturing")

TRAINING_HOOKS: Final = ("transformers.integrations.neftune",)  # adds noise, only in training

GLOBAL_HOOKS: Final = ("_global_forward_hooks", "_global_forward_pre_hooks")

PLAIN: Final = (bool, int, float, str, type(None))
# numbers that no forward pass reads: sizes follow from the weights; others are for training, cache or messages
UNREAD: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "in_features", "out_features"),
    *("num_embeddings", "embedding_dim", "padding_idx", "sparse", "scale_grad_by_freq"),
    *("training", "loss_type", "gradient_checkpointing", "layer_idx", "p"),
    *("attention_dropout", "residual_dropout", "embedding_dropout"),
    *("max_seq_len_cached", "original_max_seq_len", "name_or_path", "kernel_config"),
)

# attributes of layers, used only in training
DROPOUTS: Final = ("attention_dropout", "residual_dropout", "embedding_dropout")

STORED_BUFFERS: Final = (*CORRECTIONS, SCALAR)

ROTARY: Final = ("inv_freq", "attention_scaling")  # attributes that the spec contains


def check_unchanged(module: nn.Module) -> None:
    """Refuses a live model with forward hooks, replaced methods, special parameter classes, or dropout in training.

    Backward and state-dict hooks are accepted, because they change neither the generated text nor the values
    of parameters.

    Args:
        module: a transformers model. Not modified.

    Raises:
        UnsupportedModel: the message names the submodule, what was found there, and what to do.
    """
    for kind in GLOBAL_HOOKS:
        for hook in getattr(torch_module, kind).values():
            raise UnsupportedModel(
                f"{kind.removeprefix('_')} of torch.nn holds {_name_of(hook)}, which runs in every module; remove it "
                "(its handle's remove()) before the model is passed"
            )
    for path, part in module.named_modules():
        refuse = partial(_refuse, module, path)
        if hasattr(part, "_hf_hook"):
            refuse(
                f"a device hook of accelerate, {type(part._hf_hook).__name__}",
                "load the model without device_map, or call accelerate.hooks.remove_hook_from_module(model, "
                "recurse=True) once all of it is on one device",
            )
        _check_hooks(part, refuse)
        _check_methods(part, refuse)
        _check_parameters(part, refuse)
        for name in ("p",) if isinstance(part, nn.Dropout) else DROPOUTS:
            if part.training and getattr(part, name, 0):
                refuse(f"{name}={getattr(part, name)} in training mode", "call model.eval()")
    _check_attention(module)


Refuse = Callable[[str, str], NoReturn]


def _refuse(module: nn.Module, path: str, found: str, advice: str) -> NoReturn:
    where = f"submodule {path!r}" if path else "the model itself"
    raise UnsupportedModel(
        f"{type(module).__name__}: {where} has {found}, which changes the text and is not part of the weights; {advice}"
    )


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _check_hooks(part: nn.Module, refuse: Refuse) -> None:
    for kind, hooks in (("forward hook", part._forward_hooks), ("forward pre-hook", part._forward_pre_hooks)):
        for hook in hooks.values():
            home = getattr(hook, "__module__", "")
            if home not in HARMLESS_HOOKS and (part.training or home not in TRAINING_HOOKS):
                refuse(
                    f"the {kind} {_name_of(hook)}",
                    "remove it (its handle's remove(), or remove_parametrizations, remove_weight_norm, prune.remove), "
                    "or generate with transformers",
                )


def _check_methods(part: nn.Module, refuse: Refuse) -> None:
    kind = type(part)
    advice = "delete the attribute, or generate with transformers"
    for name, value in vars(part).items():
        method = inspect.getattr_static(kind, name, None)
        if isinstance(method, FunctionType | property | classmethod | staticmethod) and not _is_own(part, name, value):
            refuse(f"its method {name!r} replaced by {_name_of(value)}", advice)
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    if forward.__module__ != owner.__module__:
        refuse(f"the class {kind.__name__}, whose forward is {_name_of(forward)}", "undo the patch of that class")


def _is_own(part: nn.Module, name: str, value: Any) -> bool:
    """True if a module's attribute is still the method of its class, even if it was bound again or compiled.

    Args:
        part: the module.
        name: name of the attribute and of the method.
        value: value of the attribute.
    """
    value = getattr(value, "_torchdynamo_orig_callable", value)
    own = inspect.getattr_static(type(part), name)
    return isinstance(value, MethodType) and value.__self__ is part and value.__func__ is own


def _check_parameters(part: nn.Module, refuse: Refuse) -> None:
    for name, parameter in part._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            refuse(
                f"a parameter {name!r} of class {_name_of(type(parameter))}",
                "load the model unquantised and whole, on one device",
            )


def _check_attention(module: nn.Module) -> None:
    """Refuses a model if its attention function or its mask function is not defined by transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(module.config, "_attn_implementation", None)
    tables: tuple[Mapping[Any, Any], ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    for table in tables:
        function = table.get(name)
        if function is not None and not _name_of(function).startswith("transformers."):
            _refuse(
                module,
                "",
                f"the attention implementation {name!r}, which is {_name_of(function)}",
                "call model.set_attn_implementation('sdpa') if it computes the same",
            )


def check_as_built(module: nn.Module, spec: ModelSpec) -> None:
    """Compares the classes and constants of a live model with those of a new model with the same config.

    Args:
        module: a model that `check_unchanged` accepted, with the parameters that the spec requires.
        spec: spec of the model, from its config.

    Raises:
        UnsupportedModel: a class or a constant differs. The message names the submodule, both values, and what to do.
    """
    config: Any = copy.deepcopy(module.config)
    # available on every machine; the live model's own attention is checked elsewhere
    config._attn_implementation = "eager"
    with MAKING, torch.device("meta"):
        built = dict(type(module)(config).named_modules())
    for path, part in module.named_modules():
        refuse = partial(_refuse, module, path)
        like = built.get(path)
        if like is None or not _same_kind(part, like):
            wanted = "nothing" if like is None else f"a {type(like).__name__}"
            refuse(f"a {type(part).__name__} where its config puts {wanted}", "load the model again")
        own = vars(part).get("config")
        if own is not None and own is not module.config and not _same_config(own, spec):
            refuse("a config of its own that says something else", "save the model and pass the directory")
        for name, value in changed_constants(part, like):
            refuse(
                f"{name}={value!r} where the config gives {vars(like).get(name)!r}",
                "set it in the config, save the model and pass the directory; or load it again",
            )


def _same_kind(part: nn.Module, like: nn.Module) -> bool:
    from transformers.activations import SiLUActivation

    return type(part) is type(like) or {type(part), type(like)} == {nn.SiLU, SiLUActivation}


def _same_config(own: Any, spec: ModelSpec) -> bool:
    return replace(spec_from_config(own), dtype=spec.dtype, tied=spec.tied, own_names=spec.own_names) == spec


def changed_constants(part: nn.Module, like: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields name and value of each constant of a module whose value in a new module is another.

    Constants are attributes that are numbers, flags, texts or None. Those that no forward pass reads are left out. If
    the module lacks a constant, a placeholder object is its value.

    Args:
        part: the module to check.
        like: a new module of the same class, made from the config.
    """
    missing = object()
    for name, wanted in vars(like).items():
        if name.startswith("_") or name in UNREAD or name.endswith(ROTARY) or not isinstance(wanted, PLAIN):
            continue
        value = vars(part).get(name, missing)
        if not isinstance(value, PLAIN) or value != wanted:
            yield name, value


def as_built(module: nn.Module, spec: ModelSpec) -> ModelSpec:
    """Returns the spec with the RoPE frequencies that a live model has, because `.to(dtype)` may have rounded them.

    Args:
        module: the model.
        spec: spec of the model, from its config.

    Raises:
        UnsupportedModel: there is not one finite frequency from 0 for each rotated pair of elements. Or the config has
            short and long frequencies, and the model has others.
    """
    if all(plan.rope is None for plan in spec.plans):
        return spec
    family = FAMILIES[spec.family]
    layers = family.rope_layers
    prefixes = [f"{layer}_" for layer in layers] if layers else [""]
    # there are no frequencies for layer types that the model does not have
    kinds = ["", *(f"{kind}_" for kind in getattr(module.config, "layer_types", None) or ())]
    ropes = [
        _rope_as_built(module, family.rotary, rope, prefix) if prefix in kinds else rope
        for rope, prefix in zip(spec.ropes, prefixes, strict=True)
    ]
    return replace(spec, ropes=tuple(ropes))


def _rope_as_built(module: nn.Module, path: str, rope: RopeSpec, prefix: str) -> RopeSpec:
    rotary = module.get_submodule(path)
    scaling, held = vars(rotary).get(f"{prefix}attention_scaling", 1.0), rotary.get_buffer(f"{prefix}inv_freq")
    inv_freq = held.detach().to("cpu", torch.float32)
    whole = inv_freq.shape == (len(rope.inv_freq),) and bool((inv_freq.isfinite() & (inv_freq >= 0)).all())
    if not whole or isinstance(scaling, bool) or not isinstance(scaling, int | float):
        _refuse(
            module,
            path,
            f"{prefix}inv_freq of shape {list(held.shape)} and {prefix}attention_scaling={scaling!r}",
            f"wanted {len(rope.inv_freq)} finite frequencies and a number; load the model again",
        )
    found = tuple(inv_freq.tolist())
    if not rope.long_inv_freq:
        return replace(rope, inv_freq=found, scaling=float(scaling))
    # transformers switches between the two by the length of the last text
    if found not in (rope.inv_freq, rope.long_inv_freq) or scaling != rope.scaling:
        _refuse(
            module,
            path,
            "frequencies that are neither the short nor the long ones of its config",
            "keep them in float32 (model.to(dtype) rounds them): load the model again with dtype=",
        )
    return rope


PLAIN_LAYERS: Final = (
    *(nn.Linear, nn.Embedding, nn.ModuleList, nn.Sequential, nn.SiLU, nn.LayerNorm, nn.Dropout, nn.Conv1d),
)


def _is_imported_by(kind: type, part: type) -> bool:
    """True if `part` is a class of transformers that the Python file of the model class `kind` imports."""
    return part.__module__.startswith("transformers.") and vars(sys.modules[kind.__module__]).get(part.__name__) is part


def check_module(module: nn.Module) -> None:
    """Refuses a live module that is not an unchanged, complete, supported transformers model on one device.

    Subclasses, adapters, quantised layers, wrappers, hooks and replaced methods are refused. Their forward pass may
    differ from what this package's decoder computes.

    Raises:
        UnsupportedModel: the message names the class, the submodule, the devices, or the change.
    """
    import transformers
    from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation

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
    identities = next(each.identities for each in FAMILIES.values() if each.architecture == kind.__name__)
    for name, part in module.named_modules():
        plain = (
            type(part) in PLAIN_LAYERS
            or (type(part) is nn.Identity and name.rstrip(".0123456789").endswith(identities))
            or type(part) in (SiLUActivation, GELUActivation, GELUTanh, ReLUSquaredActivation)
            or type(part).__module__ == kind.__module__
            or _is_imported_by(kind, type(part))
        )
        if not plain:
            raise UnsupportedModel(
                f"{kind.__name__}: submodule {name!r} is a {type(part).__module__}.{type(part).__name__}; merge "
                f"adapters and load the model unquantised; {supported_models()}"
            )
    check_devices(module, kind.__name__)
    check_unchanged(module)


def check_devices(module: nn.Module, name: str) -> None:
    """Refuses a module whose parameters are on several devices, or on the meta device, where they have no values.

    Args:
        module: the module.
        name: its class name, for messages.

    Raises:
        UnsupportedModel: the message names the devices.
    """
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
    """Parameters of a live model, by the names that a checkpoint of it has.

    Args:
        module: the model. Only `release` changes it.

    Raises:
        UnsupportedModel: see `check_module`.
    """

    def __init__(self, module: nn.Module) -> None:
        check_module(module)
        self._module = module
        self._parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        # these are buffers in the module, but stored like weights
        self._buffers = {name: each for name, each in module.named_buffers() if name.endswith(STORED_BUFFERS)}
        self._parameters |= self._buffers
        where = type(module).__name__
        self._infos = {
            name: TensorInfo(tuple(p.shape), p.dtype if p.dtype in DTYPES else str(p.dtype), where)
            for name, p in self._parameters.items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every parameter. A tied matrix is there by the names of embedding and LM head."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns the parameter itself, detached. The caller copies it."""
        return self._parameters[name].detach()

    def release(self, names: list[str]) -> None:
        """Replaces each named parameter by an empty meta tensor, so that its memory can be freed.

        The module cannot run afterwards. The memory is not freed while the user holds the parameter elsewhere.
        """
        for name in names:
            if name in self._buffers:
                continue
            owner, _, attribute = name.rpartition(".")
            empty = torch.empty_like(self._parameters.pop(name), device="meta")
            setattr(self._module.get_submodule(owner), attribute, nn.Parameter(empty, requires_grad=False))
