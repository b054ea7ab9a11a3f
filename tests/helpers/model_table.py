"""Every causal model type of transformers: native, hosted or refused, and why. Writes docs/models.md.

    python -m tests.helpers.model_table

A tiny model of each type is made of its config with small sizes, and its greedy text compared with transformers'.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastspec.errors import UnsupportedModel
from fastspec.generator import FastSpecGenerator
from fastspec.models.families import FAMILIES
from fastspec.models.hosted.info import hosted_info
from fastspec.models.text_parts import TEXT_PARTS, check_whole_class, native_text_part, text_class, text_part_of
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
OTHERS = ("vision_config", "audio_config", "vq_config")  # parts of models that do not read text alone
BY_HAND = ("gemma3n",)  # parts of it need a package that the tests do not: its text model is saved under its names
# of encoders that may also be decoders
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# of latent attention: as many key heads as query heads
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "sarvam_mla", "youtu")
# fields that a type needs otherwise, None: not given
OWN: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in ENCODERS},
    **{name: {"num_key_value_heads": 4} for name in LATENT},
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "dots1": {"n_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "max_seq_len": 256,
    },
    "falcon": {"head_dim": None},
    "granitemoehybrid": {
        **{"layer_types": ["attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 4},
        "mamba_d_head": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}
HEADING = """# Model types

What runs how, by `model_type` of `config.json`, with transformers {version}. This page is generated
(`python -m tests.helpers.model_table`): each type was tried with a tiny random model.

- **native**: fastspec's own decoder and kernels run it ([what is special in each](guides/models.md)). "hosted as well":
  where its module was hosted in place of that decoder, for a comparison, it was as the hosted ones are.
- **hosted**: transformers' module runs as it is, with attention, K/V cache and matrix products of fastspec's. Drafts,
  sampling and exactness are the same; a pass takes longer. "text": greedy text was compared with transformers', and
  with the model as its own draft every draft was accepted; "traced": the model was too large for that here.
- **its text model**: the whole model reads images or sound, too. Here it reads and writes text alone: the weights of
  its other parts are not loaded, and a warning names them.
- **refused**: with the reason.
- **not tried**: no tiny model could be made of its config here. A real one is tried when it is loaded.

| `model_type` | how | what was seen |
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
    plain = kind()
    plain.allow_global_per_layer_attribute_access = True
    if model_type in TEXT_PARTS:
        text = shrunk(type(plain.text_config), OWN.get(plain.text_config.model_type, {}))
        kinds = {name: getattr(part, "config_class", part) for name, part in kind.sub_configs.items()}
        there = {name: type(getattr(plain, name, None) or kinds[name]()) for name in OTHERS if name in kinds}
        others = {name: shrunk(part, {}).to_dict() for name, part in there.items()}
        return kind(text_config=text.to_dict(), **{**others, **OWN.get(model_type, {})})
    return shrunk(kind, OWN.get(model_type, {}))


def shrunk(kind: Any, own: dict[str, Any]) -> Any:
    """A config of a class with every size that it has made small, and fields of its own."""
    plain = kind()
    plain.allow_global_per_layer_attribute_access = True
    if plain.model_type in MODELS:
        return kind(**{**COMMON, **MODELS[plain.model_type][1], **own})
    wanted = {**COMMON, **EXPERTS, **ALIASES}
    known = {name: value for name, value in wanted.items() if hasattr(plain, name)} | own
    known = {name: value for name, value in known.items() if value is not None}
    return kind(**{**known, "attn_implementation": "eager"})


