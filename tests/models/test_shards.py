"""Weight files: only whole safetensors files inside the directory, and no name twice."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.checkpoints import edit, make_checkpoint, refusal
from tests.helpers.damage import INDEX, SINGLE


class Exploding:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("/tmp/fastspec-pickle-was-run",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_loaded(directory: Path, name: str) -> None:
    (directory / SINGLE).unlink()
    (directory / name).write_bytes(pickle.dumps(Exploding()))
    assert "pickled weights, which are never loaded" in refusal(directory)
    assert not Path("/tmp/fastspec-pickle-was-run").exists()


def test_a_pickle_beside_safetensors_is_not_touched(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Exploding()))
    load_weights(resolve(directory, role="target"), dtype=torch.float32, device=torch.device("cpu"), progress=False)
    assert not Path("/tmp/fastspec-pickle-was-run").exists()


def test_other_directories_without_weights(tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", "llama2", max_shard_size="60KB")
    (sharded / INDEX).unlink()
    assert f"safetensors files but no {INDEX}" in refusal(sharded)
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    assert "no safetensors weights" in refusal(sharded)
    (sharded / "adapter_model.safetensors").write_bytes(b"")
    assert "holds an adapter only" in refusal(sharded)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")


def test_a_fifo_or_directory_is_no_weight_file(directory: Path) -> None:
    (directory / SINGLE).unlink()
    os.mkfifo(directory / SINGLE)
    assert f"wanted {SINGLE}" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 4, 8, 500, -1], ids=lambda n: f"keep{n}")
def test_a_truncated_file_is_refused(directory: Path, keep: int) -> None:
    whole = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(whole[:keep])
    assert f"{directory / SINGLE}: not a whole safetensors file" in refusal(directory)


@pytest.mark.parametrize("header", [b"\xff" * 8, (10**6).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"abcd"])
def test_a_corrupt_header_is_refused(directory: Path, header: bytes) -> None:
    whole = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(header + whole[len(header) :])
    assert "not a whole safetensors file" in refusal(directory)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "a\0.safetensors",
        ".safetensors",
        "..",
        "",
        "pytorch_model.bin",
        7,
        None,
        ["model.safetensors"],
    ],
    ids=repr,
)
def test_weight_map_names_are_plain(sharded: Path, name: Any) -> None:
    outside = sharded.parent / "model.safetensors"
    shutil.copy(next(sharded.glob("*.safetensors")), outside)
    (sharded / "sub").mkdir()
    shutil.copy(outside, sharded / "sub" / "model.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert f"weight_map['model.norm.weight'] is {name!r}, wanted the plain name" in message


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"], ids=repr)
def test_an_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    edit(sharded / INDEX, weight_map=weight_map)
    assert "wanted a non-empty object" in refusal(sharded)


def test_index_and_files_must_agree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]

    def with_map(change: Any) -> str:
        weight_map = dict(index["weight_map"])
        change(weight_map)
        (sharded / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}))
        return refusal(sharded)

    name = next(name for name, file in index["weight_map"].items() if file == first)
    assert f"puts '{name}' in {second}, but it is in {first}" in with_map(lambda m: m.update({name: second}))
    assert "puts 'ghost' in " in with_map(lambda m: m.update({"ghost": first}))
    assert "no file holds it" in with_map(lambda m: m.update({"ghost": first}))
    assert f"holds '{name}', which weight_map" in with_map(lambda m: m.pop(name))
    for gone in ("gone.safetensors", "x" * 5000 + ".safetensors"):
        assert f"names '{gone}', which is not a file" in with_map(lambda m, gone=gone: m.update(x=gone))
    (sharded / INDEX).write_text(json.dumps(index))
    resolve(sharded, role="target")  # control: the index itself was good


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    both = load_file(sharded / second)
    name = next(name for name, file in index["weight_map"].items() if file == first)
    both[name] = load_file(sharded / first)[name] + 1.0
    save_file(both, sharded / second)
    assert f"tensor '{name}' is in both {first} and {second}" in refusal(sharded)
