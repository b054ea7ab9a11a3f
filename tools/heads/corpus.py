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
TEXT, PROMPT = "text", "prompt"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts by use. A text's name alone decides where it goes.

    Attributes:
        train: What the head learns from.
        held_out: What acceptance is measured on.
        prompts: True if the texts are messages of users, which the target answers.
    """

    train: list[str]
    held_out: list[str]
    prompts: bool = False


def read_texts(source: Path) -> Texts:
    """Reads a corpus.

    Args:
        source: A folder or a tar archive of .py, .txt and .md files; or one .jsonl file with a "text" in each line, or
            with a "prompt" in each line; or one text file, whose paragraphs (parted by empty lines) are the texts.

    Raises:
        ValueError: Nothing is left to learn from, or nothing is held out.
    """
    prompts = False
    if source.is_file() and source.suffix in (".jsonl", *SUFFIXES):
        content = source.read_text(encoding="utf-8")
        prompts = source.suffix == ".jsonl" and _has_prompts(content)
        found = _lines(content, PROMPT if prompts else TEXT) if source.suffix == ".jsonl" else content.split("\n\n")
        corpus = split(Document(str(index), text) for index, text in enumerate(found))
    else:
        corpus = split(read_files(source, SUFFIXES))
    train, held_out = corpus.train + corpus.validation, corpus.held_out
    if not (train and held_out):
        raise ValueError(
            f"{source} gives {len(train)} training and {len(held_out)} held-out texts, and each must have at least "
            "one: name a corpus of some hundred texts."
        )
    return Texts([document.text for document in train], [document.text for document in held_out], prompts)


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


def last_tokens(documents: Sequence[Tensor], count: int, length: int) -> Tensor:
    """Takes the last `length` tokens of the first `count` documents that have so many: int64 [count or less, length].

    Raises:
        ValueError: no document is that long.
    """
    found = [document[-length:] for document in documents if len(document) >= length][:count]
    if not found:
        raise ValueError(f"No held-out prompt has {length} tokens: ask for fewer with --prompt-length.")
    return torch.stack(found)


def _has_prompts(content: str) -> bool:
    """True if the first line has a "prompt"."""
    first = next((line for line in content.splitlines() if line.strip()), "{}")
    entry = json.loads(first)
    return isinstance(entry, dict) and PROMPT in entry


def _lines(content: str, name: str) -> Iterable[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get(name), str):
                raise ValueError(
                    f'Line {number} of the corpus has no "{name}": wanted {{"{name}": "..."}} in each line.'
                )
            yield entry[name]