def entry(model_type: str) -> Entry:
    """What becomes of a model type."""
    own = FAMILIES.get(model_type)
    if own is not None and (own.text_part or own.read_as):
        return Entry(model_type, "native", "its text model" if own.text_part else "")
    try:
        config = tiny_config(model_type)
    except Exception as error:  # noqa: BLE001 (any class may refuse our sizes in its own way)
        return Entry(model_type, "native" if own else "not tried", f"no tiny config: {type(error).__name__}")
    if own is not None:
        return Entry(model_type, "native", of_native(model_type, config))
    try:
        return hosted_entry(model_type, config)
    except UnsupportedModel as error:
        if "cannot be made of this config" in str(error):
            return Entry(model_type, "not tried", "no tiny model")
        return Entry(
            model_type,
            "refused",
            str(error).split("cannot be hosted: ", 1)[-1].split("\n")[0].partition(" (by the module of")[0],
        )
    except Exception as error:  # noqa: BLE001
        return Entry(model_type, "not tried", f"no tiny model: {type(error).__name__}")


def hosted_entry(model_type: str, config: Any) -> Entry:
    """The row of a type that is no native family.

    Raises:
        UnsupportedModel: it cannot be hosted.
    """
    if model_type in TEXT_PARTS:
        text = native_text_part(copy.deepcopy(config))
        words = whole_compared(config, check_whole_class(config))
        if text is not None:
            return Entry(model_type, "native", f"its text model, as `{text.model_type}`: {words}")
        return Entry(model_type, "hosted", f"its text model: {words}")
    info = hosted_info(config)
    words = texts_agree(fill(info.kind(info.config).eval()), None) if info.parameters <= LARGEST else "traced"
    return Entry(model_type, "hosted", words)


def of_native(model_type: str, config: Any) -> str:
    """What becomes of a native family where it is hosted in place of our decoder."""
    own = FAMILIES.pop(model_type)
    try:
        info = hosted_info(config)
        return f"hosted as well: {texts_agree(fill(info.kind(info.config).eval()), None)}"
    except UnsupportedModel:
        return ""
    finally:
        FAMILIES[model_type] = own


def whole_compared(config: Any, name: str) -> str:
    """Compares greedy texts of a saved model that reads images or sound with those of its own class."""
    config.dtype, config.architectures = "float32", [name]
    text = text_part_of(copy.deepcopy(config))
    assert text is not None
    with tempfile.TemporaryDirectory() as directory:
        if config.model_type in BY_HAND:
            model = fill(text_class(config, text)(text).eval())
            config.save_pretrained(directory)
            tensors = model.state_dict()
            tensors.pop("lm_head.weight")  # tied
            named = {f"model.language_{stored}": each.contiguous() for stored, each in tensors.items()}
            save_file(named, Path(directory) / "model.safetensors", {"format": "pt"})
        else:
            model = fill(getattr(transformers, name)(config).eval())
            model.save_pretrained(directory)
        return f"{texts_agree(model, directory)} of {type(model).__name__}"


def texts_agree(model: Any, directory: str | None) -> str:
    """Whether the greedy text of a model is that of its module, and with itself as draft all drafts are accepted."""
    source = directory or model
    prompts, new = [[3, 5, 7, 9, 11], [8], [4, 6] * 8], 12
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
        wanted.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    with FastSpecGenerator(source, source, max_length=64, dtype="float32", device="cpu", progress=False) as gen:
        out = gen.generate(prompts, max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    return "text" if out.new_tokens == wanted and out.stats.acceptance_rate == 1.0 else "TEXT DIFFERS"


def published() -> dict[str, Entry]:
    """The rows of the page as it is, by type."""
    found = re.findall(r"^\| `(\S+)` \| ([a-z ]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: Entry(name, verdict, words) for name, verdict, words in found}


def be_quiet() -> None:
    """Warnings and progress bars of transformers and of ours are left out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def page() -> str:
    """The whole page."""
    be_quiet()
    types = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES, *TEXT_PARTS})
    rows = []
    for model_type in types:
        one = entry(model_type)
        print(*one, file=sys.stderr, flush=True)
        rows.append(f"| `{one.model_type}` | {one.verdict} | {one.words.replace('|', '/')} |")
    return HEADING.format(version=transformers.__version__) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
