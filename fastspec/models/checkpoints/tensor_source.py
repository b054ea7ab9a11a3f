"""`TensorSource`: named tensors of a checkpoint or a live module.

Base class of everything from which weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.common.codes import Codes, CodesKind

Use = Literal["product", "head", "table", "tied"]
"""Use of a matrix: a product of a layer, logits in fp32, rows of a table, or both of the last two."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Properties of a tensor that are known before it is read.

    Attributes:
        shape: its sizes.
        dtype: its stored dtype. A str is the name of a dtype that cannot be loaded.
        where: the file name or module class that holds it, for messages.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    where: str


class TensorSource:
    """Named tensors, described before they are read. Several threads may read at a time.

    A subclass defines `infos` and `read`. By default nothing is quantised and nothing is released.

    Attributes:
        directory: the checkpoint; None: a live module.
        unnamed: names of tensors that are in a weight file but not in the checkpoint's index.
    """

    directory: Path | None = None
    unnamed: frozenset[str] = frozenset()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns shape, stored dtype and location of every tensor. Reads no values."""
        raise NotImplementedError

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which files stay open."""
        yield

    def stored_name(self, name: str) -> str:
        """Returns the name that a tensor has in the files. One of several parts of a stored tensor has the same."""
        return name

    def read(self, name: str) -> Tensor:
        """Returns the tensor without a copy: a view of the mapped file (inside `open()`), or the module's parameter."""
        raise NotImplementedError

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns rows and, for a matrix, columns of a tensor."""
        return self.read(name)[(rows, columns)[: len(self.infos()[name].shape)]]

    def kind(self, name: str) -> CodesKind | None:
        """Returns the kind of a quantised matrix. None: it is not quantised."""
        return None

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns a quantised matrix on a device. None: it is not quantised."""
        return None

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Returns rows and columns of a quantised matrix, see `Codes.part`.

        Reads only whole stored words that contain them.
        """
        return None

    def release(self, names: list[str]) -> None:
        """Frees the source's memory of tensors that have been copied."""


class WrappedSource(TensorSource):
    """Source that forwards to another source. A subclass overrides what it changes.

    Args:
        source: the wrapped source.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.directory, self.unnamed = source.directory, source.unnamed

    def _inner(self, name: str) -> str:
        """Returns the name of a tensor in the wrapped source."""
        return name

    @override
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._source.infos()

    @override
    def stored_name(self, name: str) -> str:
        return self._source.stored_name(self._inner(name))

    @override
    @contextmanager
    def open(self) -> Iterator[None]:
        with self._source.open():
            yield

    @override
    def read(self, name: str) -> Tensor:
        return self._source.read(self._inner(name))

    @override
    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        return self._source.read_part(self._inner(name), rows, columns)

    @override
    def kind(self, name: str) -> CodesKind | None:
        return self._source.kind(self._inner(name))

    @override
    def codes(self, name: str, device: torch.device) -> Codes | None:
        return self._source.codes(self._inner(name), device)

    @override
    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        return self._source.codes_part(self._inner(name), rows, columns, device)

    @override
    def release(self, names: list[str]) -> None:
        self._source.release([self._inner(name) for name in names])
