"""Suffix: drafts from texts that a row is likely to repeat, found on the device inside the step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from hashlib import blake2b
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.proposers.ngram import NGram
from fastspec.proposers.texts import TextIndex, rungs_between
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState

SHARED = 0  # owner of corpora, and of answers that may draft for every request
NOBODY = -1
GAP = 8  # tokens after a difference within which a prediction is followed again
_ANCHOR = 3  # tokens before a difference that must match
_SURE = 4  # tokens that must match at another place than the expected one
_PER_MATCHED = 2  # drafts at most for each token that matches; of SuffixDecoding (Oliaro et al., arXiv:2411.04975)
_CAPACITY = 2**24

Remember = Literal["prompt", "session", "all"]


class Suffix(NGram):
    """Drafts what followed a row's last tokens in the row, in its prediction, in corpora, and in earlier answers.

    Each source is searched for the longest match of max_n down to min_n tokens. The prediction drafts unless another
    match is longer than twice its match and k more tokens. Of the other sources the one with the longest match drafts,
    at most 2 tokens for each that matches. Of equally long matches in corpora and earlier answers the majority decides,
    see `TextIndex.look_up`.

    A prediction is followed from its beginning. Behind a difference it is followed again where the last tokens match,
    or else where the text would be if each token had replaced one.

    Args:
        min_n, max_n: see `NGram`.
        prediction_tokens: tokens of a prediction at most; 0: calls have no `predictions`.
        corpus_tokens: tokens of all corpora together at most; 0: there are none.
        remember: requests that an earlier answer drafts for: those with the same prompt, those with the same
            `session`, or all. None: answers are forgotten.
        remembered_tokens: tokens of earlier answers that are kept; the oldest are forgotten first.

    Raises:
        ValueError: a number out of range, or another `remember`.
    """

    def __init__(
        self,
        min_n: int = 2,
        max_n: int = 16,
        *,
        prediction_tokens: int = 4096,
        corpus_tokens: int = 0,
        remember: Remember | None = None,
        remembered_tokens: int = 16384,
    ) -> None:
        super().__init__(min_n, max_n)
        if remember not in (None, "prompt", "session", "all"):
            raise ValueError(f"remember must be 'prompt', 'session', 'all' or None, got {remember!r}")
        sizes = {"prediction_tokens": prediction_tokens, "corpus_tokens": corpus_tokens}
        for name, size in {**sizes, "remembered_tokens": remembered_tokens}.items():
            least = 0 if name in sizes else 2
            if type(size) is not int or not least <= size <= _CAPACITY:
                raise ValueError(f"{name} must be a whole number from {least} to {_CAPACITY}, got {size!r}")
        self.prediction_tokens, self.corpus_tokens, self.remember = prediction_tokens, corpus_tokens, remember
        self.remembered_tokens = remembered_tokens if remember else 0
        self._corpus: TextIndex | None = None
        self._answers: TextIndex | None = None
        self._corpora: dict[str, list[int]] = {}
        self._next, self._texts = 0, 0

    def __repr__(self) -> str:
        """The arguments, which ranks compare."""
        sizes = f"prediction_tokens={self.prediction_tokens}, corpus_tokens={self.corpus_tokens}"
        kept = f"remember={self.remember!r}, remembered_tokens={self.remembered_tokens}"
        return f"Suffix(min_n={self.min_n}, max_n={self.max_n}, {sizes}, {kept})"

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        more = ["its prediction"] * bool(self.prediction_tokens) + ["corpora"] * bool(self.corpus_tokens)
        more += [f"earlier answers ({self.remember})"] if self.remember else []
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in {', '.join(['the row itself', *more])}"

    @property
    def nbytes(self) -> int:
        """Bytes of the texts and their tables on the device."""
        rungs = rungs_between(self.min_n, self.max_n)
        return sum(TextIndex.nbytes(size, rungs) for size in (self.corpus_tokens, self.remembered_tokens))

    def on(self, device: torch.device) -> Suffix:
        """Returns a copy with empty tables on a device, for one generator."""
        made, rungs = copy(self), rungs_between(self.min_n, self.max_n)
        made._corpora = {}
        made._corpus = TextIndex(self.corpus_tokens, rungs, device) if self.corpus_tokens else None
        made._answers = TextIndex(self.remembered_tokens, rungs, device) if self.remember else None
        return made

    def add_corpus(self, name: str, tokens: Sequence[int]) -> None:
        """Adds a text, or replaces the one of that name.

        Raises:
            ValueError: there is no room for it; the corpora stay as they are.
        """
        corpora = {**self._corpora, name: list(tokens)}
        if (total := sum(map(len, corpora.values()))) > self.corpus_tokens:
            raise ValueError(
                f"the corpora would have {total} tokens, and there is room for {self.corpus_tokens}; remove one, or "
                "make the generator with a larger Suffix(corpus_tokens=...)"
            )
        self._rewrite(corpora)

    def remove_corpus(self, name: str) -> None:
        """Forgets the corpus of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._corpora:
            raise ValueError(f"there is no corpus {name!r}; there are {sorted(self._corpora)}")
        self._rewrite({other: tokens for other, tokens in self._corpora.items() if other != name})

    def _rewrite(self, corpora: dict[str, list[int]]) -> None:
        assert self._corpus is not None, "there is room"
        start = 0
        self._corpus.erase(0, self.corpus_tokens)
        for number, tokens in enumerate(corpora.values()):
            self._corpus.write(start, tokens, number, SHARED)
            start += len(tokens)
        self._corpus.sort()
        self._corpora = corpora

    def owner_of(self, prompt: Sequence[int], session: str | None) -> int:
        """Returns the owner whose answers may draft for a request, and of its own answer; NOBODY for none."""
        if self.remember is None or (self.remember == "session" and session is None):
            return NOBODY
        if self.remember == "all":
            return SHARED
        data = cast("str", session).encode() if self.remember == "session" else repr(list(prompt)).encode()
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1 | 1

    def remember_answer(self, prompt: Sequence[int], answer: Sequence[int], session: str | None) -> None:
        """Keeps an answer, with the prompt's last tokens before it; forgets the oldest tokens where it needs room."""
        owner = self.owner_of(prompt, session)
        if self._answers is None or owner == NOBODY or not answer:
            return
        text = [*prompt[-self.max_n :], *answer][-self.remembered_tokens :]
        if self._next + len(text) > self.remembered_tokens:
            self._answers.erase(self._next, self.remembered_tokens)
            self._next = 0
        self._answers.write(self._next, text, self._texts, owner)
        self._next, self._texts = self._next + len(text), self._texts + 1
        self._answers.sort()

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Writes the drafts of `look_up`; see `Proposer.propose`."""
        drafts, counts = self.look_up(state, shape.num_drafts)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """k drafts for each row with a match, from its best source; see `DeterministicProposer.guess`."""
        tokens, lengths = state.tokens, state.lengths
        start, run = self._match(tokens, lengths)
        found = [(self._copied(tokens, lengths, start, k), torch.full_like(run, k), run)]  # drafts, counts, strength
        if state.prediction.shape[1]:
            answered = lengths - state.prompt_lengths
            places = follow(
                state.prediction, state.prediction_lengths, tokens, lengths, answered, self.min_n, self.max_n
            )
            found.insert(0, _from_prediction(state.prediction, state.prediction_lengths, places, k))
        back = lengths[:, None] - 1 - torch.arange(self.max_n, device=tokens.device)
        recent, known = tokens.gather(1, back.clamp_min(0)), back >= 0
        if self._answers is not None:
            found.append(self._answers.look_up(recent, known, state.owners, k))
        if self._corpus is not None:
            found.append(self._corpus.look_up(recent, known, torch.full_like(lengths, SHARED), k))
        strengths = torch.stack([each[2] for each in found], dim=1)
        order = torch.arange(len(found), 0, -1, device=tokens.device)  # the first of equally strong ones
        best = (strengths * (len(found) + 1) + order).argmax(dim=1)[:, None]
        drafts = torch.stack([each[0] for each in found], dim=1).gather(1, best[..., None].expand(-1, 1, k))[:, 0]
        counts = torch.stack([each[1] for each in found], dim=1).gather(1, best)[:, 0]
        return drafts, torch.minimum(counts, strengths.gather(1, best)[:, 0] * _PER_MATCHED).clamp(max=k)


def _from_prediction(
    prediction: Tensor, lengths: Tensor, places: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts from `places` of the predictions on: (drafts, counts, strength), a strength of at least k where one is."""
    place, matched = places
    at = place[:, None] + torch.arange(k, device=place.device)
    drafts = prediction.gather(1, at.clamp(max=prediction.shape[1] - 1))
    counts = torch.where(matched > 0, (lengths - place).clamp(0, k), 0)
    return drafts, counts, torch.where(counts > 0, (2 * matched).clamp_min(2) + k, 0)


