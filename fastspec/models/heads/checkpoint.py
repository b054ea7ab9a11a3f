"""A learned drafter on disk, checked against its target before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.generation import CONFIG
from fastspec.models.checkpoints.hub import download
from fastspec.models.checkpoints.resolve import Checkpoint, check_before_download, load_tokenizer
from fastspec.models.checkpoints.safetensors_files import INDEX, SINGLE, ShardTensors, TensorInfo, read_json
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES
from fastspec.models.heads.config import check_verifier
from fastspec.models.heads.dflash_spec import dflash_spec
from fastspec.models.heads.eagle3_spec import eagle3_spec
from fastspec.models.heads.recognise import HeadKind, Recognised, recognise, says_head
from fastspec.models.heads.spec import HeadSpec, TargetSizes
from fastspec.models.heads.tensors import HeadTensors, check_head_tensors, conversion, refuse_pickled, target_ids

if TYPE_CHECKING:
    from fastspec.kernels.common.codes import CodeFormat
    from fastspec.kernels.ops import Ops

SpecReader = Callable[
    [Recognised, Mapping[str, Any], Mapping[str, TensorInfo], TargetSizes, "Sequence[int] | None", Path], HeadSpec
]
SAMPLE: Final = """The water cycle describes how water moves between the oceans, the air and the land. Heat from the sun
turns water at the surface of the sea into vapour, which rises and cools. As it cools it condenses into small drops that
form clouds. When the drops become heavy enough, they fall as rain or snow. def mean(values): return sum(values) /
len(values). What is the capital of France? The capital of France is Paris, and the capital of Italy is Rome."""
READERS: Final[Mapping[HeadKind, SpecReader]] = {"eagle3": eagle3_spec, "dflash": dflash_spec}


@dataclass(frozen=True, slots=True, eq=False)
class HeadCheckpoint:
    """One head and where its weights lie; a `ModelSource`.

    Attributes:
        name: path or Hub id, for messages.
        spec: what it is.
        directory: local files.
        vocab_map: int64 [spec.vocab_size] on the CPU, the target's id of each id of the head; None: the same ids.
        sample: the target's ids of a short text, to try readings on.
        source: the target, where its own checkpoint holds the head; None: it lies alone.
        stored: what its matrices are rounded to while they are loaded, for people; empty: they are not.
        module: None, because heads are read from files.
        ranks: 1, because several processes do not share a head.
        mtp: False: a head holds no MTP layer for `draft="mtp"`.
        rounded: the format of `stored`; None: matrices stay as they are stored.
    """

    name: str
    spec: HeadSpec
    directory: Path
    vocab_map: Tensor | None
    sample: tuple[int, ...]
    source: Checkpoint | None = None
    stored: str = ""
    module: None = None
    ranks: int = 1
    mtp: bool = False
    rounded: CodeFormat | None = None

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Bytes that its weights take on a device, as these ops want them, with activations of `dtype`."""
        from fastspec.models.heads.weights import planned_head_bytes  # which needs what is defined here

        tables = 0 if self.vocab_map is None else 8 * (len(self.vocab_map) + self.spec.target.vocab_size)
        if self.rounded is None:
            return self.spec.weight_bytes(dtype) + tables
        return planned_head_bytes(self, dtype=dtype, device=device, ops=ops) + tables


HeadFiles = tuple[Path, dict[str, Any], Recognised]
"""Where a head's files lie, its config, and what it is."""


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """What a look at a draft has found.

    Attributes:
        head: its files, if it is a head.
        fetched: where the files of a Hub id lie, so that they are looked up once; None: it is no Hub id.
    """

    head: HeadFiles | None = None
    fetched: Path | None = None


