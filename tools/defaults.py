"""Shows default values in the reference in place of the constants' names: an extension of griffe."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

import fastspec

CONSTANT = re.compile(r"[A-Z_]+")


class Values(griffe.Extension):
    """Replaces a default such as `PREFILL_BUDGET` by its value."""

    def on_function(self, *, func: griffe.Function, **given: Any) -> None:
        if func.module.path not in {getattr(fastspec, name).__module__ for name in fastspec.__all__}:
            return
        named = [each for each in func.parameters if CONSTANT.fullmatch(str(each.default or ""))]
        if not named:
            return
        scope: Any = import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            scope = getattr(scope, name)
        values = inspect.signature(inspect.unwrap(scope)).parameters
        for each in named:
            each.default = repr(values[each.name].default)
