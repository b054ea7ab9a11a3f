"""Prompts: every shape that users pass, and a named place for every mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastspec.inputs.prompts import prompts_of

VOCAB = 50


@pytest.mark.parametrize(
    ("given", "mask", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]]), None, [[1, 2], [3, 4]]),
        (torch.tensor([1, 2, 3]), None, [[1, 2, 3]]),
        (torch.tensor([[1, 2]], dtype=torch.int32), None, [[1, 2]]),
        ([1, 2], None, [[1, 2]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
        ([torch.tensor([4, 5]), [6]], None, [[4, 5], [6]]),
        (torch.tensor([[0, 0, 7], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), [[7], [1, 2, 3]]),
        (torch.tensor([[0, 7]]), [[0, 1]], [[7]]),
        (torch.tensor([[9, 7]]), torch.tensor([[False, True]]), [[7]]),
        (torch.tensor([[9, 7]]), torch.tensor([[0.0, 1.0]]), [[7]]),
        ([[0, 3], [4, 5]], [[0, 1], [1, 1]], [[3], [4, 5]]),
    ],
    ids=str,
)
def test_accepted_forms(given: Any, mask: Any, expected: list[list[int]]) -> None:
    assert prompts_of(given, mask, VOCAB) == expected


@pytest.mark.parametrize(
    ("given", "mask", "message"),
    [
        (torch.tensor([[1, VOCAB]]), None, "prompt 0, position 1: token id 50"),
        ([[1], [2, -1]], None, "prompt 1, position 1: token id -1"),
        (torch.tensor([[2**62]]), None, "token id 4611686018427387904"),
        ([[2**70]], None, "prompt 0, position 0"),
        (torch.tensor([[1.0]]), None, "dtype torch.float32"),
        (torch.tensor([[True]]), None, "dtype torch.bool"),
        ([[1, 2.0]], None, "prompt 0, position 1: 2.0 is not an integer"),
        ([[1, True]], None, "prompt 0, position 1: True is not an integer"),
        ([[1], 2], None, "mixes ids and lists"),
        ([[[1]]], None, r"\[1\] is not an integer"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, "shape"),
        ("hello", None, "tokenize"),
        (["hello"], None, "not an integer"),
        (None, None, "NoneType"),
        ([], None, "no prompt"),
        (torch.zeros(0, 3, dtype=torch.int64), None, "no prompt"),
        ([[1], []], None, "prompt 1 is empty"),
        (torch.zeros(1, 0, dtype=torch.int64), None, "prompt 0 is empty"),
        (torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), "prompt 0 is empty"),
        (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]]), "row 0 has a 0 after a 1 .position 2"),
        (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]]), "only left padding"),
        (torch.tensor([[1, 2]]), torch.tensor([[1, 2]]), "position 1: 2 is neither"),
        (torch.tensor([[1, 2]]), torch.tensor([[1.0, float("nan")]]), "position 1: nan is neither"),
        (torch.tensor([[1, 2]]), torch.tensor([[1, 1, 1]]), "must be the same"),
        ([[1], [2, 3]], torch.tensor([[1, 1], [1, 1]]), "must be the same"),
        (torch.tensor([[1]]), "x", "attention_mask must be"),
        (torch.tensor([[1]]), {}, "attention_mask must be"),
        (torch.tensor([[1, 2]]), [[None, 1]], "attention_mask must be"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), None, "plain tensor with values"),
        (torch.tensor([[1, 2]]).to_sparse(), None, "plain tensor with values"),
        (torch.tensor([[1, 2]]), torch.ones(1, 2, device="meta"), "plain tensor with values"),
    ],
    ids=str,
)
def test_mistakes_are_named(given: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts_of(given, mask, VOCAB)