def draft_files(source: object, revision: str | None) -> DraftFiles:
    """Looks whether a draft is a head.

    Args:
        source: what a user gave as draft. Of a Hub id the files are fetched.
        revision: of a Hub id.

    Raises:
        CheckpointError: it is a head whose weights cannot be read, or a Hub id that could not be downloaded.
        UnsupportedModel: it is a drafter of an unsupported kind.
    """
    if not isinstance(source, str | os.PathLike):
        return DraftFiles()
    with naming("draft"):
        directory = Path(os.path.abspath(os.path.expanduser(source)))
        if os.path.isdir(directory):
            return DraftFiles() if revision is not None else DraftFiles(_head_files(directory))  # `resolve` refuses it
        if not isinstance(source, str):
            return DraftFiles()
        fetched = _fetched(source, revision)
        return DraftFiles(_head_files(fetched), fetched)


def _head_files(directory: Path) -> HeadFiles | None:
    if not (directory / CONFIG).is_file():
        return None
    raw = read_json(directory / CONFIG)
    if says_head(raw):
        refuse_pickled(directory)
    if not any((directory / file).is_file() for file in (SINGLE, INDEX)):
        return None
    found = recognise(raw, ShardTensors(directory).infos().keys())
    return None if found is None else (directory, raw, found)


def _fetched(source: str, revision: str | None) -> Path:
    says: list[bool] = []

    def check(directory: Path) -> None:
        raw = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
        says.append(says_head(raw))
        if not says[-1]:
            check_before_download(directory)

    try:
        return download(source, revision, check)
    except CheckpointError as error:
        if says and says[-1] and SINGLE in str(error):
            raise CheckpointError(f"{error}. A .bin must be converted once: {conversion('DIRECTORY')}") from error
        raise


def resolve_head(
    found: HeadFiles,
    name: str,
    target: Checkpoint,
    feature_layers: Sequence[int] | None,
) -> HeadCheckpoint:
    """The head that `draft_files` has found, checked against its target; nothing is allocated.

    Args:
        found: as `draft_files` has it.
        name: for messages.
        target: what it is to draft for.
        feature_layers: the caller's own choice of boundaries; None: the config's.

    Raises:
        CheckpointError: it is damaged, or of a target with other sizes.
        UnsupportedModel: a setting that is not implemented, or a target whose hidden states cannot be read.
        UnsupportedOption: `feature_layers` that the target does not have.
    """
    directory, raw, kind = found
    sizes = sizes_of(target)
    reader = READERS.get(kind.kind)
    if reader is None:
        raise UnsupportedModel(f"draft: {name}: an {kind} cannot be run yet; use an EAGLE-3 head, or a draft model")
    tensors = HeadTensors(directory)
    with naming(f"draft: {name}"):
        check_verifier(raw, sizes, FAMILIES[target.native.family].architecture)
        spec = reader(kind, raw, tensors.infos(), sizes, feature_layers, directory / CONFIG)
        check_head_tensors(tensors, spec)
        return HeadCheckpoint(name, spec, directory, target_ids(tensors, spec), _sample(target, spec))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds to an error what it is about, in front of the reason."""
    try:
        yield
    except (CheckpointError, UnsupportedModel, UnsupportedOption) as error:
        raise type(error)(f"{what}: {error}") from error


def sizes_of(target: Checkpoint) -> TargetSizes:
    """What a head must know of its target.

    Raises:
        UnsupportedModel: the target is hosted, so that its layers' hidden states are not ours to read.
    """
    spec = target.spec
    if not isinstance(spec, ModelSpec):
        raise UnsupportedModel(
            f"a learned drafter reads hidden states of its target's layers, and {target.name} is hosted: use a draft "
            "model, or a target of a native family"
        )
    return TargetSizes(
        name=target.name,
        layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_length=spec.max_length,
        dtype=spec.dtype,
        embed_scale=spec.scales.embed,
    )


def _sample(target: Checkpoint, spec: HeadSpec) -> tuple[int, ...]:
    """Ids of a short text, where there is something to try on it."""
    if len(spec.readings) < 2:
        return ()
    tokenizer = load_tokenizer(target)
    ids = tokenizer(SAMPLE)["input_ids"] if tokenizer is not None else []
    known = tuple(each for each in ids if 0 <= each < spec.target.vocab_size)
    if len(known) >= 16:
        return known
    return tuple(index * 7919 % spec.target.vocab_size for index in range(64))  # without a tokenizer any text will do
