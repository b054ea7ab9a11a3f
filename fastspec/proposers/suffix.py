"""Suffix: looks up draft tokens in texts that a sequence is likely to repeat, on the device, inside the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor
from typing_extensions import Self

from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.lookup import LookUp, Predictions, SharedTexts
from fastspec.proposers.ngram import NGram
from fastspec.proposers.texts import TextIndex, rungs_between
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState

SHARED = 0  # owner of corpora, and of answers that may draft for every request
NOBODY = -1  # owner of no text
# largest number of drafts per matching token, as in SuffixDecoding (Oliaro et al., arXiv:2411.04975)
_PER_MATCHED = 2
_CAPACITY = 2**24

_WEIGHT_LIMIT = 1000
# what a matching token counts in each source; a prediction was given for this very answer
_WEIGHTS: Mapping[str, float] = MappingProxyType({"row": 1.0, "prediction": 2.0, "corpus": 1.0, "answers": 1.0})

Remember = Literal["prompt", "session", "all"]


class Suffix(NGram):
    """Finds a sequence's last tokens in a text, and drafts the tokens that follow them there.

    The texts are the sequence itself, its prediction, corpora, and earlier answers. A prediction is a text that the
    request gives as its likely output. Each text is searched for the longest match of min_n to max_n tokens. The
    strength of a match is its number of tokens, times the weight of its source. The strongest match is used. Outside a
    prediction it gives at most 2 draft tokens per matching token. If corpora and earlier answers have several equally
    long matches, the continuation that most of them share is used, see `look_up_text`.

    Copies of the sequence and of its prediction go on behind an edit, as with `NGram`. A prediction is followed from
    its beginning.

    Args:
        min_n, max_n: see `NGram`.
        prediction_tokens: largest number of tokens of a request's prediction. 0: calls have no `predictions`.
        corpus_tokens: largest number of tokens of all corpora together. 0: there are none.
        remember: requests that may get draft tokens from an earlier answer. "prompt": requests with the same prompt.
            "session": requests with the same `session`. "all": all requests. None: answers are not stored.
        remembered_tokens: number of tokens of earlier answers that are stored. The oldest are dropped first.
        weights: weights of sources by name: "row" (the sequence itself), "prediction", "corpus", "answers". A weight
            is a number from 0.001 to 1000. Others keep their default: 2 for "prediction", else 1. So by default the
            prediction is used, unless another match is more than twice as long.

    Raises:
        ValueError: a number is out of range, `remember` is another value, or `weights` has another name.
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
        weights: Mapping[str, float] | None = None,
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
        self.weights = _checked_weights(weights or {})
        self._corpus: TextIndex | None = None
        self._answers: TextIndex | None = None
        self._corpora: dict[str, list[int]] = {}
        self._next, self._texts = 0, 0

    def __repr__(self) -> str:
        """Formats the constructor's arguments. Ranks compare this text to check that their settings are equal."""
        sizes = f"prediction_tokens={self.prediction_tokens}, corpus_tokens={self.corpus_tokens}"
        kept = f"remember={self.remember!r}, remembered_tokens={self.remembered_tokens}"
        return f"Suffix(min_n={self.min_n}, max_n={self.max_n}, {sizes}, {kept}, weights={self.weights})"

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        more = ["its prediction"] * bool(self.prediction_tokens) + ["corpora"] * bool(self.corpus_tokens)
        more += [f"earlier answers ({self.remember})"] if self.remember else []
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in {', '.join(['the row itself', *more])}"

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers for corpora and earlier answers, and for their search tables, on the device."""
        rungs = rungs_between(self.min_n, self.max_n)
        return sum(TextIndex.nbytes(size, rungs) for size in (self.corpus_tokens, self.remembered_tokens))

    def on(self, device: torch.device, ops: Ops) -> Self:
        """Returns a copy of this proposer for one generator, with empty search tables.

        Args:
            device: device of the tables.
            ops: kernels of the generator's steps.
        """
        made, rungs = super().on(device, ops), rungs_between(self.min_n, self.max_n)
        made._corpora = {}
        made._corpus = TextIndex(self.corpus_tokens, rungs, device) if self.corpus_tokens else None
        made._answers = TextIndex(self.remembered_tokens, rungs, device) if self.remember else None
        return made

    def add_corpus(self, name: str, tokens: Sequence[int]) -> None:
        """Adds a corpus, or replaces the corpus of that name.

        Raises:
            ValueError: there is no room for it. Then the corpora are unchanged.
        """
        corpora = {**self._corpora, name: list(tokens)}
        if (total := sum(map(len, corpora.values()))) > self.corpus_tokens:
            raise ValueError(
                f"the corpora would have {total} tokens, and there is room for {self.corpus_tokens}; remove one, or "
                "make the generator with a larger Suffix(corpus_tokens=...)"
            )
        self._rewrite(corpora)

    def remove_corpus(self, name: str) -> None:
        """Removes a corpus.

        Raises:
            ValueError: there is no corpus of that name.
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
        """Returns the number of the group of requests that may draft from each other's answers.

        A request gets draft tokens only from answers of its own group. SHARED: all requests are one group. NOBODY: the
        request's answer is not stored.

        Args:
            prompt: token ids of the request's prompt.
            session: the request's `session`. None: it has none.
        """
        if self.remember is None or (self.remember == "session" and session is None):
            return NOBODY
        if self.remember == "all":
            return SHARED
        data = cast("str", session).encode() if self.remember == "session" else repr(list(prompt)).encode()
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1 | 1

    def remember_answer(self, prompt: Sequence[int], answer: Sequence[int], session: str | None) -> None:
        """Stores an answer, with the prompt's last tokens before it. Drops older answers if there is no room.

        Args:
            prompt, answer: token ids of the request's prompt and of its output.
            session: the request's `session`. None: it has none.
        """
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
        """Writes the draft tokens that `look_up` finds; see `Proposer.propose`."""
        drafts, counts = self.look_up(state, shape.num_drafts)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """Returns k draft tokens for each sequence with a match; see `DeterministicProposer.guess` for the result."""
        prediction = None
        if state.prediction.shape[1]:
            given = state.prediction, state.prediction_lengths, state.prompt_lengths
            prediction = Predictions(*given, self.weights["prediction"])
        texts: tuple[SharedTexts, ...] = ()
        if self._answers is not None:
            texts += (SharedTexts(self._answers.table, state.owners, self.weights["answers"]),)
        if self._corpus is not None:
            everyone = torch.full_like(state.owners, SHARED)
            texts += (SharedTexts(self._corpus.table, everyone, self.weights["corpus"]),)
        rows = state.tokens, state.lengths, self.min_n, self.max_n
        return self.ops.look_up(LookUp(*rows, prediction, texts, _PER_MATCHED, self.weights["row"]), k)


def _checked_weights(given: Mapping[str, float]) -> dict[str, float]:
    """Returns the weight of every source. Raises ValueError if a name or a weight is refused."""
    if not isinstance(given, Mapping) or (unknown := [name for name in given if name not in _WEIGHTS]):
        got = repr(given) if not isinstance(given, Mapping) else f"the name {unknown[0]!r}"
        raise ValueError(f"weights must be a dict with names of {', '.join(map(repr, _WEIGHTS))}, got {got}")
    for name, weight in given.items():
        if type(weight) not in (int, float) or not 1 / _WEIGHT_LIMIT <= weight <= _WEIGHT_LIMIT:
            raise ValueError(
                f"weights[{name!r}] must be a number from {1 / _WEIGHT_LIMIT} to {_WEIGHT_LIMIT}, got {weight!r}"
            )
    return {name: float(given.get(name, weight)) for name, weight in _WEIGHTS.items()}
