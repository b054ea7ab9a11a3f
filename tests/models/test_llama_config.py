"""Configs of native types are read by transformers' classes, and Llama's by one of ours that is equal to theirs."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers import LlamaConfig as Theirs

from fastspec.models.families import FAMILIES
from fastspec.models.llama_config import LlamaConfig, config_class
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
    return {name: value for name, value in vars(config).items() if name != "_post_init_done"}


@pytest.mark.parametrize("what", READ)
def test_a_config_of_llama_is_as_transformers_reads_it(what: str) -> None:
    raw = {"model_type": "llama", **READ[what]}
    ours, theirs = (kind.from_dict(copy.deepcopy(raw)) for kind in (LlamaConfig, Theirs))
    assert fields_of(ours) == fields_of(theirs)
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformers_refuses_is_refused_in_its_words(what: str) -> None:
    raised = []
    for kind in (LlamaConfig, Theirs):
        with pytest.raises(Exception, match=r"(?s).") as caught:  # which one it is, is compared
            kind.from_dict(copy.deepcopy({"model_type": "llama", **REFUSED[what]}))
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def test_all_fields_of_transformers_are_there() -> None:
    ours, theirs = (vars(kind).get("__annotations__", {}) for kind in (LlamaConfig, Theirs))
    assert set(ours) == set(theirs)


def test_tokenizers_are_found_by_the_name_of_the_class() -> None:
    assert (LlamaConfig.__name__, LlamaConfig.model_type) == (Theirs.__name__, Theirs.model_type)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
def test_other_types_have_the_class_of_transformers(family: str) -> None:
    kind = FAMILIES[family].read_as or family
    assert config_class(kind) is CONFIG_MAPPING[kind]


def test_no_native_config_imports_what_only_images_and_training_need() -> None:
    """A process of its own: here they may have been imported by another test."""
    kinds = [family.read_as or name for name, family in FAMILIES.items()]
    code = (
        "import sys; from fastspec.models.llama_config import config_class\n"
        f"for kind in {kinds!r}: config_class(kind)\n"
        "print(*[name for name in ('transformers.utils.type_validators', 'transformers.modeling_utils', 'torchvision',"
        " 'torch.distributed.tensor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
