"""Ways to damage a checkpoint directory, chosen and random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import edit

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
JSON_FILES = (CONFIG, GENERATION, INDEX, TOKENIZER, "tokenizer_config.json")
FIELDS = ("num_labels", "layer_types", "sliding_window", "rope_scaling", "attribute_map", "torch_dtype", "head_dim")
SYNTAX = b'0123456789"{}[],:eE-.ntf\\'
VALUES: list[Any] = [None, True, 0, -1, 3, 2**31, 2**63, 10**400, 1e18, 0.5, 1e308, 1e-320]
VALUES += ["", "x", "8", "\0", "../x", "float64", [], [1], ["x"], [[1]], {}, {"a": 1}, {"rope_type": "llama3"}]
Damage = Callable[[Path], None]


def set_fields(file: str, **fields: Any) -> Damage:
    return lambda directory: edit(directory / file, **fields)


def write(file: str, content: bytes) -> Damage:
    return lambda directory: ignore((directory / file).write_bytes(content))


def cut(file: str, keep: float) -> Damage:
    """Keeps the first `keep` bytes, or that share of them."""

    def damage(directory: Path) -> None:
        whole = (directory / file).read_bytes()
        (directory / file).write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])

    return damage


def remove(*files: str) -> Damage:
    return lambda directory: [(directory / file).unlink() for file in files].clear()


def renamed(file: str, name: str) -> Damage:
    return lambda directory: ignore((directory / file).rename(directory / name))


def linked(file: str, to: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / file).unlink()
        (directory / file).symlink_to(to)

    return damage


def as_directory(file: str) -> Damage:
    def damage(directory: Path) -> None:
        (directory / file).unlink()
        (directory / file).mkdir()

    return damage


def header(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Rewrites the JSON header of the single weight file, its data as it was."""

    def damage(directory: Path) -> None:
        whole = (directory / SINGLE).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8:end])
        change(entries)
        text = json.dumps(entries).encode()
        (directory / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Saves the weights again after `change`."""

    def damage(directory: Path) -> None:
        held = load_file(directory / SINGLE)
        change(held)
        save_file(held, directory / SINGLE)

    return damage


def map_entry(value: Any, name: str = "model.norm.weight") -> Damage:
    def damage(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        index["weight_map"][name] = value
        (directory / INDEX).write_text(json.dumps(index))

    return damage


def in_two_shards(directory: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)


def outside(directory: Path) -> None:
    """A whole, valid shard that lies beside the directory."""
    shutil.copy(next(directory.glob("*.safetensors")), directory.parent / "x.safetensors")
    map_entry("../x.safetensors")(directory)


def ignore(_: object) -> None:
    return None


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from paths_in(below, (*path, key))


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes, upto: int) -> bytes:
    """A few bytes of the first `upto` changed, put in or taken out, or the rest cut off."""
    changed = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, upto))
        some = draw(st.one_of(st.binary(max_size=4), st.lists(st.sampled_from(SYNTAX), max_size=4).map(bytes)))
        taken = draw(st.sampled_from([0, len(some), 1, 20, len(whole)]))
        changed[at : at + taken] = some
    return bytes(changed)


@st.composite
def damaged_value(draw: st.DrawFn, whole: bytes) -> bytes:
    """One value of a JSON file replaced, added or taken out."""
    changed = json.loads(whole)
    extra = [(name,) for name in FIELDS]
    *above, last = draw(st.sampled_from([*paths_in(changed), *extra]))
    place = changed
    for key in above:
        place = place[key]
    if draw(st.integers(0, 9)) or (isinstance(place, dict) and last not in place):
        place[last] = draw(st.sampled_from(VALUES))
    else:
        del place[last]
    return json.dumps(changed).encode()
