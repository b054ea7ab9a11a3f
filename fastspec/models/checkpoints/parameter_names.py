"""Maps the stored names of tensors to the names of the model's parameters, by the rules of transformers.

A prefix may be missing or repeated, the LM head may be tied to the embedding, and tensors may be unused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.models.checkpoints.safetensors_files import INDEX
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES
from fastspec.models.layer_table import EMBED, HEAD, LAYER, tensor_shapes

PREFIX: Final = "model."
TEXT: Final = ("language_model.", "text_model.")
COMPARED_ROWS: Final = 4096  # rows of two matrices that are compared at a time


class RenamedTensors(WrappedSource):
    """Tensors of a source under other names.

    Args:
        source: the stored tensors.
        stored: new name -> stored name. Tensors that it does not name are left out.
        copies: new name -> stored names of further copies of the same tensor, which are released with it.
    """

    def __init__(
        self, source: TensorSource, stored: Mapping[str, str], copies: Mapping[str, list[str]] | None = None
    ) -> None:
        super().__init__(source)
        self._stored, self._copies = stored, copies or {}
        infos = source.infos()
        self._infos = {name: infos[inner] for name, inner in stored.items()}

    def _inner(self, name: str) -> str:
        return self._stored[name]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every tensor, by its new name."""
        return self._infos

    def release(self, names: list[str]) -> None:
        """Frees the memory of these tensors, and of their copies, in the source."""
        super().release(names)
        self._source.release([copy for name in names for copy in self._copies.get(name, ())])

    def check_copies(self, name: str) -> None:
        """Refuses a source in which two copies of one tensor have other values. `name` is its name, for messages.

        Raises:
            CheckpointError: names both tensors.
        """
        if not self._copies:
            return  # opens no file
        with self._source.open():
            for kept, copies in self._copies.items():
                for copy in copies:
                    first, other = self._source.read(self._stored[kept]), self._source.read(copy)
                    if first.data_ptr() != other.data_ptr() and not torch.equal(first, other):
                        raise CheckpointError(
                            f"{name}: {self._stored[kept]!r} and {copy!r} are one weight that layers share, and their "
                            "values differ; keep the first one"
                        )


class FlatTensors(WrappedSource):
    """Tensors of a source, some of which are flattened to vectors.

    Args:
        source: the tensors.
        flat: suffixes of the names of the tensors that are flattened. All axes of these except one have size 1.
    """

    def __init__(self, source: TensorSource, flat: tuple[str, ...]) -> None:
        super().__init__(source)
        self._infos = {
            name: replace(info, shape=(math.prod(info.shape),)) if name.endswith(flat) else info
            for name, info in source.infos().items()
        }

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every tensor, with the shape after flattening."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns the tensor `name`, with the shape that `infos` gives for it."""
        return self._source.read(name).reshape(self._infos[name].shape)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of elements of a flattened tensor, or a range of rows and columns of another tensor."""
        if self._infos[name].shape == self._source.infos()[name].shape:
            return self._source.read_part(name, rows, columns)
        return self.read(name)[rows]


class NamedTensors(RenamedTensors):
    """Tensors of a checkpoint directory, by the names of the model's parameters.

    A stored name may lack the prefix `model.`, have it twice, or have a prefix of a text part, such as
    `language_model.`. A tied embedding may be stored under the name of the output matrix (LM head).

    Args:
        source: the stored tensors.
        wanted: names of the model's parameters.
        tied: True if the config says that the output matrix is the embedding.

    Raises:
        CheckpointError: two stored tensors are the same parameter, or the index does not list a needed tensor.
    """

    def __init__(self, source: TensorSource, wanted: Collection[str], tied: bool) -> None:
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
                where = f"{source.directory}/{info.where}"
                raise CheckpointError(f"{where}: holds {stored!r}, which weight_map in {INDEX} does not name")
            names[name] = stored
        if tied and EMBED not in names and HEAD in names:
            names[EMBED] = names.pop(HEAD)
        super().__init__(source, names)

    def others(self) -> list[str]:
        """Returns the stored names of tensors that are not parameters of the model."""
        return self._others


def named(stored: TensorSource, spec: ModelSpec) -> NamedTensors:
    """Returns the stored tensors of a checkpoint by the names of the model's parameters, which follow from `spec`."""
    return NamedTensors(with_usual_names(stored, spec), tensor_shapes(spec).keys(), spec.tied)


