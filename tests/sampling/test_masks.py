"""Masks of bits: which logits they leave."""

from __future__ import annotations

import pytest
import torch

from fastspec.sampling.masks import allowed


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_ids_without_a_bit_are_forbidden(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    logits = torch.randn(3, 2, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (3, 4, words), generator=generator).to(torch.int32)
    masks[0] = -1
    found = allowed(logits, masks)
    assert torch.equal(found[0], logits[0])
    for row in range(3):
        for place in range(2):
            for token in range(vocab):
                bit = int(masks[row, place, token // 32]) >> (token % 32) & 1
                expected = float(logits[row, place, token]) if bit else -torch.inf
                assert float(found[row, place, token]) == expected
