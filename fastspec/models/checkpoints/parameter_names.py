"""Stored names to names of parameters, by the rules of transformers: a prefix, a tied head, and what is left over."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import torch

from fastspec.errors import CheckpointError
from fastspec.models.checkpoints.safetensors_files import INDEX, TensorInfo
from fastspec.models.layer_table import EMBED, HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fastspec.kernels.common.codes import Codes, CodesKind

PREFIX: Final = "model."
TEXT: Final = ("language_model.", "text_model.")
COMPARED_ROWS: Final = 4096  # of two matrices at a time


class Stored(Protocol):
    """The tensors of a checkpoint directory by their stored names: `ShardTensors`, or what stands in its place.

    Attributes:
        directory: that checkpoint.
        unnamed: tensors that lie in a file of the index, but that the index does not name.
    """

    directory: Path
    unnamed: frozenset[str]

    def infos(self) -> Mapping[str, TensorInfo]:
        """What is known of each."""

    def open(self) -> AbstractContextManager[None]:
        """Holds files open while tensors are read."""

    def read(self, name: str) -> Tensor:
        """The tensor where it lies."""

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Rows and, of a matrix, columns of a tensor."""

    def kind(self, name: str) -> CodesKind | None:
        """What a matrix is quantised to; None: it is not."""

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """A quantised matrix on a device; None: it is not quantised."""

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Rows and columns of a quantised matrix."""


class RenamedTensors:
    """The tensors of a checkpoint directory under other names than they are stored by.

    Args:
        source: the stored tensors.
        stored: their names here, and those they are stored by.
    """

    def __init__(self, source: Stored, stored: Mapping[str, str]) -> None:
        self._source, self._stored = source, stored

    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its name here."""
        infos = self._source.infos()
        return {name: infos[stored] for name, stored in self._stored.items()}

    @contextmanager
    def open(self) -> Iterator[None]:
        """As of the source."""
        with self._source.open():
            yield

    def read(self, name: str) -> Tensor:
        """As of the source, by its name here."""
        return self._source.read(self._stored[name])

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """As of the source, by its name here."""
        return self._source.read_part(self._stored[name], rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """As of the source, by its name here."""
        return self._source.kind(self._stored[name])

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """As of the source, by its name here."""
        return self._source.codes(self._stored[name], device)

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """As of the source, by its name here."""
        return self._source.codes_part(self._stored[name], rows, columns, device)

    def release(self, names: list[str]) -> None:
        """Nothing to do: see `ShardTensors.release`."""


class NamedTensors(RenamedTensors):
    """The tensors of a checkpoint directory, by the names of the model's parameters.

    A name may lack the `model.` that it should have, or have one too many, and lie under one of `TEXT`.
    A tied embedding may be stored as the head.

    Args:
        source: the stored tensors.
        wanted: names of the model's parameters.
        tied: the config ties the head to the embedding.

    Raises:
        CheckpointError: two stored tensors are one parameter, or the index does not name one that is needed.
    """

    def __init__(self, source: Stored, wanted: Collection[str], tied: bool) -> None:
        wanted = {*wanted, EMBED, HEAD}
        names: dict[str, str] = {}
        self._others: list[str] = []
        for stored, info in source.infos().items():
            name = parameter(stored, wanted)
            if name not in wanted:
                self._others.append(stored)
                continue
            if name in names:
                both = f"{names[name]!r} and {stored!r}"
                raise CheckpointError(f"{source.directory}: {both} are both the parameter {name}; keep one")
            if stored in source.unnamed:
                where = source.directory / info.where
                raise CheckpointError(f"{where}: holds {stored!r}, which weight_map in {INDEX} does not name")
            names[name] = stored
        if tied and EMBED not in names and HEAD in names:
            names[EMBED] = names.pop(HEAD)
        super().__init__(source, names)

    def others(self) -> list[str]:
        """Stored names that are no parameter of the model."""
        return self._others


def parameter(stored: str, wanted: Collection[str]) -> str:
    """The parameter among those wanted that a stored name means, which may lack `model.` or have it twice."""
    text = stored.removeprefix(PREFIX)
    for part in TEXT:  # of a model that has other parts beside its text model
        text = text.removeprefix(part)
    while text.startswith(PREFIX + PREFIX):  # transformers 5.17 saves some with the prefix twice
        text = text.removeprefix(PREFIX)
    for name in (stored.removeprefix(PREFIX), PREFIX + stored, text, PREFIX + text):
        if name in wanted:
            return name
    return stored


class Readable(Protocol):
    """Tensors by name."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """What is known of each."""

    def open(self) -> AbstractContextManager[None]:
        """Holds files open while tensors are read."""

    def read(self, name: str) -> Tensor:
        """The tensor where it lies."""


def has_own_head(source: Readable) -> bool:
    """Whether a head is stored whose values are not the embedding's; a dtype alone makes no difference.

    Reads both matrices up to the first rows that differ. Their shapes must be equal.
    """
    if HEAD not in source.infos():
        return False
    with source.open(), torch.no_grad():
        head, embed = source.read(HEAD), source.read(EMBED)
        if head is embed or (head.data_ptr() == embed.data_ptr() and head.dtype is embed.dtype):
            return False
        for start in range(0, len(head), COMPARED_ROWS):
            rows = slice(start, start + COMPARED_ROWS)
            if not torch.equal(head[rows].float(), embed[rows].float()):
                return True
    return False
