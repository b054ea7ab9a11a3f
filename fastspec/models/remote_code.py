"""Refuses configs that name code in the checkpoint, unless transformers has the class. Such code is never run.

Publishers put `auto_map` into the config if transformers did not have the type yet, as for Phi-4-mini or DeepSeek-V3.
Now transformers has these types and reads such checkpoints with its own classes; fastspec reads them in the same way.
Some checkpoints, such as Kimi-K2, have a `model_type` of their own, but name classes that transformers has. They are
read as the type of those classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fastspec.errors import UnsupportedModel
from fastspec.models.config import supported_models
from fastspec.models.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

AUTO_MAP: Final = "auto_map"


def refuse_remote_code(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuses a config that names code in the checkpoint, unless transformers has classes of these names.

    Raises:
        UnsupportedModel: names the file.
    """
    asked = raw.get(AUTO_MAP)
    family = FAMILIES.get(str(raw.get("model_type")))
    if not asked or (family and family.read_as) or _is_own(asked, raw):
        return
    raise UnsupportedModel(
        f"{path}: auto_map asks for code from the checkpoint ({_asked_for(asked)}), which is never run; "
        f"{_own_names(raw)}; {supported_models()}"
    )


def with_known_type(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Replaces an unknown `model_type` by the type of the transformers classes that the config names, with a warning.

    Returns any other config unchanged. `path` is the file of the config, for the warning.
    """
    kind = _type_of_names(raw)
    if kind is None:
        return raw
    warnings.warn(
        f"{path}: model_type {raw['model_type']!r} is read as {kind!r}, whose classes of transformers auto_map names; "
        "code beside the checkpoint is not run, so what only that code does is missing",
        stacklevel=2,
    )
    return {**raw, "model_type": kind}


def _type_of_names(raw: Mapping[str, Any]) -> str | None:
    """Returns the model type of the transformers classes that a config names.

    None if transformers knows the config's own type, or if not exactly one type fits.
    """
    kind, asked = raw.get("model_type"), raw.get(AUTO_MAP)
    if not isinstance(kind, str) or kind in FAMILIES or not isinstance(asked, dict):
        return None
    if not {"AutoConfig", "AutoModelForCausalLM"} <= asked.keys():
        return None
    from transformers import CONFIG_MAPPING  # slow: it searches the folders of all models
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind in CONFIG_MAPPING:
        return None
    model = _last(asked["AutoModelForCausalLM"])
    types = [each for each, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model in _names(names)]
    types = [each for each in types if CONFIG_MAPPING[each].__name__ == _last(asked["AutoConfig"])]
    found = [each for each in types if _is_own(asked, {**raw, "model_type": each})]
    return found[0] if len(found) == 1 else None


def _asked_for(asked: Any) -> str:
    """Returns the causal model that `auto_map` names. If it names none, returns all of `auto_map`."""
    named = asked.get("AutoModelForCausalLM") if isinstance(asked, dict) else None
    return str(named or asked)


def _own_names(raw: Mapping[str, Any]) -> str:
    """Returns a clause for messages: the class names that `auto_map` may have for the type of the config."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = raw.get("model_type")
    own = " or ".join(_names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind))))
    if own:
        return f"wanted the names of transformers' own classes in it and in architectures, {own} for {kind!r}"
    return (
        f"transformers {transformers.__version__} has no causal model of model_type {kind!r}; wanted a checkpoint in a "
        "format that it has, or a newer transformers if that has it"
    )


def names_causal_model(named: str, model_type: str) -> bool:
    """True if an entry of `architectures` is transformers' causal model for a type.

    A publisher's own name is accepted if only the case of letters differs, as in "PhiMoEForCausalLM". It is also
    accepted if transformers reads the type with a class of another type, such as EXAONE 3.5 with Llama's.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = [each for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for each in _names(value)]
    own = _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    if named in own or named.lower() in [each.lower() for each in own]:
        return True
    lent = any(classes.count(each) > 1 for each in own)
    return lent and named.endswith("ForCausalLM") and named not in classes


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _is_own(asked: Any, raw: Mapping[str, Any]) -> bool:
    """True if `auto_map` and `architectures` name the causal model that transformers has for this type.

    The class of the config may have another name, as in Hunyuan-A13B. It only holds fields, which transformers' class
    also reads.
    """
    from transformers import CONFIG_MAPPING

    kind, named = raw.get("model_type"), raw.get("architectures")
    if not isinstance(asked, dict) or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        return False
    model = _last(asked.get("AutoModelForCausalLM"))
    return model is not None and _letters(model) == _letters(named[0]) and names_causal_model(named[0], kind)


def _letters(name: str) -> str:
    """Returns a class name without "_" and in lower case, because publishers spell class names differently."""
    return name.replace("_", "").lower()


def _last(name: object) -> str | None:
    """Returns "Class" of "file.Class"."""
    return None if name is None else str(name).rpartition(".")[2]
