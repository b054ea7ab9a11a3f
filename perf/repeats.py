"""Acceptance of lookup where files are written again with edits: `python -m perf repeats --package NAME OLD NEW`.

pip fetches both versions of a package from PyPI. Each Python file that differs is a text to write, and its old version
is known: as prediction or corpus of `Suffix`, or in the prompt, also for `NGram` and transformers' prompt lookup. No
model runs. The text is given, so a draft is accepted where it is right: an upper bound for a model that would write
this text.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from fastspec import NGram, Suffix, demo_pair
from fastspec.kernels.ops import Ops
from fastspec.state import DecodeState
from perf.records import Row

COLUMNS = ("bench", "workload", "drafter", "k", "files", "tokens", "edited", "tokens_per_step", "acceptance",
           "edits", "resumed_within_8", "resumed_at_most")  # fmt: skip
LONGEST = 2048  # tokens of a file that are read
SOON = 8
COPIED = 8  # tokens behind an edit that are the old file's again, at least
Drafter: TypeAlias = Callable[[list[int], list[int], int], list[int]]  # (old file, text so far, k) -> drafts
Pair: TypeAlias = tuple[list[int], list[int]]  # token ids of the old and of the new file


@dataclass(slots=True)
class Replay:
    """Counts of the replay of some texts.

    Attributes:
        steps, emitted, drafted, accepted: of all steps.
        resumed: for each edit, the tokens behind its end that were written before a draft was accepted.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    resumed: list[int] = field(default_factory=list)


def ends_of_edits(old: list[int], new: list[int]) -> list[tuple[int, int]]:
    """The tokens of `new` behind each edit that are the old file's again: first place, and number of them.

    Edits with fewer than `COPIED` old tokens between them are one.
    """
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [(block.b, block.size) for block in blocks if block.size >= COPIED and block.a + block.b > 0]


def replay(found: Replay, pair: Pair, edits: Sequence[tuple[int, int]], k: int, drafter: Drafter) -> None:
    """Writes the new file of a pair step by step, and counts. `edits` is the result of `ends_of_edits`."""
    old, new = pair
    done, right = 0, [False] * len(new)
    while done < len(new):
        drafts = drafter(old, new[:done], min(k, len(new) - done - 1))
        accepted = next((j for j, draft in enumerate(drafts) if draft != new[done + j]), len(drafts))
        right[done : done + accepted] = [True] * accepted
        found.steps += 1
        found.emitted += accepted + 1
        found.drafted += len(drafts)
        found.accepted += accepted
        done += accepted + 1
    found.resumed += [[*right[start : start + size], True].index(True) for start, size in edits]


def of_suffix(k: int, source: str) -> Drafter:
    """`Suffix` with the old file as its `source`: "prediction", "corpus" or "prompt".

    A prompt of one token that is in no file begins each row.
    """
    room = {"prediction": {"prediction_tokens": LONGEST}, "corpus": {"corpus_tokens": LONGEST}}.get(source, {})
    sizes: dict[str, Any] = {"prediction_tokens": 0, **room}
    lookup = Suffix(**sizes).on(torch.device("cpu"), Ops())
    state = DecodeState.allocate(
        batch=1, max_drafts=k, max_length=2 * LONGEST + 1, pages_per_row=1, vocab_size=1, device=torch.device("cpu"),
        prediction_tokens=lookup.prediction_tokens,
    )  # fmt: skip
    state.tokens[0, 0] = -1
    read: list[list[int]] = [[]]

    def begin(old: list[int]) -> None:
        read[0] = old
        state.prompt_lengths.fill_(1)
        if source == "prediction":
            state.prediction[0, : len(old)] = torch.tensor(old)
            state.prediction_lengths.fill_(len(old))
        elif source == "corpus":
            lookup.add_corpus("old", old)
        else:
            state.tokens[0, 1 : len(old) + 1] = torch.tensor(old)
            state.prompt_lengths.fill_(1 + len(old))

    def draft(old: list[int], text: list[int], most: int) -> list[int]:
        if old is not read[0]:
            begin(old)
        start = int(state.prompt_lengths)
        state.tokens[0, start : start + len(text)] = torch.tensor(text, dtype=torch.int64)
        state.lengths.fill_(start + len(text))
        drafts, counts = lookup.look_up(state, k)
        found: list[int] = drafts[0, : int(counts)].tolist()
        return found[:most]

    return draft


def in_the_prompt(k: int) -> Drafter:
    """`NGram` with the old file as prompt."""
    lookup = NGram()

    def draft(old: list[int], text: list[int], most: int) -> list[int]:
        row = torch.tensor([[*old, *text, 0]])
        drafts, counts = lookup.guess(row, torch.tensor([len(old) + len(text)]), k)
        found: list[int] = drafts[0, : int(counts)].tolist()
        return found[:most]

    return draft


