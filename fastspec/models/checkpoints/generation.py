"""Generation settings, such as stop ids and sampling defaults, of a checkpoint or a live model.

They are read as transformers reads them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.safetensors_files import read_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
SPECIAL_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
# fields whose ids are ignored if the model cannot emit them
UNREACHABLE: Final = ("eos_token_id", "pad_token_id", "suppress_tokens")


def settings_of_directory(directory: Path, raw: Mapping[str, Any], vocab_size: int) -> GenerationConfig:
    """Reads the generation settings of a checkpoint from `generation_config.json`, or else from `config.json`.

    Args:
        directory: a local checkpoint.
        raw: content of its `config.json`. Not modified. (transformers' config object drops generation settings.)
        vocab_size: vocabulary size of the model. Ids beyond it are dropped with a warning.

    Raises:
        CheckpointError: the settings are unreadable or invalid. The message names the file.
    """
    from transformers import GenerationConfig

    path = directory / GENERATION
    own = path.is_file()
    read = GenerationConfig.from_dict if own else GenerationConfig.from_model_config
    fields = read_json(path) if own else copy.deepcopy(dict(raw))
    try:
        settings: GenerationConfig = read(fields)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        where = path if own else directory / CONFIG
        raise CheckpointError(f"{where}: not a valid generation config: {error}") from error
    _drop_unreachable(settings, vocab_size, str(path if own else directory / CONFIG))
    return settings


def settings_of_gguf(path: Path, config: Mapping[str, Any], vocab_size: int) -> GenerationConfig:
    """Returns the generation settings that a GGUF file has: the ids of special tokens.

    Args:
        path: the file, for messages.
        config: result of `config_of_gguf`.
        vocab_size: see `settings_of_directory`.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(**{name: config[name] for name in SPECIAL_IDS if name in config})
    _drop_unreachable(settings, vocab_size, str(path))
    return settings


def settings_of_module(module: nn.Module, vocab_size: int) -> GenerationConfig | None:
    """Returns a copy of a live model's `generation_config`. None if it has none.

    Args:
        module: the model.
        vocab_size: see `settings_of_directory`.

    Raises:
        UnsupportedModel: `model.config` has a generation setting. `generate` of transformers refuses this, too.
    """
    read: Any = getattr(module.config, "_get_generation_parameters", dict)
    stray: dict[str, Any] = read()
    if stray:
        raise UnsupportedModel(
            f"{type(module).__name__}: model.config holds generation settings {stray}, which transformers refuses too; "
            "set them on model.generation_config, and None on model.config"
        )
    settings: GenerationConfig | None = copy.deepcopy(getattr(module, "generation_config", None))
    if settings is not None:
        _drop_unreachable(settings, vocab_size, f"{type(module).__name__}.generation_config")
    return settings


def _drop_unreachable(settings: GenerationConfig, vocab_size: int, where: str) -> None:
    for name in UNREACHABLE:
        value = getattr(settings, name, None)
        ids = value if isinstance(value, list | tuple) else [value]
        beyond = [one for one in ids if type(one) is int and not 0 <= one < vocab_size]
        if not beyond:
            continue
        left = [one for one in ids if one not in beyond]
        setattr(settings, name, (left or None) if isinstance(value, list | tuple) else None)
        if beyond != [-1]:  # some checkpoints write -1 for "none"
            warnings.warn(
                f"{where}: {name}={value!r} is left out: ids {beyond} are not among the model's {vocab_size}, so it "
                f"never emits them; give {name} in the call to set another",
                stacklevel=2,
            )
