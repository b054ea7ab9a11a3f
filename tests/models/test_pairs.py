"""The table of natural pairs: what it says by name and by files, and the errors that quote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastspec import FastSpecGenerator
from fastspec.models.families import FAMILIES as NATIVE
from fastspec.models.hosted.info import known_type
from fastspec.models.pairs import GROUPS, LARGEST_SHARE, natural_pairs, suggestion
from tests.helpers.checkpoints import make_checkpoint, write_tokenizer


def test_the_table_is_in_order() -> None:
    names = [name for group in GROUPS for name, _ in group.models]
    assert len(set(names)) == len(names)
    for group in GROUPS:
        sizes = [size for _, size in group.models]
        assert sizes == sorted(sizes)
        assert all(name.count("/") == 1 for name, _ in group.models)
        assert group.drafts(sizes[-1]), f"{group.name} has no draft for its largest model"
        assert all(kind in NATIVE or known_type(kind) for kind in group.types), group.name
        for name, size in group.models:
            found = natural_pairs(name)
            assert found is not None
            assert found.group is group
            fitting = dict(group.models)
            assert all(fitting[draft] <= LARGEST_SHARE * size for draft in found.drafts)
            assert name not in found.drafts


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen/Qwen3-0.6B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("google/gemma-3-27b-it", "google/gemma-3-270m-it"),
        ("google/gemma-2-27b-it", "google/gemma-2-2b-it"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_name_has_its_pairs(model: str, first: str) -> None:
    found = natural_pairs(model)
    assert found is not None
    assert found.drafts[0] == first
    assert f"--draft {first}" in str(found)


@pytest.mark.parametrize("model", ["microsoft/phi-4", "Qwen/Qwen3-80B", "Qwen/Qwen38B", "openai/gpt-5"])
def test_what_the_table_does_not_have_is_unknown(model: str) -> None:
    assert natural_pairs(model) is None
    assert suggestion(model) == ""


def test_of_a_mixture_what_a_token_reads_counts() -> None:
    """A draft of 8 billions is slower than experts of which a token reads 3."""
    for name, wanted in (("Qwen/Qwen3-30B-A3B", ("Qwen/Qwen3-0.6B",)), ("openai/gpt-oss-120b", ())):
        found = natural_pairs(name)
        assert found is not None
        assert found.drafts == wanted


def test_the_smallest_has_no_draft() -> None:
    found = natural_pairs("Qwen/Qwen3-0.6B")
    assert found is not None
    assert (found.drafts, found.others) == ((), ())
    assert "no draft with its tokenizer that is small enough" in str(found)
    assert "--proposer ngram" in str(found)
    assert "another tokenizer" not in str(found)


def test_drafts_with_another_tokenizer_come_last() -> None:
    """None of these is too large, and none has the target's tokenizer."""
    for name, wanted in (
        ("meta-llama/Llama-3.3-70B-Instruct", ("Qwen/Qwen3-0.6B",)),
        ("Qwen/Qwen2.5-32B-Instruct", ("meta-llama/Llama-3.2-1B-Instruct",)),
        ("openai/gpt-oss-120b", ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B")),
        ("google/gemma-3-1b-it", ()),
    ):
        found = natural_pairs(name)
        assert found is not None
        assert found.others == wanted
        last = [f"  fastspec chat {name} --draft {draft}" for draft in wanted]
        assert str(found).splitlines()[len(str(found).splitlines()) - len(last) :] == last


@pytest.mark.parametrize(("marker", "name"), [("<|begin_of_text|>", "Llama 3"), (GROUPS[1].marker[1], "R1 Llama")])  # type: ignore[index]
def test_a_directory_is_told_by_its_tokenizer(tmp_path: Path, marker: str, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128256}))
    assert natural_pairs(str(tmp_path)) is None, "two families have this size"
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 128000, "content": marker}]}))
    found = natural_pairs(str(tmp_path))
    assert found is not None
    assert found.group.name == name


def test_damaged_files_and_names_that_no_file_has_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128256}))
    for added in ({}, [3], [{"id": [1], "content": "x"}]):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        assert natural_pairs(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ["llama"], "vocab_size": {}}))
    for name in (str(tmp_path), "x" * 5000, "~nobody_of_this_name/x", "\0"):
        assert natural_pairs(name) is None, name


def test_a_hub_id_that_the_table_does_not_name_is_told_by_the_files_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--someone--tuned" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 151936}))
    (tmp_path / "models--someone--tuned" / "refs").mkdir()
    (tmp_path / "models--someone--tuned" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    found = natural_pairs("someone/tuned")
    assert found is not None
    assert (found.group.name, found.by) == ("Qwen3", "by its vocabulary")
    assert natural_pairs("someone/else") is None


def test_the_warning_of_another_tokenizer_names_the_pairs_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role, first in (("Qwen3-8B", "a"), ("draft", "b")):
        make_checkpoint(tmp_path / "Qwen" / role, "llama2", vocab_size=97)
        write_tokenizer(tmp_path / "Qwen" / role, [first, *(f"w{i}" for i in range(89))])
    raw = json.loads((tmp_path / "Qwen" / "Qwen3-8B" / "config.json").read_text())
    assert raw["model_type"] == "llama"
    monkeypatch.setattr("fastspec.models.vocab.suggestion", lambda name: f"; drafts that fit {name}: small")
    with pytest.warns(UserWarning, match=r"token id 0 is 'a' .*; drafts that fit .*Qwen3-8B: small"):
        FastSpecGenerator(str(tmp_path / "Qwen" / "Qwen3-8B"), str(tmp_path / "Qwen" / "draft"), device="cpu").close()
