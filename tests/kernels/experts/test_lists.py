"""Lists of pairs by expert: what one program makes is what sorting makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.experts import lists
from fastspec.kernels.experts.lists import lists_of, tiles_of


def drawn(rows: int, chosen: int, experts: int, seed: int) -> Tensor:
    """Ids of rows that prefer some experts; the last place is one expert for all, as of a shared one."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(rows, chosen, generator=generator) ** 2 * experts).int()
    ids[:, -1] = experts - 1
    return ids


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("rows", "chosen", "experts"), [(2, 2, 5), (5, 9, 257), (7, 9, 9), (8, 8, 20), (9, 9, 33)])
def test_they_are_those_of_sorting(rows: int, chosen: int, experts: int, device: str) -> None:
    """Up to 64 pairs, and more; of tiles without pairs nothing else is told."""
    for seed, each in ((0, 8), (1, 3)):
        ids = drawn(rows, chosen, experts, seed).to(device)
        order, tiles = lists_of(ids, experts, each)
        count = tiles_of(ids.numel(), experts, each)
        expected, wanted = lists._by_sorting(ids.flatten(), experts, each, count)
        assert torch.equal(order, expected)
        assert torch.equal(tiles[:, 2], wanted[:, 2])
        used = wanted[:, 2] > 0
        assert torch.equal(tiles[used], wanted[used])
