"""Mutants: one formula of a module changed, for everybody who has imported it already."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutant:
    """A module of fastspec in which `old`, which stands there once, has become `new`."""

    module: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    @cached_property
    def source(self) -> str:
        return source_of(self.module)

    @cached_property
    def owner(self) -> str:
        """The function or method that `old` stands in."""
        assert self.source.count(self.old) == 1, f"{self.old!r} stands {self.source.count(self.old)} times"
        line = self.source.count("\n", 0, self.source.index(self.old)) + 1
        return next(name for name, lines in bodies(self.module) if line in lines)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exchanges the code of the functions: whoever has imported one has the same object, and so the new code."""
        module = import_module(f"fastspec.{self.module}")
        changed: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
        exec(compile(self.source.replace(self.old, self.new), str(module.__file__), "exec"), changed)
        theirs = dict(functions(changed, module.__name__))
        ours = functions(vars(module), module.__name__)
        planted = [name for name, function in ours if swap(function, theirs[name], monkeypatch)]
        assert self.owner in planted


def source_of(module: str) -> str:
    found: ModuleType = import_module(f"fastspec.{module}")
    return Path(str(found.__file__)).read_text(encoding="utf-8")


def bodies(module: str) -> Iterator[tuple[str, range]]:
    """(name, lines) of every function and method of a module that does something."""
    for node in ast.parse(source_of(module)).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in inside:
            if isinstance(one, ast.FunctionDef) and not _only_described(one):
                assert one.end_lineno is not None
                yield prefix + one.name, range(one.lineno, one.end_lineno + 1)


def _only_described(function: ast.FunctionDef) -> bool:
    """Whether the body is a docstring, as in a protocol."""
    return len(function.body) == 1 and isinstance(function.body[0], ast.Expr)


def functions(namespace: Any, module: str) -> Iterator[tuple[str, FunctionType]]:
    """(name, function) of the functions and methods that a module defines."""
    for name, value in list(namespace.items()):
        if inspect.isclass(value) and value.__module__ == module:
            for inner, member in list(vars(value).items()):
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType) and function.__module__ == module:
                    yield f"{name}.{inner}", function
        elif isinstance(value, FunctionType) and value.__module__ == module:
            yield name, value


def swap(ours: FunctionType, theirs: FunctionType, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Gives one function the other's code, where that differs."""
    if ours.__code__ == theirs.__code__:
        return False
    monkeypatch.setattr(ours, "__code__", theirs.__code__)
    return True
