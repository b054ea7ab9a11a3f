"""House rules about names, signatures and docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastspec"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SHORT = 4  # lines of a function that may do without a docstring
MAX_PARAMETERS = 12  # of a host function; an open mapping counts as many
OPEN = 20
# a docstring begins with a verb or a noun, not with a clause
CLAUSE = re.compile(r"(?:What|Whether|Which|Those|That|As it|As in|As the|As its|As `|The same as `?\w+`?\.$)\b")
FLAG = re.compile(r"\b(?:flags|typer)\.")  # an annotation that makes a parameter a flag of the command line
DEVICE_CODE = re.compile(r"\bjit\b|constexpr_function")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def decorators(node: Function | ast.ClassDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def on_device(node: Function) -> bool:
    return any(DEVICE_CODE.search(each) for each in decorators(node))


def functions(source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def parameters(node: Function) -> int:
    """Parameters of a host function; `**x: Any` and `dict[str, Any]` hide as many as they like."""
    taken = node.args
    kinds = [each.annotation for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    texts = ["" if kind is None else ast.unparse(kind) for kind in kinds]
    count = sum(OPEN if "dict[str, Any]" in text else not FLAG.search(text) for text in texts)
    rest = taken.kwarg
    if rest is not None and (rest.annotation is None or ast.unparse(rest.annotation) == "Any"):
        count += OPEN
    return count


def without_docstring(source: str) -> list[str]:
    """Public functions and classes of some length without a docstring, but for overrides and device code."""
    found = []
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    outer = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    inner = {id(each) for node in outer for each in ast.walk(node) if each is not node}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or id(node) in inner:
            continue
        long = (node.end_lineno or 0) - node.lineno + 1 > SHORT
        override = any(each.endswith(("override", "overload")) for each in decorators(node))
        if not node.name.startswith("_") and long and not override and ast.get_docstring(node) is None:
            found.append(node.name)
    return found


def clauses(source: str) -> list[str]:
    """Docstrings that begin with a clause."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text.splitlines()[0] for text in texts if text and CLAUSE.match(text)]


def modules_by_string(source: str) -> list[str]:
    """Modules of this package that are imported by a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            found += [text for text in texts if isinstance(text, str) and text.startswith("fastspec.")]
    return found


def classes() -> dict[str, list[str]]:
    named = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(relative(path))
    return named


def test_a_class_name_is_used_once() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert clauses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_is_public_and_long_has_a_docstring(path: Path) -> None:
    assert without_docstring(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_module_of_ours_is_imported_by_a_string(path: Path) -> None:
    assert modules_by_string(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_parameters_are_few_and_named(path: Path) -> None:
    nodes = [node for node in functions(path.read_text(encoding="utf-8")) if not on_device(node)]
    long = {node.name: parameters(node) for node in nodes if parameters(node) > MAX_PARAMETERS}
    allowed = OPEN_SIGNATURES.get(relative(path), set())
    assert {name: count for name, count in long.items() if name not in allowed} == {}
    assert allowed <= long.keys(), "these keep the rule now: take them out of the list"


# functions that take an open mapping, or more than MAX_PARAMETERS, and why that is right
OPEN_SIGNATURES: dict[str, set[str]] = {}


def test_planted_offences_are_found() -> None:
    assert clauses('def f():\n    """Whether it is."""') == ["Whether it is."]
    assert clauses('class A:\n    """What it is."""') == ["What it is."]
    assert clauses('def f():\n    """As `reference.f`."""') == ["As `reference.f`."]
    assert clauses('def f():\n    """Returns what it is."""') == []
    body = "\n".join(["    x = 1"] * SHORT)
    assert without_docstring(f"def f():\n{body}") == ["f"]
    assert without_docstring(f"@override\ndef f():\n{body}") == without_docstring(f"def _f():\n{body}") == []
    assert without_docstring("def f():\n    x = 1") == []
    assert without_docstring("def f():\n    'Does it.'\n    def g():\n" + body.replace("    ", " " * 8)) == []
    assert modules_by_string('import_module("fastspec.kernels")') == ["fastspec.kernels"]
    assert modules_by_string('import_module("triton"), "fastspec.kernels"') == []
    (many,) = functions(f"def f({', '.join(f'a{i}: int' for i in range(13))}): ...")
    assert parameters(many) == 13
    (flags,) = functions("def f(a: flags.Seed, b: Annotated[int, typer.Option()]): ...")
    assert parameters(flags) == 0
    for open_mapping in ("def f(**x: Any): ...", "def f(**x): ...", "def f(x: dict[str, Any]): ..."):
        (taken,) = functions(open_mapping)
        assert parameters(taken) == OPEN
    (typed,) = functions("def f(**x: Unpack[Options]): ...")
    assert parameters(typed) == 0
    (kernel,) = functions("@triton.jit\ndef f(): ...")
    assert on_device(kernel)
