"""Reads the safetensors files of a local checkpoint.

Headers are read first, and names are checked. Tensors are views of memory-mapped files.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from fastspec.errors import CheckpointError
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_JSON_BYTES: Final = 64 * 2**20
# stored buffers of old checkpoints, which follow from the config; transformers also ignores them without a warning
DERIVED: Final = re.compile(r"rotary_emb\.inv_freq")
STORED_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object strictly: UTF-8, no repeated keys, no NaN or Infinity, at most 64 MiB.

    Raises:
        CheckpointError: the file is missing, unreadable, or not such an object. The message names the file.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the name {repeated!r} occurs twice in one object")
        return found

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a JSON number")

    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file: {error}; download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
    return value


def find_shards(directory: Path) -> dict[str, str] | None:
    """Finds the weight files of a checkpoint without opening them.

    Args:
        directory: local directory of the checkpoint. As in transformers, `model.safetensors` is used if it exists, else
            the files that `model.safetensors.index.json` names.

    Returns:
        The index's map from tensor name to file name. None if there is a single file.

    Raises:
        CheckpointError: there are no safetensors weights, or the index is damaged, or it names something else than
            `.safetensors` files in this directory.
    """
    if (directory / SINGLE).is_file():
        return None
    if not (directory / INDEX).is_file():
        raise CheckpointError(_no_weights(directory))
    path = directory / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {type(weight_map).__name__}, wanted a non-empty object")
    for name, file in weight_map.items():
        if not _is_plain(file):
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] is {file!r}, wanted the plain name of a .safetensors file in {directory}"
            )
    for file in sorted(set(weight_map.values())):
        # os.path: a name that is too long gives False; Path.is_file would raise OSError
        if not os.path.isfile(directory / file):
            raise CheckpointError(f"{path}: weight_map names {file!r}, which is not a file in {directory}")
    return weight_map


def _is_plain(file: object) -> bool:
    if not isinstance(file, str) or not file.endswith(".safetensors") or file.startswith("."):
        return False
    return not any(mark in file for mark in ("/", "\\", "\0", ":"))


def _no_weights(directory: Path) -> str:
    found = sorted(entry.name for entry in directory.iterdir())
    if any(name.startswith("adapter_") for name in found):
        why = "holds an adapter only; merge it into its base model and save that"
    elif any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in found):
        why = "has pickled weights, which are never loaded; load and save_pretrained() them with transformers"
    elif any(name.endswith(".safetensors") for name in found):
        why = f"has safetensors files but no {INDEX}; download the index too"
    else:
        why = "has no safetensors weights (pickled ones are never loaded); choose a checkpoint that has them"
    return f"{directory}: wanted {SINGLE} or {INDEX}; the directory {why}"


class ShardTensors(TensorSource):
    """Tensors in the safetensors files of a checkpoint, by their stored names.

    Args:
        directory: local directory of the checkpoint.

    Attributes:
        directory: see above.
        unnamed: names of tensors that are in a weight file but not in the checkpoint's index.

    Raises:
        CheckpointError: weights are missing, a file is damaged or truncated, or files and index do not agree.
    """

    directory: Path

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}
        weight_map = find_shards(directory)
        files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        self._infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in _read_header(directory, file).items():
                if name in self._infos:
                    raise CheckpointError(
                        f"{directory}: tensor {name!r} is in both {self._infos[name].where} and {file}; keep one"
                    )
                self._infos[name] = info
        self.unnamed = frozenset()
        if weight_map is not None:
            _check_index(directory, weight_map, self._infos)
            self.unnamed = frozenset(self._infos.keys() - weight_map.keys())

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every stored tensor, which were read from the headers of the files."""
        return self._infos

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context manager in which every file stays mapped to memory."""
        with ExitStack() as stack:
            for file in sorted({info.where for info in self._infos.values()}):
                self._open[file] = stack.enter_context(_open(self.directory, file))
            try:
                yield
            finally:
                self._open.clear()

    def read(self, name: str) -> torch.Tensor:
        """Returns the tensor `name` as a CPU view of its mapped file. Works only inside of `open()`."""
        file = self._infos[name].where
        try:
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory / file}: cannot read {name!r}: {error}") from error
        return tensor

    def read_part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`. Reads nothing else of it."""
        info = self._infos[name]
        try:
            part: torch.Tensor = self._open[info.where].get_slice(name)[(rows, columns)[: len(info.shape)]]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory / info.where}: cannot read {name!r}: {error}") from error
        return part


def _open(directory: Path, file: str) -> Any:
    try:
        return safe_open(directory / file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{directory / file}: not a whole safetensors file: {error}; download it again"
        ) from error


def _read_header(directory: Path, file: str) -> dict[str, TensorInfo]:
    infos = {}
    with _open(directory, file) as opened:
        for name in opened.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            if DERIVED.search(name):
                continue
            part = opened.get_slice(name)
            stored = part.get_dtype()
            infos[name] = TensorInfo(tuple(part.get_shape()), STORED_DTYPES.get(stored, stored), file)
    return infos


def _check_index(directory: Path, weight_map: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if DERIVED.search(name):
            continue
        if name not in infos or infos[name].where != file:
            held = f"it is in {infos[name].where}" if name in infos else "no file holds it"
            raise CheckpointError(f"{directory / INDEX}: weight_map puts {name!r} in {file}, but {held}")
