"""Acceptance of lookup where files are written again with edits: `python -m perf repeats --old DIR --new DIR`.

Each Python file of the new version that differs from the old one is a text to write, and the old file is known: as
prediction of `Suffix`, or as prompt of `NGram` and of transformers' prompt lookup. No model runs. The text is given, so
a draft is accepted where it is right: an upper bound for a model that would write this text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import TypeAlias, cast

import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from fastspec import NGram, Suffix, demo_pair
from fastspec.state import DecodeState
from perf.records import Row

COLUMNS = ("bench", "workload", "drafter", "k", "files", "tokens", "edited", "tokens_per_step", "acceptance",
           "breaks", "resumed_within_8", "resumed_at_most")  # fmt: skip
LONGEST = 2048  # tokens of a file that are read
SOON = 8
Drafter: TypeAlias = Callable[[list[int], list[int], int], list[int]]  # (old file, text so far, k) -> drafts


@dataclass(slots=True)
class Replay:
    """Counts of the replay of some texts.

    Attributes:
        steps, emitted, drafted, accepted: of all steps.
        resumed: for each step with a wrong draft, the tokens from the wrong one on until a draft was accepted again.
    """

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    resumed: list[int] = field(default_factory=list)


def replay(found: Replay, old: list[int], new: list[int], k: int, drafter: Drafter) -> None:
    """Writes `new` step by step, and counts."""
    done, broken = 0, None
    while done < len(new):
        drafts = drafter(old, new[:done], min(k, len(new) - done - 1))
        accepted = next((j for j, draft in enumerate(drafts) if draft != new[done + j]), len(drafts))
        if accepted and broken is not None:
            found.resumed.append(done - broken)
            broken = None
        if accepted < len(drafts) and broken is None:
            broken = done + accepted
        found.steps += 1
        found.emitted += accepted + 1
        found.drafted += len(drafts)
        found.accepted += accepted
        done += accepted + 1


def by_prediction(k: int) -> Drafter:
    """`Suffix` with the old file as prediction, behind a prompt of one token that is in no file."""
    lookup = Suffix(prediction_tokens=LONGEST)
    state = DecodeState.allocate(
        batch=1, max_drafts=k, max_length=LONGEST + 1, pages_per_row=1, vocab_size=1, device=torch.device("cpu"),
        prediction_tokens=LONGEST,
    )  # fmt: skip
    state.prompt_lengths.fill_(1)
    state.tokens[0, 0] = -1

    def draft(old: list[int], text: list[int], most: int) -> list[int]:
        state.prediction[0, : len(old)] = torch.tensor(old)
        state.prediction_lengths.fill_(len(old))
        if text:
            state.tokens[0, 1 : len(text) + 1] = torch.tensor(text)
        state.lengths.fill_(len(text) + 1)
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
    "Suffix, old file as prediction": by_prediction,
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


def rows_of(pairs: Sequence[tuple[list[int], list[int]]], ks: Sequence[int], workload: str) -> Iterator[Row]:
    """A row for each k and drafter."""
    tokens = sum(len(new) for _, new in pairs)
    for k in ks:
        for name, make in DRAFTERS.items():
            found, drafter = Replay(), make(k)
            for old, new in pairs:
                replay(found, old, new, k, drafter)
            resumed = sorted(found.resumed)
            yield {
                "bench": "repeats",
                "workload": workload,
                "drafter": name,
                "k": k,
                "files": len(pairs),
                "tokens": tokens,
                "tokens_per_step": round(found.emitted / found.steps, 3),
                "acceptance": round(found.accepted / max(1, found.drafted), 4),
                "breaks": len(resumed),
                "resumed_within_8": round(sum(each <= SOON for each in resumed) / max(1, len(resumed)), 4),
                "resumed_at_most": resumed[-1] if resumed else 0,
            }


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf repeats`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--old", type=Path, required=True, help="folder of the package's old version")
    made.add_argument("--new", type=Path, required=True, help="folder of its new version")
    made.add_argument("--name", required=True, help="of the package and its versions, for the record")
    made.add_argument("--k", type=int, nargs="+", default=[4, 8, 16])


def command_repeats(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Lookup where files are written again with edits, by replay without a model."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair()[0])
    pairs = [
        (tokenizer(old)["input_ids"][:LONGEST], tokenizer(new)["input_ids"][:LONGEST])
        for old, new in pairs_of(given.old, given.new)
    ]
    pairs = [(old, new) for old, new in pairs if old != new]
    changed = edited_lines(pairs_of(given.old, given.new))
    if not pairs:
        raise SystemExit("--old and --new have no Python file of the same name that differs")
    workload = f"{given.name}, first {LONGEST} tokens of each changed file, tokenizer of the shipped pair"
    for row in rows_of(pairs, given.k, workload):
        yield [row | {"edited": changed}]
