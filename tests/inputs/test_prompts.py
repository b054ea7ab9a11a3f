"""Prompts: every shape that users pass, and a named place for every mistake."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from fastspec.inputs.prompts import read

VOCAB = 50


@pytest.mark.parametrize(
    ("given", "mask", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]]), None, [[1, 2], [3, 4]]),
        (torch.tensor([1, 2, 3]), None, [[1, 2, 3]]),
        (torch.tensor([[1, 2]], dtype=torch.int32), None, [[1, 2]]),
        (torch.tensor([[1, 2]], dtype=torch.uint16), None, [[1, 2]]),  # how corpora of ids are stored
        ([torch.tensor([1, 2], dtype=torch.uint32)], None, [[1, 2]]),
        (torch.tensor([[1, 2]], dtype=torch.uint64), None, [[1, 2]]),
        ([1, 2], None, [[1, 2]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
        ([torch.tensor([4, 5]), [6]], None, [[4, 5], [6]]),
        (torch.tensor([[0, 0, 7], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]]), [[7], [1, 2, 3]]),
        (torch.tensor([[0, 7]]), [[0, 1]], [[7]]),
        (torch.tensor([[9, 7]]), torch.tensor([[False, True]]), [[7]]),
        (torch.tensor([[9, 7]]), torch.tensor([[0.0, 1.0]]), [[7]]),
        ([[0, 3], [4, 5]], [[0, 1], [1, 1]], [[3], [4, 5]]),
        (np.array([[1, 2], [3, 4]]), None, [[1, 2], [3, 4]]),
        (np.array([1, 2, 3], dtype=np.uint16), None, [[1, 2, 3]]),
        (np.array([[1, 2], [3]], dtype=object), None, [[1, 2], [3]]),
        ([np.array([4, 5]), [np.int32(6)]], None, [[4, 5], [6]]),
        ([torch.tensor(4), torch.tensor(5)], None, [[4, 5]]),
        (np.array([[9, 7]]), np.array([[0, 1]]), [[7]]),
        ([[9, 7], [1, 2]], [torch.tensor([0, 1]), np.array([1, 1])], [[7], [1, 2]]),
        ({"input_ids": [[9, 7]], "attention_mask": [[0, 1]], "token_type_ids": [[0, 0]]}, None, [[7]]),
        (BatchEncoding({"input_ids": torch.tensor([[9, 7]]), "attention_mask": torch.tensor([[0, 1]])}), None, [[7]]),
        (BatchEncoding({"input_ids": np.array([[9, 7]])}), [[0, 1]], [[7]]),
    ],
    ids=str,
)
def test_prompts_in_every_accepted_form_give_the_same_ids(given: Any, mask: Any, expected: list[list[int]]) -> None:
    assert read(given, mask).prompts(VOCAB) == expected


@pytest.mark.parametrize(
    ("given", "mask", "message"),
    [
        (torch.tensor([[1, VOCAB]]), None, "prompt 0, position 1: token id 50"),
        ([[1], [2, -1]], None, "prompt 1, position 1: token id -1"),
        (torch.tensor([[2**62]]), None, "token id 4611686018427387904"),
        ([[2**70]], None, "prompt 0, position 0"),
        (torch.tensor([[1.0]]), None, "dtype torch.float32"),
        (torch.tensor([[True]]), None, "dtype torch.bool"),
        (torch.tensor([[1j]]), None, "dtype torch.complex64"),
        ([[1, 2.0]], None, "prompt 0, position 1: 2.0 is not an integer"),
        ([[1, True]], None, "prompt 0, position 1: True is not an integer"),
        ([[1], 2], None, "mixes ids and lists"),
        ([[[1]]], None, r"\[1\] is not an integer"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, "shape"),
        ("hello", None, "tokenize"),
        (["hello"], None, "not an integer token id; tokenize text"),
        (np.array(["hello"]), None, "not an integer token id; tokenize text"),
        (np.array([[1.5]]), None, "input_ids must hold integers, got dtype float64"),
        (np.array([[True]]), None, "dtype bool"),
        (np.zeros((1, 1, 1), dtype=np.int64), None, "shape"),
        ({"ids": [[1]]}, None, "mapping without 'input_ids'; it holds .'ids'."),
        ({"input_ids": [[1]], "attention_mask": [[1]]}, [[1]], "attention_mask is given twice"),
        ({1, 2}, None, "got set$"),
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
        read(given, mask).prompts(VOCAB)


@pytest.mark.parametrize(
    ("given", "padding", "stop_ids", "expected"),
    [
        (torch.tensor([[0, 0, 7], [1, 2, 3]]), 0, (), [[7], [1, 2, 3]]),
        (torch.tensor([[0, 0, 7], [1, 2, 3]]), 0, (5,), [[7], [1, 2, 3]]),
        (np.array([[0, 7], [1, 2]]), 0, (), [[7], [1, 2]]),
        ([[0, 7]], 0, (), [[0, 7]]),  # lists hold text alone
        (torch.tensor([0, 7]), 0, (), [[7]]),
        ([[0, 7], [1, 2, 3]], 0, (), [[0, 7], [1, 2, 3]]),  # nobody pads to different lengths
        ([[1, 0, 7], [1, 2, 3]], 0, (), [[1, 0, 7], [1, 2, 3]]),
        (torch.tensor([[4, 7], [1, 2]]), 0, (), [[4, 7], [1, 2]]),
    ],
    ids=str,
)
def test_padding_is_inferred(
    given: Any, padding: int | None, stop_ids: tuple[int, ...], expected: list[list[int]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(given).prompts(VOCAB, padding, stop_ids) == expected
    ones = torch.ones_like(torch.as_tensor(given)) if len(set(map(len, read(given).rows))) == 1 else None
    if ones is not None:  # a mask is believed
        assert read(given, ones).prompts(VOCAB, padding, stop_ids) == read(given).rows


@pytest.mark.parametrize(
    ("given", "padding", "stop_ids", "message"),
    [
        ([[0, 0, 7], [1, 2, 3]], 0, (0, 5), "prompt 0 begins with 2 ids of 0.*pad_token_id=0 ends texts too"),
        ([[0, 0, 7], [1, 2, 3]], 0, (5,), "prompt 0 begins with 2 ids of 0.*lists hold text alone"),
        ([[1, 2], [0, 7]], 0, (0,), "prompt 1 begins with 1 ids of 0"),
        ([[0, 0, 7]], 0, (0,), "prompt 0 begins with 2 ids"),
        ([[5, 5, 7], [1, 2, 3]], None, (5,), "no pad_token_id is known"),
        ([[6, 6, 7], [1, 2, 3]], None, (), "prompt 0 begins with 2 ids of 6.*no pad_token_id is known"),
    ],
    ids=str,
)
def test_padding_that_cannot_be_inferred_is_told_of(
    given: Any, padding: int | None, stop_ids: tuple[int, ...], message: str
) -> None:
    for form in (given,) if "lists" in message else (given, torch.tensor(given)):
        with pytest.warns(UserWarning, match=message) as told:
            assert read(form).prompts(VOCAB, padding, stop_ids) == given
        assert len(told) == 1
        assert told[0].filename == __file__


@pytest.mark.parametrize("given", [[[0, 7], [0, 8]], [[0, 7]], [[5, 7], [0, 7, 1]], [[5, 5, 5], [1, 2, 3]]], ids=str)
def test_a_first_token_is_no_padding(given: list[list[int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(given).prompts(VOCAB, 0, (0,)) == given


@pytest.mark.parametrize(
    ("row", "message"), [([1, 0, 7], "position 1: pad_token_id=0 behind"), ([0, 7, 0], "position 2"), ([0, 0], "empty")]
)
def test_other_padding_is_refused(row: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(torch.tensor([row])).prompts(VOCAB, 0)


@pytest.mark.parametrize(
    "nothing", [[], torch.empty(0, 3, dtype=torch.int64), np.empty((0, 3), dtype=np.int64)], ids=str
)
def test_no_prompt_is_said_before_options_are_read(nothing: Any) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        read(nothing)
