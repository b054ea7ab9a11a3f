"""Code beside a checkpoint: never run; a config may name it where it names classes that transformers has itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.remote_code import names_causal_model, refuse_remote_code
from tests.helpers.checkpoints import edit, make_checkpoint, refusal
from tests.helpers.families import make_family
from tests.helpers.hosted import make_model

PHI = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}


def test_names_of_transformers_own_classes_are_read_as_those(tmp_path: Path) -> None:
    make_family("phi3").save_pretrained(tmp_path / "native")
    make_model("deepseek_v3").save_pretrained(tmp_path / "hosted")
    plain = resolve(tmp_path / "native", role="target").spec
    edit(tmp_path / "native" / "config.json", auto_map={**PHI, "AutoTokenizer": "Xenova/gpt-4o"})
    assert resolve(tmp_path / "native", role="target").spec == plain
    named = {name: f"other/repo--x.DeepseekV3{what}" for name, what in zip(PHI, ("Config", "ForCausalLM"), strict=True)}
    edit(tmp_path / "hosted" / "config.json", auto_map=named)
    assert isinstance(resolve(tmp_path / "hosted", role="target").spec, HostedInfo)
    for name, other in (
        ("AutoConfig", "configuration_x.PhiConfig"),
        ("AutoModelForCausalLM", "modeling_x.Phi3_ForCausalLM"),
    ):
        edit(tmp_path / "native" / "config.json", auto_map={**PHI, name: other})
        assert resolve(tmp_path / "native", role="target").spec == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": {**PHI, "AutoModelForCausalLM": "modeling_phi3.Phi3SmallForCausalLM"}},
        {"auto_map": {"AutoConfig": PHI["AutoConfig"]}},
        {"auto_map": {**PHI, "AutoModelForCausalLM": ["modeling_phi3.Phi3ForCausalLM"]}},
        {"auto_map": [*PHI.values()]},
        {"auto_map": PHI, "architectures": None},
    ],
    ids=str,
)
def test_any_other_name_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    make_family("phi3").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **fields)
    assert "auto_map asks for code from the checkpoint" in refusal(tmp_path, UnsupportedModel)


def test_a_type_of_a_publishers_own_is_read_by_the_classes_that_it_names(tmp_path: Path) -> None:
    make_model("deepseek_v3").save_pretrained(tmp_path)
    plain = resolve(tmp_path, role="target").spec
    names = {name: f"modeling_x.DeepseekV3{what}" for name, what in zip(PHI, ("Config", "ForCausalLM"), strict=True)}
    edit(tmp_path / "config.json", model_type="kimi_k2", auto_map=names)
    with pytest.warns(UserWarning, match="model_type 'kimi_k2' is read as 'deepseek_v3'"):
        spec = resolve(tmp_path, role="target").spec
    assert isinstance(plain, HostedInfo)
    assert isinstance(spec, HostedInfo)
    assert (spec.kind, spec.probed.calls) == (plain.kind, plain.probed.calls)
    for other in ({"AutoConfig": "configuration_x.KimiConfig"}, {"AutoModelForCausalLM": "modeling_x.KimiForCausalLM"}):
        edit(tmp_path / "config.json", auto_map={**names, **other})
        said = refusal(tmp_path, UnsupportedModel)
        assert "auto_map asks for code from the checkpoint (modeling_x." in said
        assert "has no causal model of model_type 'kimi_k2'; wanted" in said


def test_a_tokenizers_code_is_refused_and_what_names_none_is_not() -> None:
    for raw in ({}, {"auto_map": {}}, {"auto_map": {"AutoConfig": "x.Y"}, "model_type": "mimo"}):
        refuse_remote_code(Path("config.json"), raw)
    with pytest.raises(UnsupportedModel, match="tokenizer_config"):
        refuse_remote_code(Path("tokenizer_config.json"), {"auto_map": {"AutoTokenizer": ["x.Y", None]}})


def test_a_publishers_own_name_of_the_causal_model() -> None:
    assert names_causal_model("PhiMoEForCausalLM", "phimoe")
    assert names_causal_model("GPT2LMHeadModel", "gpt2")
    assert not names_causal_model("LlamaForCausalLM", "phimoe")
    assert not names_causal_model("GPTNeoXForTokenClassification", "gpt_neox")
    assert not names_causal_model("ExaoneForCausalLM", "no such type")
    if "exaone" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # which transformers reads by Llama's class
        assert names_causal_model("ExaoneForCausalLM", "exaone")
        assert not names_causal_model("ExaoneForSequenceClassification", "exaone")


def test_a_native_family_has_the_name_of_its_table_alone(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2")
    named = {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}
    edit(directory / "config.json", auto_map=named)
    resolve(directory, role="target")
    edit(directory / "config.json", architectures=["llamaForCausalLM"])
    assert "architectures=['llamaForCausalLM'] is not supported" in refusal(directory, UnsupportedModel)
    edit(directory / "config.json", auto_map=None)
    assert "architectures=['llamaForCausalLM'] is not supported" in refusal(directory, UnsupportedModel)
