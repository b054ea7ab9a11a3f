"""Before anything is launched all ranks compare what they were asked for: one rank that differs would stop them all."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastspec.distributed.world import STARTING, World
from fastspec.errors import UnsupportedOption

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object without a `repr` of its own: another in each process


def digest(value: object) -> str:
    """A short hash of what `repr` says of a value."""
    return hashlib.sha256(_ADDRESS.sub("", repr(value)).encode()).hexdigest()[:16]


def sources() -> str:
    """A short hash of this package's own sources: ranks may have been started from different versions of it."""
    found = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        found.update(str(file.relative_to(package)).encode())
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def agree(
    world: World, asked: Mapping[str, object], told: Any, error: BaseException | None = None, *, starting: bool = False
) -> list[Any]:
    """Compares values by their hashes, and exchanges a small one.

    Args:
        asked: by what to call them in an error; must be equal on all ranks.
        told: JSON-ready; may differ.
        error: this rank cannot do what it was asked for; it raises that itself.
        starting: a generator is made, to which ranks may come minutes apart.

    Returns:
        What each rank told.

    Raises:
        UnsupportedOption: on every rank, where values differ, or another rank cannot do what it was asked for; names
            rank and value. Nothing was launched.
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
            raise UnsupportedOption(f"rank {rank} refused what this rank would do: {each['refused']}")
    for rank, each in enumerate(ranks):
        differ = [name for name in asked if each["asked"].get(name) != ranks[0]["asked"].get(name)]
        if differ:
            raise UnsupportedOption(
                f"rank {rank} was asked for another {' and '.join(differ)} than rank 0; every rank must be called with "
                "the same arguments"
            )
    return [each["told"] for each in ranks]
