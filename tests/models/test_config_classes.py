"""Configs of native types are read by transformers' classes, the commonest by ones of ours that are equal to theirs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Tokenizer

from fastspec.models.config_classes import OURS, config_class, load_as_named, tokenizer_class
from fastspec.models.families import FAMILIES
from tests.helpers.families import COMMON, YARN

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
READ: dict[str, dict[str, Any]] = {
    "nothing": {},
    "common": COMMON,
    "no heads of keys": {**COMMON, "num_key_value_heads": None},
    "heads of their own size": {**COMMON, "head_dim": 24},
    "no size of heads": {**COMMON, "head_dim": None},
    "biases": {**COMMON, "attention_bias": True, "mlp_bias": True},
    "tied": {**COMMON, "tie_word_embeddings": True},
    "theta beside": {**COMMON, "rope_theta": 5e5},
    "old scaling": {**COMMON, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "older scaling": {**COMMON, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "no scaling": {**COMMON, "rope_scaling": None, "rope_theta": 1e6},
    "new scaling": {**COMMON, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn": {**COMMON, "rope_parameters": YARN},
    "part of a head": {**COMMON, "partial_rotary_factor": 0.5},
    "windows": {**COMMON, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
    "windows from a layer on": {**COMMON, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "no window": {**COMMON, "use_sliding_window": True, "sliding_window": None},
    "dtype": {**COMMON, "torch_dtype": "bfloat16"},
    "newer dtype": {**COMMON, "dtype": "float16"},
    "generation": {**COMMON, "do_sample": True, "temperature": 0.5, "max_length": 7},
    "of others": {**COMMON, "architectures": ["LlamaForCausalLM"], "made_up": 3, "pretraining_tp": 4},
}
REFUSED: dict[str, dict[str, Any]] = {
    "heads": {**COMMON, "num_attention_heads": 3},
    "a size in words": {**COMMON, "hidden_size": "64"},
    "a flag in words": {**COMMON, "attention_bias": "yes"},
    "layers": {**COMMON, "layer_types": ["full_attention"] * 3},
    "scaling": {**COMMON, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
}


def fields_of(config: PretrainedConfig) -> dict[str, Any]:
    """All but what says how transformers cuts a model among devices."""
    left_out = "_post_init_done", "base_model_tp_plan"
    return {name: value for name, value in vars(config).items() if name not in left_out}


def read(kind: type[PretrainedConfig], raw: dict[str, Any]) -> object:
    """The fields of a config, or what refuses it."""
    given = copy.deepcopy(raw)
    try:
        config = kind.from_dict(given)
    except (StrictDataclassError, LookupError, TypeError, ValueError) as error:
        return type(error), str(error)
    return fields_of(config), config.to_dict()


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("what", [*READ, *REFUSED])
def test_a_config_is_read_or_refused_as_by_transformers(what: str, kind: str) -> None:
    raw = {"model_type": kind, **{**READ, **REFUSED}[what]}
    ours = read(OURS[kind], raw)
    assert ours == read(CONFIG_MAPPING[kind], raw)
    if kind == "llama":
        assert isinstance(ours, tuple)
        assert isinstance(ours[0], type) == (what in REFUSED), "what it is about is tried"


@pytest.mark.parametrize("kind", OURS)
def test_tokenizers_are_found_by_the_name_of_the_class(kind: str) -> None:
    ours, theirs = OURS[kind], CONFIG_MAPPING[kind]
    assert (ours.__name__, ours.model_type) == (theirs.__name__, theirs.model_type)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(OURS)))
def test_other_types_have_the_class_of_transformers(family: str) -> None:
    kind = FAMILIES[family].read_as or family
    assert config_class(kind) is (OURS.get(kind) or CONFIG_MAPPING[kind])


def test_these_import_nothing_that_only_images_and_training_need() -> None:
    """A process of its own: here they may have been imported by another test."""
    kinds = list(OURS)
    code = (
        "import sys; from fastspec.models.config_classes import config_class\n"
        f"for kind in {kinds!r}: config_class(kind)\n"
        "print(*[name for name in ('transformers.utils.type_validators', 'transformers.modeling_utils', 'torchvision',"
        " 'torch.distributed.tensor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer.json of bytes, and of a token that is added to them."""
    directory = tmp_path_factory.mktemp("tokens")
    backend = Tokenizer(models.BPE({char: at for at, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("kind", OURS)
def test_a_tokenizer_is_the_one_that_transformers_chooses(kind: str, named: str | None, tokens: Path) -> None:
    beside = {"eos_token": "<|endoftext|>", "model_max_length": 77, **({"tokenizer_class": named} if named else {})}
    (tokens / "tokenizer_config.json").write_text(json.dumps(beside))
    config = config_class(kind).from_dict({"model_type": kind, **COMMON})
    ours = load_as_named(tokens, config, beside)
    theirs = AutoTokenizer.from_pretrained(str(tokens), config=config, trust_remote_code=False, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    text = "a b\n<|endoftext|> \u00e9"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_the_commonest_are_found_without_looking_for_them() -> None:
    assert tokenizer_class("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}) is PreTrainedTokenizerFast
    assert tokenizer_class("qwen3", {"tokenizer_class": "Qwen2TokenizerFast"}) is Qwen2Tokenizer
    assert tokenizer_class("llama", {}) is tokenizer_class("gemma", {"tokenizer_class": "GemmaTokenizer"}) is None
