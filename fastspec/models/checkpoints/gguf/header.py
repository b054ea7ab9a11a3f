"""Reads the header of a GGUF file: metadata, and the location of every tensor. Reads no values of tensors.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.common.codes import CodesKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

GGUF_SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"  # first bytes of a file
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = "general.alignment"
SPLITS: Final = "split.count"
MAX_AXES: Final = 4
_STRING, _ARRAY = 8, 9
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
CODES: Final = {"Q4_0": CodesKind("int4", (1, 32)), "Q8_0": CodesKind("int8", (1, 32))}
"""ggml's name of a format -> the equal format of `Codes`."""
_NO_GGUF: Final = "reading GGUF needs the package gguf, which is not installed: pip install gguf"

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
"""Value of one key of the metadata."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Shape, format and location of one stored tensor.

    Attributes:
        shape: size of each axis, with the rows of a matrix first. The file has them in the opposite order.
        kind: ggml's name of the format, such as "Q4_0".
        start: offset of the first byte in the file.
        row_bytes: bytes of one row, along the last axis.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Parsed header of a GGUF file.

    Attributes:
        path: path of the file.
        metadata: key -> value.
        tensors: name in the file -> shape, format and location of the tensor.
        data: the whole memory-mapped file, uint8 [bytes].
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]
    data: NDArray[np.uint8]

    @property
    def has_codes(self) -> bool:
        """True if a tensor has a quantised format that `Codes` can represent."""
        return any(tensor.kind in CODES for tensor in self.tensors.values())


def read_gguf_header(path: Path) -> GgufHeader:
    """Parses the header of a file, and checks that all tensors are inside of the file and do not overlap.

    Raises:
        CheckpointError: it is not a GGUF file, or is truncated or damaged, or the package `gguf` is not installed.
        UnsupportedModel: another version or byte order, one part of a split file, or an unknown tensor format.
    """
    try:
        data = np.memmap(path, mode="c")  # copy on write: torch warns of arrays that cannot be written
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}; download it again") from error
    return _HeaderParser(path, data).parse()


class _HeaderParser:
    """Reads the parts of a header one after the other, from a position that moves forward.

    Args:
        path: path of the file, for messages.
        data: all bytes of the file.
    """

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path, self._data, self._view, self._at = path, data, memoryview(data), 0  # type: ignore[arg-type]

    def parse(self) -> GgufHeader:
        """Reads the whole header."""
        magic = bytes(self._view[:4])
        if magic != MAGIC:
            raise CheckpointError(f"{self._path}: starts with {magic!r}, wanted {MAGIC!r}; download the file again")
        self._at = 4
        version = self._number("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            what = "is in big-endian byte order" if swapped else f"has version {version}"
            raise UnsupportedModel(f"{self._path}: the GGUF file {what}, wanted version 2 or 3, little-endian")
        tensors, keys = int(self._number("Q", "the counts")), int(self._number("Q", "the counts"))
        metadata: dict[str, MetadataValue] = {}
        for _ in range(keys):
            key = self._string("the metadata")
            if key in metadata:
                raise self._damaged(f"the key {key!r} occurs twice in its metadata")
            metadata[key] = self._value(int(self._number("I", key)), key)
        if metadata.get(SPLITS, 1) not in (0, 1):
            raise UnsupportedModel(
                f"{self._path}: is one of {metadata[SPLITS]} parts; join them with llama.cpp's "
                "`llama-gguf-split --merge` first"
            )
        places = [self._place() for _ in range(tensors)]
        found = self._tensors(places, self._aligned(metadata.get(ALIGNMENT, 32)))
        return GgufHeader(self._path, metadata, found, self._data)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: a damaged GGUF file: {why}; download it again")

    def _take(self, size: int, what: str) -> int:
        """Moves the position forward by `size` bytes. Returns the old position.

        Args:
            size: number of bytes.
            what: description of these bytes, for the message.

        Raises:
            CheckpointError: the file has fewer bytes.
        """
        start = self._at
        if size > len(self._data) - start:
            raise self._damaged(f"it ends after {len(self._data)} bytes, inside {what}")
        self._at += size
        return start

    def _number(self, code: str, what: str) -> int | float | bool:
        start = self._take(struct.calcsize("<" + code), what)
        number: int | float | bool = struct.unpack_from("<" + code, self._view, start)[0]
        return number

    def _string(self, what: str) -> str:
        size = int(self._number("Q", what))
        start = self._take(size, what)
        try:
            return bytes(self._view[start : start + size]).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} holds text that is no UTF-8") from error

    def _value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self._string(key)
        if kind in _FORMATS:
            return self._number(_FORMATS[kind], key)
        if kind != _ARRAY:
            raise self._damaged(f"{key} has the unknown type {kind}")
        kind, count = int(self._number("I", key)), int(self._number("Q", key))
        if kind == _STRING:
            self._take(8 * count, key)  # each string has at least its size: an impossible count ends here
            self._at -= 8 * count
            return [self._string(key) for _ in range(count)]
        if kind not in _FORMATS:
            raise self._damaged(f"{key} is an array of the unknown type {kind}")
        start = self._take(struct.calcsize("<" + _FORMATS[kind]) * count, key)
        return list(struct.unpack_from(f"<{count}{_FORMATS[kind]}", self._view, start))

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads one entry of the table of tensors: (name, shape, number of the format in ggml, offset in the data)."""
        name = self._string("the table of tensors")
        axes = int(self._number("I", name))
        if not 1 <= axes <= MAX_AXES:
            raise self._damaged(f"{name} has {axes} axes, wanted 1 to {MAX_AXES}")
        shape = tuple(int(self._number("Q", name)) for _ in range(axes))
        return name, shape[::-1], int(self._number("I", name)), int(self._number("Q", name))

    def _aligned(self, alignment: object) -> int:
        """Moves the position to the first multiple of the alignment, where the data begins. Returns the alignment."""
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._damaged(f"{ALIGNMENT}={alignment!r}, wanted a power of two from 8")
        self._at += -self._at % alignment
        return alignment

    def _tensors(self, places: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        blocks = block_sizes()
        found: dict[str, GgufTensor] = {}
        for name, shape, number, offset in places:
            if name in found:
                raise self._damaged(f"the tensor {name} occurs twice")
            if number not in blocks:
                raise UnsupportedModel(
                    f"{self._path}: {name} is stored in format {number}, which the package gguf does not know; update "
                    "it (pip install -U gguf), or take a file in another format"
                )
            kind, values, size = blocks[number]
            if 0 in shape or shape[-1] % values:
                raise self._damaged(f"{name} has shape {list(shape)}, and rows of {kind} are multiples of {values}")
            if offset % alignment:
                raise self._damaged(f"{name} begins at byte {offset}, wanted a multiple of {alignment}")
            found[name] = GgufTensor(shape, kind, self._at + offset, shape[-1] // values * size)
        end, before = self._at, "the header"
        for name, tensor in sorted(found.items(), key=lambda each: each[1].start):
            if tensor.start < end:
                raise self._damaged(f"the values of {before} and {name} overlap")
            end, before = tensor.start + tensor.nbytes, name
            if end > len(self._data):
                raise self._damaged(f"it ends after {len(self._data)} bytes, and {name} needs {end}")
        return found


def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Returns a dict: ggml's number of a format -> (name of the format, values per block, bytes per block).

    Raises:
        CheckpointError: the package `gguf` is not installed.
    """
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise CheckpointError(_NO_GGUF) from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
