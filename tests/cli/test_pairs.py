"""`fastspec pairs`, and the word about a missing draft."""

from __future__ import annotations

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
    for more in (["t"], ["Qwen/Qwen3-8B", "--draft", "d"], []):
        assert "fits" not in invoke(Stub(), "generate", "--prompt", "x", *more).stderr