def with_usual_names(source: TensorSource, spec: ModelSpec) -> TensorSource:
    """Returns a source whose tensors have the names and shapes of the table `layer_table.LAYER`.

    Some families store tensors under other names (`ModelFamily.renamed`), or vectors with additional axes of size 1
    (`ModelFamily.flat`). If a tensor is stored several times (`ModelFamily.located`), the first one counts.
    """
    flat = FAMILIES[spec.family].flat
    source = _renamed(source, spec)
    return FlatTensors(source, flat) if flat else source


def check_copies(source: TensorSource, spec: ModelSpec, name: str) -> None:
    """Refuses a source in which copies of a weight that layers share differ. For the error see `RenamedTensors`.

    Args:
        source: the stored tensors.
        spec: spec of the model.
        name: name of the checkpoint, for messages.
    """
    _renamed(source, spec).check_copies(name)


def _renamed(source: TensorSource, spec: ModelSpec) -> RenamedTensors:
    stored: dict[str, str] = {}
    copies: dict[str, list[str]] = {}
    for name in source.infos():
        usual = table_name(name, spec)
        if stored.setdefault(usual, name) != name:
            copies.setdefault(usual, []).append(name)
    return RenamedTensors(source, stored, copies)


def table_name(stored: str, spec: ModelSpec | None) -> str:
    """Returns the name that the table `layer_table.LAYER` gives a tensor. Prefixes stay as they are stored.

    Args:
        stored: the stored name. That of an expert's matrix is the one that `by_expert` gives it.
        spec: spec of the model, whose family may store tensors under other names. None: it stores none so.
    """
    if spec is None:
        return stored
    family = FAMILIES[spec.family]
    return family.located(spec.plans, usual_name(stored, family.renamed))


def with_found_names(spec: ModelSpec, source: TensorSource) -> ModelSpec:
    """Returns the spec with `own_names`: the names of `ModelFamily.other_names` that the source's tensors have.

    Args:
        spec: spec of the model.
        source: tensors of the model, by the names that `with_usual_names` gives them.
    """
    last = {name.rpartition("layers.")[2].partition(".")[2] for name in source.infos()}
    others = FAMILIES[spec.family].other_names
    leaves = {row.name: row.leaf for row in LAYER}
    own = tuple((row, names) for row, names in others.items() if f"{names[0]}{leaves[row]}" in last)
    return replace(spec, own_names=own) if own else spec


def usual_name(stored: str, renamed: Mapping[str, str]) -> str:
    """Replaces parts of a tensor's stored name by those that the table `layer_table.LAYER` uses.

    Args:
        stored: the stored name.
        renamed: part of a stored name -> usual part; see `ModelFamily.renamed`.
    """
    for part, usual in renamed.items():
        stored = stored.replace(part, usual)
    return stored


def parameter(stored: str, wanted: Collection[str]) -> str:
    """Returns the name of the model's parameter for a tensor's stored name. Prefixes may differ; see `NamedTensors`.

    Args:
        stored: the stored name.
        wanted: names of the model's parameters.

    Returns:
        A name in `wanted`. The stored name, if none fits.
    """
    text = stored.removeprefix(PREFIX)
    for part in TEXT:  # for models that contain other parts besides the text model
        text = text.removeprefix(part)
    while text.startswith(PREFIX + PREFIX):  # transformers 5.17 saves some models with the prefix twice
        text = text.removeprefix(PREFIX)
    for name in (stored.removeprefix(PREFIX), PREFIX + stored, text, PREFIX + text):
        if name in wanted:
            return name
    return stored


def parameter_of(stored: str, wanted: Collection[str], spec: ModelSpec | None) -> str:
    """Like `parameter`, but a family may store tensors under other names. For `spec` see `table_name`."""
    return parameter(table_name(stored, spec), wanted)


def has_own_head(source: TensorSource) -> bool:
    """True if an output matrix (LM head) is stored, and its values are not those of the embedding.

    The two are compared by value, also if their dtypes differ. Both are read up to the first difference. Their shapes
    must be equal.
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
