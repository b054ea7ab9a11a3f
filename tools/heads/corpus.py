"""The texts a head learns from: files of a folder, an archive or one file, split into training and held-out ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_pair.corpus import Document, read_files, split

SUFFIXES = (".py", ".txt", ".md")


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts by use. A text's name alone decides where it goes.

    Attributes:
        train: What the head learns from.
        held_out: What acceptance is measured on.
    """

    train: list[str]
    held_out: list[str]


def read_texts(source: Path) -> Texts:
    """Reads a corpus.

    Args:
        source: A folder or a tar archive of .py, .txt and .md files; or one .jsonl file with a "text" in each line;
            or one text file, whose paragraphs (parted by empty lines) are the texts.

    Raises:
        ValueError: Nothing is left to learn from, or nothing is held out.
    """
    if source.is_file() and source.suffix in (".jsonl", *SUFFIXES):
        content = source.read_text(encoding="utf-8")
        found = _lines(content) if source.suffix == ".jsonl" else content.split("\n\n")
        corpus = split(Document(str(index), text) for index, text in enumerate(found))
    else:
        corpus = split(read_files(source, SUFFIXES))
    train, held_out = corpus.train + corpus.validation, corpus.held_out
    if not (train and held_out):
        raise ValueError(
            f"{source} gives {len(train)} training and {len(held_out)} held-out texts, and each must have at least "
            "one: name a corpus of some hundred texts."
        )
    return Texts([document.text for document in train], [document.text for document in held_out])


def cut_prompts(documents: Sequence[Tensor], count: int, length: int, generator: torch.Generator) -> Tensor:
    """Takes pieces of one length from random places of encoded documents, longer documents more often.

    Returns:
        int64 [count, length].

    Raises:
        ValueError: No document is that long.
    """
    long_enough = [document for document in documents if len(document) >= length]
    if not long_enough:
        longest = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"No text of the corpus has {length} tokens, the longest has {longest}: give longer texts, or ask for "
            "shorter rows (--own-length, --real-length)."
        )
    places = torch.tensor([float(len(document) - length + 1) for document in long_enough])
    picked = torch.multinomial(places, count, replacement=True, generator=generator).tolist()
    starts = [int(torch.randint(len(long_enough[index]) - length + 1, (), generator=generator)) for index in picked]
    return torch.stack([long_enough[index][at : at + length] for index, at in zip(picked, starts, strict=True)])


def _lines(content: str) -> Iterable[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
                raise ValueError(f'Line {number} of the corpus has no "text": wanted {{"text": "..."}} in each line.')
            yield entry["text"]
