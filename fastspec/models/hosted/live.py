"""Live modules and config types that can be hosted: what they must be, and what their owner must not have changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.live_checks import changed_constants, check_unchanged
from fastspec.models.checkpoints.live_module import check_devices
from fastspec.models.families import FAMILIES
from fastspec.models.hosted.info import shell_of


def known_type(model_type: str) -> bool:
    """Whether transformers has a config of this type."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def is_hostable(module: nn.Module) -> bool:
    """Whether a live module is a causal model of transformers of no native family."""
    from transformers import PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig) or config.model_type in FAMILIES:
        return False
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return type(module) in (kinds if isinstance(kinds, tuple) else (kinds,))


def check_hosted_module(module: Any) -> None:
    """Refuses a live module that is not as its config builds it, or whose parameters are not all on one device.

    Raises:
        UnsupportedModel: names the submodule and what was found.
    """
    name = type(module).__name__
    check_devices(module, name)
    check_unchanged(module)
    built = dict(shell_of(type(module), module.config).named_modules())
    for path, part in module.named_modules():
        like = built.get(path)
        if like is None or type(like) is not type(part):
            wanted = "nothing" if like is None else f"a {type(like).__name__}"
            raise UnsupportedModel(
                f"{name}: submodule {path!r} is a {type(part).__name__} where its config puts {wanted}; merge "
                "adapters, load the model unquantised, or pass the directory"
            )
        for constant, value in changed_constants(part, like):
            raise UnsupportedModel(
                f"{name}: submodule {path!r} has {constant}={value!r} where the config gives "
                f"{vars(like).get(constant)!r}; set it in the config, save the model and pass the directory"
            )
