"""Generation settings of a checkpoint are those that transformers finds for the same folder, or the same live model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.checkpoints import edit, make_checkpoint, make_model, refusal

VALUES: dict[str, Any] = {
    "do_sample": True,
    "max_length": 31,
    "max_new_tokens": 7,
    "min_length": 3,
    "min_new_tokens": 2,
    "repetition_penalty": 1.3,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.1,
    "typical_p": 0.9,
    "bad_words_ids": [[4], [5, 6]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [9],
    "eos_token_id": [3, 4],
    "pad_token_id": 6,
    "bos_token_id": 5,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
    "num_beams": 2,
    "no_repeat_ngram_size": 3,
    "length_penalty": 0.5,
    "early_stopping": True,
    "sequence_bias": [[[4], 1.5]],
    "stop_strings": ["x"],
    "forced_eos_token_id": 3,
    "use_cache": False,
    "renormalize_logits": True,
    "guidance_scale": 1.5,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "model", "llama2")
    (path / "generation_config.json").unlink()
    return path


def found(source: Any) -> dict[str, Any]:
    settings = resolve(source, role="target").generation_config
    assert settings is not None
    return settings.to_dict()


@pytest.mark.parametrize("field", VALUES)
def test_every_field_of_config_json_is_what_transformers_makes_of_it(directory: Path, field: str) -> None:
    needs = {"do_sample": True} if field == "num_return_sequences" else {}
    edit(directory / "config.json", **{**needs, field: VALUES[field]})
    got = found(directory)
    assert got[field] == VALUES[field]
    assert got == AutoModelForCausalLM.from_pretrained(directory).generation_config.to_dict()


def test_all_fields_at_once_and_no_field_is_unknown(directory: Path) -> None:
    assert VALUES.keys() <= vars(GenerationConfig()).keys()
    edit(directory / "config.json", **VALUES)
    assert found(directory) == AutoModelForCausalLM.from_pretrained(directory).generation_config.to_dict()


def outcome(read: Callable[[], dict[str, Any]]) -> dict[str, Any] | type[Exception]:
    """The settings, or that there are none; ids beyond the vocabulary are left out on both sides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return read()
        except (ValueError, TypeError, AttributeError, StrictDataclassError):
            return ValueError


@pytest.mark.parametrize("value", [1, 0.5, True, [3], "text"], ids=repr)
def test_any_value_of_any_field_is_read_alike(directory: Path, value: Any) -> None:
    def theirs() -> dict[str, Any]:
        from_config = {"config_file_name": "config.json", "_from_model_config": True}
        return dict(GenerationConfig.from_pretrained(directory, **from_config).to_dict())

    before = (directory / "config.json").read_bytes()
    read = 0
    for field in vars(GenerationConfig()):
        if field.startswith("_") or field == "transformers_version":
            continue
        (directory / "config.json").write_bytes(before)
        edit(directory / "config.json", **{field: value})
        got = outcome(lambda: found(directory))
        if got is ValueError and outcome(lambda: AutoConfig.from_pretrained(directory).to_dict()) is ValueError:
            continue  # a field that is also one of the model's, and no value of it
        assert got == outcome(theirs), field
        read += got is not ValueError
    assert read > 30


def test_the_file_of_settings_alone_counts_where_there_is_one(directory: Path) -> None:
    edit(directory / "config.json", repetition_penalty=1.3, max_length=31)
    GenerationConfig(temperature=0.5, do_sample=True).save_pretrained(directory)
    got = found(directory)
    assert (got["repetition_penalty"], got["max_length"], got["temperature"]) == (None, None, 0.5)
    assert got == AutoModelForCausalLM.from_pretrained(directory).generation_config.to_dict()


def test_a_live_model_keeps_its_own(directory: Path) -> None:
    edit(directory / "config.json", repetition_penalty=1.3)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.generation_config.top_k = 3
    got = found(model)
    assert (got["repetition_penalty"], got["top_k"]) == (1.3, 3)
    assert got == model.generation_config.to_dict()


def test_settings_on_a_live_config_are_refused_as_transformers_does() -> None:
    model = make_model("llama2")
    model.config.repetition_penalty = 1.3
    message = refusal(model, UnsupportedModel)
    assert "{'repetition_penalty': 1.3}" in message
    assert "set them on model.generation_config" in message


def test_bad_settings_name_their_file(directory: Path) -> None:
    edit(directory / "config.json", early_stopping="perhaps")
    assert f"{directory / 'config.json'}: not a valid generation config" in refusal(directory, CheckpointError)


# Ids that the model cannot emit


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("field", "value", "left"),
    [
        ("pad_token_id", 97, None),
        ("pad_token_id", 5000, None),
        ("eos_token_id", 97, None),
        ("eos_token_id", [2, 97], [2]),
        ("eos_token_id", [97, 98], None),
        ("eos_token_id", [2, -5], [2]),
        ("suppress_tokens", [3, 97], [3]),
    ],
    ids=str,
)
def test_ids_beyond_the_vocabulary_are_left_out_and_named(
    directory: Path, file: str, field: str, value: Any, left: Any
) -> None:
    (directory / "generation_config.json").write_text("{}")
    if file == "config.json":
        (directory / "generation_config.json").unlink()
    edit(directory / file, **{field: value})
    with pytest.warns(UserWarning, match=rf"{file}: {field}=.* is left out: ids .* among the model's 97") as caught:
        assert found(directory)[field] == left
    assert len(caught) == 1


def test_minus_one_means_none_and_ids_below_the_end_are_kept(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edit(directory / "config.json", pad_token_id=-1, eos_token_id=[0, 96])
        got = found(directory)
    assert (got["pad_token_id"], got["eos_token_id"]) == (None, [0, 96])


def test_a_live_model_loses_them_in_the_copy_alone() -> None:
    model = make_model("llama2")
    model.generation_config.pad_token_id = 97
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM\.generation_config: pad_token_id=97 is left out"):
        assert found(model)["pad_token_id"] is None
    assert model.generation_config.pad_token_id == 97