def follow(
    prediction: Tensor, predicted: Tensor, tokens: Tensor, lengths: Tensor, answered: Tensor, min_n: int, max_n: int
) -> tuple[Tensor, Tensor]:
    """Finds the place in each row's prediction that its text has come to.

    1. An anchor: the place before the last 1 to `GAP` tokens where the longest match of at least 3 tokens ends, or the
       beginning in an answer of at most `GAP` tokens. The expected place is as many tokens behind the anchor as the row
       has. Without an anchor the expected place is the number of tokens of the answer.
    2. The longest match of the last tokens wins if it has at least 4 tokens, or at least min_n where there is no
       anchor, or at least 1 within `GAP` places of what the anchor lets expect. The nearest to the expected place wins
       among equally long ones.
    3. Without one the expected place of the anchor is taken.

    Args:
        prediction: int64 [B, R].
        predicted: int64 [B], tokens of each prediction; 0: none.
        tokens: int64 [B, T].
        lengths: int64 [B].
        answered: int64 [B], new tokens of the row.
        min_n, max_n: see `Suffix`.

    Returns:
        (place int64 [B] of the next token, matched int64 [B]: tokens that match there, at least 1; 0 for no place).
    """
    rows, room = prediction.shape
    place = torch.arange(room, device=prediction.device)
    before = pad(prediction, (1, 0))[:, :room]
    inside = (place >= 1) & (place < predicted[:, None])
    run, runs = torch.zeros_like(prediction), []
    for back in range(GAP + max_n, -1, -1):  # run[p]: tokens before p that equal the row's, without its last `back`
        at = lengths - 1 - back
        same = (before == tokens.gather(1, at.clamp_min(0)[:, None])) & inside & (at >= 0)[:, None]
        run = torch.where(same, pad(run, (1, 0))[:, :room] + 1, 0)
        if back <= GAP:
            runs.append(run.clamp(max=max_n))
    exact, gaps = runs[-1], torch.arange(GAP, 0, -1, device=place.device)
    shifted = place + gaps[:, None]  # [GAP, R]: where the text is if each token of the gap replaced one
    anchors = torch.stack(runs[:-1], dim=1)
    usable = (anchors >= _ANCHOR) & (shifted < predicted[:, None, None])
    near = room - (shifted - answered[:, None, None]).abs().clamp(max=room - 1)
    score = torch.where(usable, (anchors * (GAP + 1) + (GAP - gaps)[:, None]) * (room + 1) + near, 0)
    best, index = score.view(rows, -1).max(dim=1)
    found = best > 0
    begins = (answered <= GAP) & (answered < predicted)
    expected = torch.where(found, shifted.view(-1)[index], answered)
    found = found | begins
    distance = (place - expected[:, None]).abs()
    sure = exact >= max(min_n, _SURE)
    likely = torch.where(found[:, None], (exact >= 1) & (distance <= GAP), exact >= min_n)
    score = torch.where(sure | likely, exact * (room + 1) + room - distance.clamp(max=room), 0)
    best, index = score.max(dim=1)
    hit = best > 0
    matched = torch.where(hit, exact.gather(1, index[:, None])[:, 0], found.long())
    return torch.where(hit, index, expected.clamp(0, room - 1)), torch.where(predicted > 0, matched, 0)
