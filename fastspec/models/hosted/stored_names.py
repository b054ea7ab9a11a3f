"""Loads tensors with the names of a checkpoint into a module of transformers, which has other names for them.

transformers renames tensors while it loads them, and joins or splits some, for example the matrices of experts. This
module uses the same conversions for some tensors of a model, on the device where the tensors should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.models.checkpoints.tensor_checks import listing

_IGNORED = (r"rotary_emb\.inv_freq", r"position_ids$")  # buffers that old checkpoints hold, and that are computed now


def load_stored(module: Any, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Replaces parameters of a module by converted tensors, on `device` and with the parameters' dtypes.

    A tensor that has this device and dtype already is not copied, unless it is joined or split. Tied parameters are not
    tied again.

    Args:
        module: transformers' module on the meta device. Parameters without a value stay there.
        values: tensors by their names in a checkpoint.
        device: device of the new parameters.

    Raises:
        CheckpointError: a tensor has no place in the module, has another shape, or cannot be converted alone.
    """
    # imported here, because these import torch's compiler, which takes a second
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(module)
    config = LoadStateDictConfig(device_map={"": device}, dtype=None, weight_mapping=mapping)  # dtypes of the module
    asked = signature(convert_and_load_state_dict_in_model).parameters
    more: dict[str, Any] = {"tp_plan": None} if "tp_plan" in asked else {}  # before transformers 5.17
    found = convert_and_load_state_dict_in_model(module, dict(values), config, **more)[0]
    if others := not_ignored(found.unexpected_keys, module):
        raise CheckpointError(f"{listing(others)} unexpected")
    if found.mismatched_keys:
        name, given, wanted = min(found.mismatched_keys)
        raise CheckpointError(f"{name} has shape {list(given)}, wanted {list(wanted)}; give all tensors it is made of")
    if found.conversion_errors:
        name, told = min(found.conversion_errors.items())
        raise CheckpointError(f"{name} cannot be made of the given tensors: {str(told).strip().splitlines()[-1]}")


def not_ignored(names: Iterable[str], module: Any) -> list[str]:
    """Returns the names of tensors that the module neither has nor ignores."""
    patterns = (*(module._keys_to_ignore_on_load_unexpected or ()), *_IGNORED)
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns))
