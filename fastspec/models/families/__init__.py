"""Table of the supported model families. To add a family, write its file and add a line to the table here."""

from __future__ import annotations

from typing import Any, Final

from fastspec.models.families.cohere import COHERE, COHERE2
from fastspec.models.families.exaone4 import EXAONE4
from fastspec.models.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT, GEMMA4_TEXT
from fastspec.models.families.glm4 import GLM, GLM4, GLM4V
from fastspec.models.families.granite import GRANITE, GRANITE4
from fastspec.models.families.hunyuan import HUNYUAN
from fastspec.models.families.llama import ERNIE4_5, HELIUM, LLAMA, SEED_OSS
from fastspec.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from fastspec.models.families.mixtures.glm4_moe import GLM4_MOE, GLM4V_MOE
from fastspec.models.families.mixtures.gpt_oss import GPT_OSS
from fastspec.models.families.mixtures.mixtral import MIXTRAL
from fastspec.models.families.mixtures.olmoe import OLMOE
from fastspec.models.families.mixtures.qwen_hybrid import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT
from fastspec.models.families.mixtures.qwen_moe import QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE
from fastspec.models.families.olmo2 import OLMO2, OLMO3
from fastspec.models.families.phi3 import PHI3
from fastspec.models.families.plan import ModelFamily
from fastspec.models.families.qwen2 import MIMO, QWEN2, QWEN2_5_VL, QWEN2_VL
from fastspec.models.families.qwen3 import QWEN3, QWEN3_5, QWEN3_5_TEXT, QWEN3_VL
from fastspec.models.families.recurrent.jamba import JAMBA
from fastspec.models.families.recurrent.kimi import BAILING_HYBRID, KIMI_LINEAR
from fastspec.models.families.recurrent.lfm2 import LFM2, LFM2_MOE, LFM3
from fastspec.models.families.recurrent.mamba import BAMBA, FALCON_H1
from fastspec.models.families.recurrent.nemotron_h import NEMOTRON_H
from fastspec.models.families.recurrent.zamba2 import ZAMBA2
from fastspec.models.families.smollm3 import SMOLLM3
from fastspec.models.families.starcoder2 import STARCODER2

FAMILIES: Final[dict[str, ModelFamily]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "mimo": MIMO,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3": QWEN3,
    "qwen3_vl": QWEN3_VL,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma3": GEMMA3,
    "gemma4_text": GEMMA4_TEXT,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "glm": GLM,
    "glm4": GLM4,
    "glm4v": GLM4V,
    "granite": GRANITE,
    "granitemoehybrid": GRANITE4,
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE4_5,
    "helium": HELIUM,
    "hunyuan_v1_dense": HUNYUAN,
    "starcoder2": STARCODER2,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "glm4v_moe": GLM4V_MOE,
    "gpt_oss": GPT_OSS,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "lfm3": LFM3,
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "zamba2": ZAMBA2,
    "jamba": JAMBA,
    "kimi_linear": KIMI_LINEAR,
    "bailing_hybrid": BAILING_HYBRID,
}
"""Families by the `model_type` of their configs."""


def runs_natively(config: Any) -> bool:
    """True if this package's decoder runs the model of a config. False: transformers' own module does, if any."""
    family = FAMILIES.get(config.model_type)
    return family is not None and not family.hosts(config)
