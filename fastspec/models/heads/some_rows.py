"""Reduced vocabulary of a learned drafter (head), chosen by the user: only some rows of its output matrix are loaded.

Source: FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.errors import UnsupportedOption
from fastspec.models.checkpoints.parameter_names import named
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.checkpoints.tensor_source import TensorInfo, WrappedSource
from fastspec.models.heads.spec import HeadSpec
from fastspec.models.layer_table import EMBED, HEAD

if TYPE_CHECKING:
    from fastspec.kernels.common.codes import Codes, CodesKind
    from fastspec.models.checkpoints.checkpoint import Checkpoint
    from fastspec.models.checkpoints.tensor_source import TensorSource

Spec = TypeVar("Spec", bound=HeadSpec)
Place = tuple["TensorSource", str]
"""Location of a tensor: a source, and the name of the tensor in it."""


class WithSomeRows(WrappedSource):
    """Tensors of a draft head. Some of them consist of chosen rows of other tensors.

    Args:
        own: tensors of the head.
        places: name of each tensor with chosen rows -> location of the tensor that has all rows. An entry is ignored if
            no tensor of this name is there, for example because it is quantised.
        ids: int64 [n], indices of the chosen rows.
    """

    def __init__(self, own: TensorSource, places: Mapping[str, Place], ids: Tensor) -> None:
        super().__init__(own)
        self._ids = ids
        self._places = {name: place for name, place in places.items() if place[1] in place[0].infos()}
        self._infos = dict(own.infos())
        for name, (source, stored) in self._places.items():
            whole = source.infos()[stored]
            self._infos[name] = replace(whole, shape=(len(ids), *whole.shape[1:]))

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of all tensors. A tensor with chosen rows has n rows."""
        return self._infos

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context manager in which the files of all sources stay open."""
        sources = {id(source): source for source in (self._source, *(place[0] for place in self._places.values()))}
        with ExitStack() as stack:
            for source in sources.values():
                stack.enter_context(source.open())
            yield

    def read(self, name: str) -> Tensor:
        """Returns the tensor `name`. A tensor with chosen rows is a copy."""
        if name not in self._places:
            return super().read(name)
        source, stored = self._places[name]
        return source.read(stored)[self._ids]

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`."""
        return self.read(name)[rows, columns] if name in self._places else super().read_part(name, rows, columns)

    @override
    def kind(self, name: str) -> CodesKind | None:
        return None if name in self._places else super().kind(name)

    @override
    def codes(self, name: str, device: torch.device) -> Codes | None:
        return None if name in self._places else super().codes(name, device)

    @override
    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        return None if name in self._places else super().codes_part(name, rows, columns, device)


def output_rows(target: Checkpoint) -> Place:
    """Returns the location of a target's output matrix, which is its embedding if the two are tied."""
    assert target.directory is not None, "checked before"
    model = named(ShardTensors(target.directory), target.native)
    return model, HEAD if HEAD in model.infos() else EMBED


def places_of(own: TensorSource, spec: HeadSpec, target: Checkpoint) -> dict[str, Place]:
    """Returns the locations of the matrices that have one row for each id that a draft head drafts, by name.

    Args:
        own: tensors of the head's checkpoint.
        spec: spec of the head, with the reduced vocabulary or without.
        target: checkpoint of the target, whose output matrix is used if the head has none.

    Raises:
        UnsupportedOption: the target's output matrix is needed, and the target is not a directory.
    """
    places = {name: (own, name) for name, use in spec.uses.items() if use == "head"}
    if HEAD in own.infos():
        return {**places, HEAD: (own, HEAD)}
    if spec.tied_head:
        return {**places, HEAD: (own, "embed_tokens.weight")}
    if target.directory is None or target.spec.hosting:
        raise UnsupportedOption(
            f"draft_vocab needs rows of the output matrix of {target.name}, because the head has none, and the target "
            "is hosted, or is not a directory of safetensors: leave it out, or pass the directory or Hub id as target"
        )
    return {**places, HEAD: output_rows(target)}


def with_vocab(spec: Spec, ids: Tensor) -> Spec:
    """Returns the spec of a draft head with a reduced vocabulary.

    Args:
        spec: spec of the head.
        ids: int64 [n], the target's ids that the head may draft.
    """
    count = len(ids)
    tensors = {**spec.tensors, HEAD: (count, spec.hidden_size)}
    for name, use in spec.uses.items():
        if use == "head":
            tensors[name] = (count, *spec.tensors[name][1:])
    decoder = replace(spec.decoder, vocab_size=count, tied=False)
    return replace(spec, decoder=decoder, tensors=tensors, own_head=True)


def checked_ids(vocab: Sequence[int], known: int) -> Tensor:
    """Checks the token ids that the user chose. Returns them in ascending order, int64 [n] on the CPU.

    Args:
        vocab: the user's ids.
        known: vocabulary size of the target.

    Raises:
        ValueError: there is no id, or an id twice, or one that the target does not have.
    """
    ids = sorted({each for each in vocab if type(each) is int and 0 <= each < known})
    if not ids or len(ids) != len(vocab):
        raise ValueError(
            f"draft_vocab has {len(vocab)} entries, of which {len(ids)} are different ids from 0 to {known - 1}; "
            "wanted different ids of the target, and one at least: frequent_ids() counts them"
        )
    return torch.tensor(ids, dtype=torch.int64, device="cpu")
