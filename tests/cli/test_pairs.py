"""`fastspec pairs`, and the word about a missing draft."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fastspec.cli.app import app
from tests.cli.test_app import Stub, invoke


def test_pairs_of_a_model() -> None:
    result = CliRunner().invoke(app, ["pairs", "Qwen/Qwen3-32B"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [
        "Qwen/Qwen3-32B: Qwen3 (by its name)",
        "  fastspec chat Qwen/Qwen3-32B --draft Qwen/Qwen3-0.6B",
    ]


def test_the_whole_table_and_an_unknown_model() -> None:
    assert "Llama 3: meta-llama/Llama-3.2-1B-Instruct" in CliRunner().invoke(app, ["pairs"]).stdout
    result = CliRunner().invoke(app, ["pairs", "microsoft/phi-4"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no pair is known for microsoft/phi-4; the table has" in result.stderr
    assert (
        "for Qwen/Qwne3-8B; did you mean Qwen/Qwen3-8B?" in CliRunner().invoke(app, ["pairs", "Qwen/Qwne3-8B"]).stderr
    )


def test_a_target_alone_is_told_its_draft() -> None:
    said = invoke(Stub(), "generate", "--prompt", "x", "Qwen/Qwen3-8B").stderr
    assert "--draft Qwen/Qwen3-0.6B fits Qwen/Qwen3-8B" in said
    lookup = "decoding without a draft; --proposer ngram drafts by lookup in the text, and needs no model"
    for target in ("t", "HuggingFaceTB/SmolLM2-135M-Instruct"):  # unknown, and the smallest of its group
        assert lookup in invoke(Stub(), "generate", "--prompt", "x", target).stderr
    asked = ["--draft", "d"], ["--proposer", "ngram"], ["--num-speculative-tokens", "0"]
    for more in (*(["Qwen/Qwen3-8B", *flags] for flags in asked), []):
        assert "without a draft" not in invoke(Stub(), "generate", "--prompt", "x", *more).stderr


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    """Not that no pair is known for it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("notes", encoding="utf-8")
    (tmp_path / "model.bin").write_bytes(b"GGUF....")
    says = {
        tmp_path / "empty": "has neither a config.json nor a GGUF file; give a checkpoint directory, a GGUF file, or",
        tmp_path / "notes.txt": "is not a GGUF file; give",
        tmp_path / "missing": "is not a file or directory, and not a Hub id; give",
        tmp_path / "model.bin": "no pair is known for",
    }
    for path, said in says.items():
        result = CliRunner().invoke(app, ["pairs", str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert str(path) in result.stderr
