"""The training text: Python's standard library, cleaned, in training, validation and held-out files."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "encodings", "pydoc_data"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "testmock"})
LICENCE_WORDS = re.compile(r"copyright|licen[cs]e|permission is hereby|all rights reserved", re.IGNORECASE)

HELD_OUT_PER_MILLE = 30
VALIDATION_PER_MILLE = 20
TABLE_DIGIT_SHARE = 0.25
DUPLICATE_LINE_SHARE = 0.7
TELLING_LINE_LENGTH = 20


@dataclass(frozen=True, slots=True)
class Document:
    """One source file.

    Attributes:
        name: Path relative to the corpus root, with forward slashes. It alone decides the split.
        text: The file's text.
    """

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the file lies in a folder of tests."""
        return not TEST_FOLDERS.isdisjoint(PurePosixPath(self.name).parts[:-1])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents by use. No file of one list is a near copy of a file of another.

    Attributes:
        train: Documents the tokenizer and both models learn from.
        validation: Documents that choose which weights are kept.
        held_out: Documents seen only by the final measurement.
    """

    train: list[Document] = field(default_factory=list)
    validation: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)


def read_corpus(source: Path) -> Corpus:
    """Reads, cleans and splits the Python files of a folder or a tar archive.

    Args:
        source: A folder, searched recursively, or an archive that `tarfile` opens.

    Returns:
        The corpus, each part sorted by name.

    Raises:
        ValueError: A part of the corpus is empty.
    """
    corpus = split(read_files(source))
    if not (corpus.train and corpus.validation and corpus.held_out):
        raise ValueError(
            f"{source} gives {len(corpus.train)} training, {len(corpus.validation)} validation and "
            f"{len(corpus.held_out)} held-out files, and each must have at least one: "
            "name a folder or archive with some hundred Python files."
        )
    return corpus


def split(documents: Iterable[Document]) -> Corpus:
    """Cleans documents and splits them by their names; a part may be empty."""
    parts = Corpus()
    for document in sorted(documents, key=lambda document: document.name):
        cleaned = replace(document, text=strip_licence(document.text))
        if cleaned.text.strip() and not is_table(cleaned.text):
            _part_of(parts, cleaned.name).append(cleaned)
    return _without_near_copies(parts)


def strip_licence(text: str) -> str:
    """Drops the comment blocks at the top of a file that speak of copyright or a licence."""
    kept: list[str] = []
    rest = text
    while block := re.match(r"(?:[ \t]*\n)*(?:#[^\n]*(?:\n|$))+", rest):
        if not LICENCE_WORDS.search(block.group()):
            kept.append(block.group())
        rest = rest[block.end() :]
    return "".join(kept) + rest.lstrip("\n")


def is_table(text: str) -> bool:
    """Tells whether digits make up so much of the text that it is data rather than code."""
    dense = "".join(text.split())
    return sum(character.isdigit() for character in dense) > TABLE_DIGIT_SHARE * len(dense)


def read_files(source: Path, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Document]:
    """Reads the files of a folder or an archive whose names end so, decoded as UTF-8; others are left out."""
    pairs = _folder_files(source, suffixes) if source.is_dir() else _archive_files(source, suffixes)
    for name, content in pairs:
        if not SKIPPED_FOLDERS.isdisjoint(PurePosixPath(name).parts):
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # the library's own tests hold files in other or in broken encodings
            continue
        yield Document(name, text.replace("\r\n", "\n"))


def _folder_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.suffix in suffixes and path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _archive_files(archive: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith(suffixes):
                yield member.name.removeprefix("./"), content.read()


def _part_of(corpus: Corpus, name: str) -> list[Document]:
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000
    if bucket < HELD_OUT_PER_MILLE:
        return corpus.held_out
    return corpus.validation if bucket < HELD_OUT_PER_MILLE + VALIDATION_PER_MILLE else corpus.train


def _without_near_copies(corpus: Corpus) -> Corpus:
    # Held-out files come first: of two near copies on both sides of the split, training loses its own.
    seen: set[str] = set()
    held_out = list(_new_documents(corpus.held_out, seen))
    validation = list(_new_documents(corpus.validation, seen))
    return Corpus(list(_new_documents(corpus.train, seen)), validation, held_out)


def _new_documents(documents: Iterable[Document], seen: set[str]) -> Iterator[Document]:
    for document in documents:
        stripped = (line.strip() for line in document.text.splitlines())
        telling = {line for line in stripped if len(line) >= TELLING_LINE_LENGTH}
        if len(telling & seen) <= DUPLICATE_LINE_SHARE * len(telling):
            seen |= telling
            yield document