def of_transformers(k: int) -> Drafter:
    """transformers' prompt lookup, with its default of n-grams up to 2 tokens, and the old file as prompt."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=k, max_length=3 * LONGEST)

    def draft(old: list[int], text: list[int], most: int) -> list[int]:
        row = cast("torch.LongTensor", torch.tensor([[*old, *text]]))
        found: list[int] = generator.get_candidates(row)[0][0, row.shape[1] :].tolist()
        return found[:most]

    return draft


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "Suffix, old file as prediction": partial(of_suffix, source="prediction"),
    "Suffix, old file in the prompt": partial(of_suffix, source="prompt"),
    "Suffix, old file as corpus": partial(of_suffix, source="corpus"),
    "NGram, old file in the prompt": in_the_prompt,
    "transformers' prompt lookup": of_transformers,
}


def pairs_of(old: Path, new: Path) -> list[tuple[str, str]]:
    """Texts of the Python files that both folders have, and that differ."""
    names = sorted(path.relative_to(new) for path in new.rglob("*.py") if (old / path.relative_to(new)).is_file())
    texts = [((old / name).read_text(encoding="utf-8"), (new / name).read_text(encoding="utf-8")) for name in names]
    return [(before, after) for before, after in texts if before != after and before and after]


def edited_lines(pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the lines of the new texts that are not in the old ones, in order."""
    lines = [(old.splitlines(), new.splitlines()) for old, new in pairs]
    kept = sum(block.size for pair in lines for block in SequenceMatcher(None, *pair).get_matching_blocks())
    return round(1 - kept / sum(len(new) for _, new in lines), 4)


def rows_of(pairs: Sequence[Pair], ks: Sequence[int], workload: str) -> Iterator[Row]:
    """A row for each k and drafter."""
    tokens, edits = sum(len(new) for _, new in pairs), [ends_of_edits(*pair) for pair in pairs]
    for k in ks:
        for name, make in DRAFTERS.items():
            found, drafter = Replay(), make(k)
            for pair, ends in zip(pairs, edits, strict=True):
                replay(found, pair, ends, k, drafter)
            yield {
                "bench": "repeats",
                "workload": workload,
                "drafter": name,
                "k": k,
                "files": len(pairs),
                "tokens": tokens,
                "tokens_per_step": round(found.emitted / found.steps, 3),
                "acceptance": round(found.accepted / max(1, found.drafted), 4),
                "edits": len(found.resumed),
                "resumed_within_8": round(sum(each <= SOON for each in found.resumed) / max(1, len(found.resumed)), 4),
                "resumed_at_most": max(found.resumed, default=0),
            }


def fetched(name: str, version: str, folder: Path) -> Path:
    """A folder with one version of a package, which pip gets without the packages that it needs."""
    found = folder / f"{name}-{version}"
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(found)]
    subprocess.run([*line, f"{name}=={version}"], check=True)
    return found


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf repeats`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--package", nargs=3, action="append", default=[], metavar=("NAME", "OLD", "NEW"),
                      help="two versions of a package of PyPI; may be repeated")  # fmt: skip
    made.add_argument("--old", type=Path, help="instead of --package: a folder with an old version")
    made.add_argument("--new", type=Path, help="folder with its new version")
    made.add_argument("--name", help="of both folders, for the record")
    made.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; default: the shipped pair's")
    made.add_argument("--k", type=int, nargs="+", default=[4, 8, 16])


def command_repeats(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Lookup where files are written again with edits, by replay without a model."""
    if bool(given.package) == bool(given.old and given.new and given.name):
        raise SystemExit("wanted --package NAME OLD NEW, or --old DIR --new DIR --name NAME")
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer or demo_pair()[0])
    words = f"tokenizer of {given.tokenizer.name if given.tokenizer else 'the shipped pair'}"
    with TemporaryDirectory() as temporary:
        folders = [
            (f"{name} {old} to {new}", fetched(name, old, Path(temporary)), fetched(name, new, Path(temporary)))
            for name, old, new in given.package
        ]
        for name, old, new in folders or [(given.name, given.old, given.new)]:
            texts = pairs_of(old, new)
            read = [[tokenizer(text)["input_ids"][:LONGEST] for text in pair] for pair in texts]
            pairs = [(before, after) for before, after in read if before != after]
            if not pairs:
                raise SystemExit(f"{name}: no Python file of both versions differs in its first {LONGEST} tokens")
            for row in rows_of(pairs, given.k, f"{name}, first {LONGEST} tokens of each changed file, {words}"):
                yield [row | {"edited": edited_lines(texts)}]
