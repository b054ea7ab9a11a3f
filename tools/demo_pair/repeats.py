"""Repeated n-grams: how much of a text says again what it said before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HASH_FACTOR = 6364136223846793005


def _same_ngrams(ids: Tensor, n: int) -> Tensor:
    """Returns bool [rows, m, m] with m = length - n + 1: do the n-grams that start at i and j agree."""
    powers = torch.tensor([pow(HASH_FACTOR, place, 2**61 - 1) for place in range(n)], device=ids.device)
    hashes = ((ids.long() + 1).unfold(1, n, 1) * powers).sum(-1)  # wraps around: a hash need not be a number
    return hashes[:, :, None] == hashes[:, None, :]


def repeated_share(ids: Tensor, n: int = 8) -> Tensor:
    """Returns the share of each row's tokens that lie in an n-gram the row holds more than once: [rows]."""
    repeated = _same_ngrams(ids, n).sum(-1) > 1
    spread = F.pad(repeated.float(), (n - 1, n - 1))[:, None]
    return F.max_pool1d(spread, n, 1)[:, 0].mean(-1)


def closes_repeat(ids: Tensor, n: int = 8) -> Tensor:
    """Marks the tokens that complete an n-gram which stood in the row before: bool [rows, length]."""
    earlier = torch.tril(_same_ngrams(ids, n), diagonal=-1).any(-1)
    return F.pad(earlier, (n - 1, 0))
