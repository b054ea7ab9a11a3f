"""Models that also read images or sound: their text model, and the names of its tensors in a checkpoint.

For prompts of text alone, such a model computes the same as its text model. A test compares both for every model type
in this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.families import runs_natively

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PretrainedConfig

TEXT_PARTS: Final = (
    *("aria", "aya_vision", "cohere2_vision", "cohere_compass", "deepseek_vl", "deepseek_vl_hybrid", "emu3"),
    *("exaone4_5", "fuyu", "gemma3n", "gemma4", "gemma4_unified", "glmasr", "got_ocr2", "granite_speech"),
    *("granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "lighton_ocr"),
    *("llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "moss_transcribe_diarize", "omniasr"),
    *("ovis2", "pp_chart2table", "qwen2_audio", "qwen3_asr", "shieldgemma2", "smolvlm", "vibevoice_asr"),
    *("video_llama_3", "video_llava", "vipllava", "voxtral"),
)
"""`model_type` of models with a text model inside. The types of `FAMILIES` that have a `text_part` are not listed."""
_PARTS: Final = ("language_model.", "text_model.")
_HEAD: Final = "lm_head."


def text_part_of(config: PretrainedConfig) -> PretrainedConfig | None:
    """Returns the config of the text model inside a larger model. None: the type is not in TEXT_PARTS.

    The text model's config gets `tie_word_embeddings` and `dtype` from the larger model's config.
    """
    text: PretrainedConfig | None = getattr(config, "text_config", None)
    if text is None or config.model_type not in TEXT_PARTS:
        return None
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.dtype = config.dtype or text.dtype
    return text


def native_text_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """Returns the config of the text model inside a larger model, if this package's decoder runs it. Else None.

    Raises:
        UnsupportedModel: `architectures` names another class than that of the larger model.
    """
    text = text_part_of(config)
    if text is None or not runs_natively(text):
        return None
    check_whole_class(config)
    return text


def check_whole_class(config: PretrainedConfig) -> str:
    """Returns the name of transformers' class for a model with a text model inside. Checks that the config names it.

    Raises:
        UnsupportedModel: `architectures` has another name.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    found: str = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[config.model_type]
    if config.architectures and config.architectures != [found]:
        raise UnsupportedModel(
            f"architectures={config.architectures!r} is not supported, wanted [{found!r}] in config.json; load a "
            "checkpoint of that class"
        )
    return found


def text_class(config: PretrainedConfig, text: PretrainedConfig) -> Any:
    """Returns transformers' causal model class for the text model inside a larger model.

    Args:
        config: config of the larger model.
        text: config of the text model.

    Raises:
        UnsupportedModel: transformers has no such class.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for one in (text, config):
        if type(one) in MODEL_FOR_CAUSAL_LM_MAPPING:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[type(one)]
            return found[0] if isinstance(found, tuple) else found
    raise UnsupportedModel(f"transformers has no causal language model of type {text.model_type!r}")


def text_name(stored: str) -> str | None:
    """Returns the name that a tensor has in the text model. `stored` is its name in a checkpoint of the whole model.

    None: the tensor belongs to another part of the whole model.
    """
    name = stored.removeprefix("model.")
    for part in _PARTS:
        if name.startswith(part):
            inner = name.removeprefix(part)
            while inner.startswith("model."):  # transformers 5.17 saves some models with the prefix twice
                inner = inner.removeprefix("model.")
            return inner if inner.startswith(_HEAD) else f"model.{inner}"
    return stored if stored.startswith(_HEAD) else None


def text_values(directory: Path) -> dict[str, Tensor]:
    """Reads the text model's tensors from a checkpoint of the whole model. Returns name in the text model -> tensor."""
    shards = ShardTensors(directory)
    names = {stored: text_name(stored) for stored in shards.infos()}
    with shards.open():
        return {name: shards.read(stored) for stored, name in names.items() if name is not None}
