"""Prompts for the shipped pair: code of the standard library, which it was trained on."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import pathlib
import textwrap
import typing
from pathlib import Path
from types import ModuleType

from transformers import AutoTokenizer

MODULES: tuple[ModuleType, ...] = (argparse, ast, dataclasses, difflib, inspect, json, pathlib, textwrap, typing)


def code_prompts(tokenizer: Path, rows: int, length: int) -> list[list[int]]:
    """The first `rows` pieces of `length` tokens of the modules' sources, in turn from each module.

    Args:
        tokenizer: a directory with one.

    Raises:
        ValueError: the sources have no so many pieces.
    """
    encode = AutoTokenizer.from_pretrained(str(tokenizer))
    pieces = []
    for module in MODULES:
        ids = encode(inspect.getsource(module))["input_ids"]
        pieces.append([ids[start : start + length] for start in range(0, len(ids) - length + 1, length)])
    taken = [mine[turn] for turn in range(max(map(len, pieces))) for mine in pieces if turn < len(mine)]
    if len(taken) < rows:
        raise ValueError(f"{len(MODULES)} modules have {len(taken)} pieces of {length} tokens, not {rows}")
    return taken[:rows]
