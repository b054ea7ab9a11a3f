"""Finds a learned drafter and checks it against its target.

The drafter is a head in its own checkpoint, or the MTP layers in the target's checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.generation import CONFIG
from fastspec.models.checkpoints.gguf.tensors import find_gguf
from fastspec.models.checkpoints.hub import download, hub_gguf
from fastspec.models.checkpoints.resolve import check_before_download, load_tokenizer
from fastspec.models.checkpoints.safetensors_files import INDEX, SINGLE, ShardTensors, read_json
from fastspec.models.families import FAMILIES
from fastspec.models.heads.assistant_spec import AssistantSpec, assistant_spec
from fastspec.models.heads.checkpoint import (
    HeadCheckpoint,
    HeadTensors,
    check_head_tensors,
    conversion,
    naming,
    refuse_pickled,
    sizes_of,
    target_ids,
)
from fastspec.models.heads.config import check_verifier
from fastspec.models.heads.dflash2_spec import DFlash2Spec, dflash2_spec
from fastspec.models.heads.dflash_spec import dflash_spec
from fastspec.models.heads.dspark_spec import dspark_spec
from fastspec.models.heads.eagle3_spec import eagle3_spec, peagle_spec
from fastspec.models.heads.mtp_spec import MTP, mtp_source, mtp_spec
from fastspec.models.heads.some_rows import WithSomeRows, checked_ids, places_of, with_vocab
from fastspec.models.heads.spec import HeadKind, HeadSpec, Recognised, StoredHead, recognise, says_head
from fastspec.models.heads.weights import head_bytes
from fastspec.models.hosted.info import HostedInfo

SAMPLE: Final = """The water cycle describes how water moves between the oceans, the air and the land. Heat from the sun
turns water at the surface of the sea into vapour, which rises and cools. As it cools it condenses into small drops that
form clouds. When the drops become heavy enough, they fall as rain or snow. def mean(values): return sum(values) /
len(values). What is the capital of France? The capital of France is Paris, and the capital of Italy is Rome."""
READERS: Final[Mapping[HeadKind, Callable[[StoredHead], HeadSpec]]] = {
    "eagle3": eagle3_spec,
    "peagle": peagle_spec,
    "dflash": dflash_spec,
    "dflash2": dflash2_spec,
    "dspark": dspark_spec,
}


HeadFiles = tuple[Path, dict[str, Any], Recognised]
"""Local directory of a head, content of its `config.json`, and its type and layout."""


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """Local files of the user's `draft`, as `draft_files` found them.

    Attributes:
        head: directory, config and type of the draft head. None: the draft is not a head.
        fetched: local directory to which the files of a Hub id were downloaded, so that they are not downloaded again.
            None: the draft is not a Hub id.
    """

    head: HeadFiles | None = None
    fetched: Path | None = None


def draft_files(source: object, revision: str | None) -> DraftFiles:
    """Finds out if the user's `draft` is a learned drafter (head). Downloads its files if it is a Hub id.

    Args:
        source: the user's `draft`: a path, a Hub id, or any other object, which is not a head.
        revision: branch, tag or commit of a Hub id. None: the default branch.

    Raises:
        CheckpointError: a head whose weights cannot be read, or a Hub id that could not be downloaded.
        UnsupportedModel: a drafter of an unsupported type.
    """
    if not isinstance(source, str | os.PathLike):
        return DraftFiles()
    with naming("draft"):
        if find_gguf(source) is not None or hub_gguf(source) is not None:
            return DraftFiles()  # no head is a GGUF file
        directory = Path(os.path.abspath(os.path.expanduser(source)))
        if os.path.isdir(directory):
            # a local directory has no revision: `resolve` raises the error later
            return DraftFiles() if revision is not None else DraftFiles(_head_files(directory))
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
        """Refuses files that are neither a draft head nor a supported model, before the weights are downloaded."""
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
    vocab: Sequence[int] | None = None,
) -> HeadCheckpoint:
    """Makes the `HeadCheckpoint` of the draft head that `draft_files` has found, and checks it against its target.

    Allocates no memory for weights.

    Args:
        found: directory, config and type of the head.
        name: name of the head, for messages.
        target: checkpoint of the target.
        feature_layers: boundaries of the target whose hidden states the head reads, if the user chose them. Boundary b
            is the hidden state after b layers. None: those in the head's config.
        vocab: token ids that the head may draft, if the user chose them. None: all ids in its vocabulary.

    Raises:
        CheckpointError: the head is damaged, or was made for a target with other sizes.
        UnsupportedModel: a setting that is not implemented, or a target whose hidden states cannot be read.
        UnsupportedOption: `feature_layers` that the target does not have, or `vocab` for a head that has a reduced
            vocabulary of its own.
        ValueError: `vocab` is empty, or has an id twice, or an id that the target does not have.
    """
    directory, raw, kind = found
    sizes = sizes_of(target)
    reader = READERS.get(kind.kind)
    if reader is None and kind.kind != "assistant":
        raise UnsupportedModel(f"draft: {name}: an {kind} cannot be run yet; use an EAGLE-3 head, or a draft model")
    tensors = HeadTensors(directory)
    with naming(f"draft: {name}"):
        check_verifier(raw, sizes, _architectures(target))
        if reader is None:
            spec: HeadSpec = _assistant(kind, raw, tensors, target, feature_layers)
        else:
            spec = reader(StoredHead(kind, raw, tensors.infos(), sizes, feature_layers, directory / CONFIG))
        check_head_tensors(tensors, spec)
        ids = target_ids(tensors, spec)
        made = HeadCheckpoint(name, spec, directory, ids, _sample(target, spec), count=head_bytes)
        return made if vocab is None else _with_vocab(made, tensors, target, vocab)


def _assistant(
    found: Recognised, raw: Mapping[str, Any], tensors: HeadTensors, target: Checkpoint, asked: Sequence[int] | None
) -> HeadSpec:
    if asked is not None:
        raise UnsupportedOption(
            f"feature_layers={tuple(asked)!r} does not go with an assistant, which reads the last hidden state and "
            "keys; leave it out"
        )
    assert tensors.directory is not None, "it was found there"
    return assistant_spec(found, raw, tensors.infos(), target, tensors.directory / CONFIG)


def _architectures(target: Checkpoint) -> tuple[str, ...]:
    """Returns the names of a target's classes in transformers: first the class of the model itself.

    If the target is hosted as the text part of a larger model, the class of the larger model follows.
    """
    spec = target.spec
    if isinstance(spec, HostedInfo):
        return tuple(filter(None, (spec.kind.__name__, spec.whole)))
    return (FAMILIES[spec.family].architecture,)


def _with_vocab(head: HeadCheckpoint, own: HeadTensors, target: Checkpoint, vocab: Sequence[int]) -> HeadCheckpoint:
    """Returns the checkpoint of a draft head with a reduced vocabulary: it drafts only the ids in `vocab`.

    Args:
        head: the head with its whole vocabulary.
        own: stored tensors of the head.
        target: checkpoint of the target.
        vocab: ids of the target that the head may draft.

    Raises:
        UnsupportedOption: the head cannot have a reduced vocabulary, or has one already.
        ValueError: `vocab` is empty, or has an id twice, or an id that the target does not have.
    """
    if isinstance(head.spec, AssistantSpec):
        raise UnsupportedOption("draft_vocab does not go with an assistant, whose ids are in groups; leave it out")
    if head.vocab_map is not None:
        raise UnsupportedOption(
            f"draft_vocab: the head drafts {head.spec.vocab_size} of {head.spec.target.vocab_size} ids already, by its "
            "own table; leave it out"
        )
    ids = checked_ids(vocab, head.spec.target.vocab_size)
    spec = with_vocab(head.spec, ids)
    if isinstance(spec, DFlash2Spec) and spec.candidates > len(ids):
        raise UnsupportedOption(
            f"draft_vocab has {len(ids)} ids, but the head chooses among {spec.candidates} candidates; give at least "
            f"{spec.candidates} ids"
        )
    check_head_tensors(WithSomeRows(own, places_of(own, spec, target), ids), spec)
    return replace(head, spec=spec, vocab_map=ids, rows_of=target)


def resolve_mtp(
    target: Checkpoint,
    revision: str | None,
    asked: object,
    vocab: Sequence[int] | None = None,
) -> HeadCheckpoint:
    """Finds the MTP layers in a target's checkpoint, and makes a `HeadCheckpoint` of them. Allocates nothing.

    Args:
        target: checkpoint of the target.
        revision: the user's draft_revision, which must be None.
        asked: the user's feature_layers, which must be None.
        vocab: token ids that the layers may draft, if the user chose them. None: all.

    Raises:
        CheckpointError: the checkpoint has no MTP layer, or some of their tensors are missing.
        UnsupportedModel: the target is run by transformers' own module, or only its MTP layers have experts.
        UnsupportedOption: an option that an MTP layer does not support, or a live module as target.
        ValueError: `vocab` is empty, or has an id twice, or an id that the target does not have.
    """
    for name, value in (("draft_revision", revision), ("feature_layers", asked)):
        if value is not None:
            raise UnsupportedOption(
                f"{name}={value!r} does not go with draft='{MTP}', which is a layer of the target's checkpoint; leave "
                "it out"
            )
    if target.directory is None:
        what = "live module" if target.gguf is None else "GGUF file"
        raise UnsupportedOption(
            f"draft='{MTP}': {target.name} is a {what}, which does not have its checkpoint's MTP layers; pass its "
            "directory or Hub id as target"
        )
    with naming(f"draft='{MTP}'"):
        spec, ids = mtp_spec(target, target.directory), None
        if vocab is not None:
            ids = checked_ids(vocab, target.native.vocab_size)
            spec = with_vocab(spec, ids)
        found = HeadCheckpoint(
            f"the MTP {'layer' if spec.num_layers == 1 else 'layers'} of {target.name}",
            spec,
            target.directory,
            ids,
            (),
            source=target,
            count=head_bytes,
        )
        check_head_tensors(mtp_source(found), spec)
    return found


def _sample(target: Checkpoint, spec: HeadSpec) -> tuple[int, ...]:
    """Returns token ids of a short text, on which the possible meanings of a draft head's config are compared.

    Empty if there is only one meaning; see `HeadSpec.readings`.
    """
    if len(spec.readings) < 2:
        return ()
    tokenizer = load_tokenizer(target)
    ids = tokenizer(SAMPLE)["input_ids"] if tokenizer is not None else []
    known = tuple(each for each in ids if 0 <= each < spec.target.vocab_size)
    if len(known) >= 16:
        return known
    return tuple(index * 7919 % spec.target.vocab_size for index in range(64))  # any ids, because there is no tokenizer
