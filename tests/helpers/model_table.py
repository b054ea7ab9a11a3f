"""Every causal model type of transformers: native, hosted or refused, and why. Writes docs/models.md.

    python -m tests.helpers.model_table

A tiny model of each type is made of its config with small sizes, and its greedy text compared with transformers'.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastspec.errors import UnsupportedModel
from fastspec.generator import FastSpecGenerator
from fastspec.models.families import FAMILIES
from fastspec.models.hosted.info import hosted_info
from fastspec.output import GenerateOutput
from tests.helpers.hosted import COMMON, EXPERTS, MODELS, fill

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LARGEST = 3_000_000  # parameters of a model that is made and run
# other names of the same sizes
ALIASES: dict[str, Any] = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "d_model": 32, "num_layers": 2, "num_heads": 4},
    **{
        "ffn_dim": 48,
        "rotary_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    **{"shared_expert_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "decoder_layers": 2},
    **{"decoder_attention_heads": 4, "decoder_ffn_dim": 48, "attention_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_top_k": 2, "n_inner": 48},
}
# fields that a type needs otherwise, None: not given
OWN: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
HEADING = """# Model types

What runs how, by `model_type` of `config.json`, with transformers {version}. This page is generated
(`python -m tests.helpers.model_table`): each type was tried with a tiny random model.

- **native**: fastspec's own decoder and kernels run it ([what is special in each](guides/models.md)).
- **hosted**: transformers' module runs as it is, with attention, K/V cache and matrix products of fastspec's. Drafts,
  sampling and exactness are the same; a pass takes longer. "text": greedy text was compared with transformers';
  "traced": the model was too large for that here.
- **refused**: with the reason.
- **not tried**: no tiny model could be made of its config here. A real one is tried when it is loaded.

| `model_type` | | |
|---|---|---|
"""


class Entry(NamedTuple):
    """One row of the table."""

    model_type: str
    verdict: str
    words: str


def tiny_config(model_type: str) -> Any:
    """A config of small sizes: those of our own list, else every size that its class has."""
    kind = CONFIG_MAPPING[model_type]
    if model_type in MODELS:
        return kind(**{**COMMON, **MODELS[model_type][1]})
    plain = kind()
    wanted = {**COMMON, **EXPERTS, **ALIASES}
    known = {name: value for name, value in wanted.items() if hasattr(plain, name)} | OWN.get(model_type, {})
    known = {name: value for name, value in known.items() if value is not None}
    return kind(**{**known, "attn_implementation": "eager"})


def entry(model_type: str) -> Entry:
    """What becomes of a model type."""
    if model_type in FAMILIES:
        return Entry(model_type, "native", "")
    try:
        config = tiny_config(model_type)
    except Exception as error:  # noqa: BLE001 (any class may refuse our sizes in its own way)
        return Entry(model_type, "not tried", f"no tiny config: {type(error).__name__}")
    try:
        info = hosted_info(config)
        words = compared(info) if info.parameters <= LARGEST else "traced"
    except UnsupportedModel as error:
        if "cannot be made of this config" in str(error):
            return Entry(model_type, "not tried", "no tiny model")
        return Entry(model_type, "refused", str(error).split("cannot be hosted: ", 1)[-1].split("\n")[0])
    except Exception as error:  # noqa: BLE001
        return Entry(model_type, "not tried", f"no tiny model: {type(error).__name__}")
    return Entry(model_type, "hosted", words)


def compared(info: Any) -> str:
    """Compares greedy texts.

    Raises:
        AssertionError: they differ.
    """
    model = fill(info.kind(info.config).eval())
    prompts, new = [[3, 5, 7, 9, 11], [8], [4, 6] * 8], 12
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
        wanted.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    with FastSpecGenerator(model, model, max_length=64, dtype="float32", device="cpu", progress=False) as gen:
        out = gen.generate(prompts, max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    return "text" if out.new_tokens == wanted else "TEXT DIFFERS"


def page() -> str:
    """The whole page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    types = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})
    rows = []
    for model_type in types:
        one = entry(model_type)
        print(*one, file=sys.stderr, flush=True)
        rows.append(f"| `{one.model_type}` | {one.verdict} | {one.words.replace('|', '/')} |")
    return HEADING.format(version=transformers.__version__) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
