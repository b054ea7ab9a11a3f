"""`TensorSource`, the base class of everything from which weights are read, such as the files of a checkpoint."""

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
"""Use of a matrix.

"product" is multiplied in a layer, "head" gives logits in fp32, rows of a "table" are read by id as in an embedding,
and "tied" is both head and table.
"""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Properties of a tensor that are known before it is read.

    Attributes:
        shape: size of each axis.
        dtype: the stored dtype. A str is the name of a dtype that cannot be loaded.
        where: the file name or module class that holds it, for messages.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    where: str


class TensorSource:
    """Named tensors whose shapes and dtypes are known before values are read. Several threads may read at a time.

    A subclass defines `infos` and `read`. Other methods have defaults for tensors that are not quantised, and whose
    memory is not freed.

    Attributes:
        directory: local directory of the checkpoint. None: not read from files.
        unnamed: names of tensors that are in a weight file but not in the checkpoint's index.
    """

    directory: Path | None = None
    unnamed: frozenset[str] = frozenset()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns shape, stored dtype and location of every tensor, the same mapping at every call. Reads no values."""
        raise NotImplementedError

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context manager in which the files stay open."""
        yield

    def stored_name(self, name: str) -> str:
        """Returns the name that the tensor `name` has in the files.

        Several tensors can be parts of one stored tensor. They have the same stored name.
        """
        return name

    def read(self, name: str) -> Tensor:
        """Returns the tensor without a copy: a view of the mapped file (inside `open()`), or the module's parameter."""
        raise NotImplementedError

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`."""
        return self.read(name)[(rows, columns)[: len(self.infos()[name].shape)]]

    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format of the matrix `name`. None: it is not quantised."""
        return None

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns the quantised matrix `name` on a device, without dequantising it. None: it is not quantised."""
        return None

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Returns a range of rows and columns of the quantised matrix `name`. None: it is not quantised.

        Only the stored elements that contain the range are read. For the result see `Codes.part`.
        """
        return None

    def release(self, names: list[str]) -> None:
        """Frees the memory of these tensors in the source. The caller has copied them."""


class WrappedSource(TensorSource):
    """Source that forwards every call to another source. A subclass overrides the methods whose results it changes.

    Args:
        source: the wrapped source.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.directory, self.unnamed = source.directory, source.unnamed

    def _inner(self, name: str) -> str:
        """Returns the name that the tensor `name` has in the wrapped source."""
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
