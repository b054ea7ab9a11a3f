"""Every script in examples/ runs, is short, and says what it shows."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 50
SAYS = {
    "batch_sampling": "row 1 alone, without drafts, is the same: True",
    "calibrate": "fastest k:",
    "generate": "the same text: True",
    "own_proposer": "the same text: True",
    "stream": "\n",
}


def test_there_is_an_expectation_for_every_example() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < MAX_LINES
    assert ast.get_docstring(ast.parse(source))
    runpy.run_path(str(path), run_name="__main__")
    assert SAYS[path.stem] in capsys.readouterr().out
