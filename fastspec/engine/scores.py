"""Log-probabilities of a prompt's tokens, computed from the hidden states of its prefill passes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.reference.step import logprobs_of
from fastspec.models.interface import CausalModel
from fastspec.shapes import Tiling

SCORED = 64  # positions whose logits [64, V] are in memory at a time


class PromptScores:
    """Log-probabilities of one prompt's tokens, computed from the target's unprocessed logits.

    The first token has none.

    Args:
        prompt: token ids.
        top: number of most probable ids to record at each position.
    """

    def __init__(self, prompt: list[int], top: int) -> None:
        self._prompt, self._top = prompt, top
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._next = 0  # position whose hidden state comes next

    def add(self, target: CausalModel, hidden: Tensor, start: int, tiling: Tiling) -> None:
        """Records the log-probabilities of the tokens that follow the positions of one prefill pass.

        Args:
            target: model that computes logits from hidden states.
            hidden: [1, Q, hidden], last hidden states of the Q positions of the pass. Hidden states of the prompt's
                last token and of later positions are ignored.
            start: first position of the pass. Each pass must begin where the one before has ended. A smaller position
                (0) discards everything recorded, and begins anew.
            tiling: tile shapes of the matrix product.
        """
        if start < self._next:
            self._parts, self._next = [], 0
        assert start == self._next, "passes follow each other from position 0 on"
        self._next = start + hidden.shape[1]
        stop = min(hidden.shape[1], len(self._prompt) - 1 - start)
        for first in range(0, stop, SCORED):
            last = min(first + SCORED, stop)
            logits = target.logits(hidden[:, first:last], tiling)
            after = torch.tensor([self._prompt[start + first + 1 : start + last + 1]], device=logits.device)
            self._parts.append(logprobs_of(logits, after, self._top))

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of the prompt's tokens, from the second token on."""
        return [value for values, _, _ in self._parts for value in values[0].tolist()]

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]]:
        """Most probable (id, log-probability) pairs for each prompt token from the second on, largest first."""
        return [
            list(zip(ids, values, strict=True))
            for _, top_ids, tops in self._parts
            for ids, values in zip(top_ids[0].tolist(), tops[0].tolist(), strict=True)
        ]
