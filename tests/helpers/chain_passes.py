"""The passes of a head that drafts token by token against its definition: all rows at once, parts, one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.shapes import UNTILED, ForwardBatch

ROWS = 11
# sums of some hundred products in fp32, in another order, through a layer or two
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def fed(following: Tensor, start: int, stop: int) -> ForwardBatch:
    """Positions start..stop-1 of one row, with the tokens that follow them."""
    positions, table = torch.arange(start, stop)[None], torch.tensor([[3, 1, 4, 2]])
    mask = torch.ones(1, stop - start, dtype=torch.bool)
    return ForwardBatch(following[None, start:stop], positions, mask, table, 1, UNTILED)


def check_passes(model: Any, definition: Any, g: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Compares every pass over g [ROWS, hidden]; returns [1, ROWS, hidden] of the model and of the definition."""
    x = definition.behind(g, following)
    whole = model.drafted(g[None], fed(following, 0, ROWS))
    torch.testing.assert_close(whole[0], x, **CLOSE)
    torch.testing.assert_close(model.logits(whole, UNTILED)[0], definition.logits(x), **CLOSE)
    best = torch.zeros(ROWS, dtype=torch.int64)
    model.argmax(whole[0], model.vocab_size, UNTILED, best)
    assert torch.equal(best, definition.logits(x).argmax(-1))

    model.cache.keys.fill_(torch.nan)
    made = model.absorb(g[None, :7], fed(following, 0, 7))
    torch.testing.assert_close(model.resumed(made[:, 6:], fed(following * 0, 6, 7))[0, 0], x[6], **CLOSE)
    for row in range(7, ROWS):
        one = model.drafted(g[None, row : row + 1], fed(following, row, row + 1))
        torch.testing.assert_close(one[0, 0], x[row], **CLOSE)
    return whole, x[None]
