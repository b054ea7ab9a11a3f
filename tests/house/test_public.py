"""What the reference calls public can be imported from the package, and type checkers know what it exports."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import fastspec
import fastspec.text

ROOT = Path(__file__).parents[2]
SHOWN = sorted(
    {
        target
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for target in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)
    }
)


def test_all_exports_are_imported_at_their_first_use() -> None:
    assert {name: getattr(fastspec, name) for name in fastspec.__all__}.keys() == {*fastspec.__all__}
    assert {*fastspec._LAZY} <= {*fastspec.__all__}


@pytest.mark.parametrize("target", [target for target in SHOWN if target != "fastspec.errors"])
def test_what_the_reference_shows_is_exported(target: str) -> None:
    module, _, name = target.rpartition(".")
    package = fastspec.text if module.startswith("fastspec.text.") else fastspec
    assert name in package.__all__
    assert getattr(package, name) is getattr(import_module(module), name)


def test_all_errors_are_exported() -> None:
    classes = {name for name, each in vars(fastspec.errors).items() if isinstance(each, type)}
    shown = {name for name in classes if getattr(fastspec.errors, name).__module__ == "fastspec.errors"}
    assert shown <= {*fastspec.__all__}


@pytest.mark.parametrize("package", [fastspec, fastspec.text])
def test_type_checkers_see_no_function_that_knows_every_name(package: object) -> None:
    """A module's `__getattr__` would let them accept any misspelt import."""
    source = Path(str(package.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    seen = [each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
    assert "__getattr__" not in seen
