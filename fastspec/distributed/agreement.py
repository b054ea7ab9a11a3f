"""Compares the arguments of all ranks before anything is launched.

A rank with different arguments would otherwise block the other ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastspec.distributed.world import STARTING, World
from fastspec.errors import UnsupportedOption

# memory address in the default `repr` of an object, which differs between processes
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def digest(value: object) -> str:
    """Returns a short hash of `repr(value)`, without memory addresses, which differ between processes."""
    return hashlib.sha256(_ADDRESS.sub("", repr(value)).encode()).hexdigest()[:16]


def sources() -> str:
    """Returns a short hash of this package's source files, because ranks may run different versions."""
    found = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        found.update(str(file.relative_to(package)).encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def agree(
    world: World, asked: Mapping[str, object], told: Any, error: BaseException | None = None, *, starting: bool = False
) -> list[Any]:
    """Compares the arguments of all ranks by hash. Returns the `told` values of all ranks, in rank order.

    Args:
        world: all ranks.
        asked: arguments that must be equal on all ranks, by their names in an error message.
        told: value that this rank sends to the other ranks. It is a small JSON value, and may differ between ranks.
        error: the error with which this rank refuses the arguments. The caller raises it after `agree`. None: this rank
            accepts them.
        starting: True while generators are constructed, when ranks may arrive minutes apart.

    Raises:
        UnsupportedOption: on every rank, if arguments differ or another rank refused them. Names rank and value.
    """
    if world.size == 1:
        return [told]
    refused = None if error is None else f"{type(error).__name__}: {error}"
    mine = {"asked": {name: digest(value) for name, value in asked.items()}, "told": told, "refused": refused}
    found = world.gather_bytes(json.dumps(mine).encode(), STARTING if starting else None)
    ranks = [json.loads(each) for each in found]
    if error is not None:
        return [each["told"] for each in ranks]
    for rank, each in enumerate(ranks):
        if each["refused"] is not None:
            raise UnsupportedOption(f"rank {rank} refused the arguments: {each['refused']}")
    for rank, each in enumerate(ranks):
        differ = [name for name in asked if each["asked"].get(name) != ranks[0]["asked"].get(name)]
        if differ:
            raise UnsupportedOption(
                f"rank {rank} got another {' and '.join(differ)} than rank 0; every rank must be called with "
                "the same arguments"
            )
    return [each["told"] for each in ranks]
