"""Rows of the embedding, row-major and packed, alone and with the rows of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.embed import embed


def table(vocab: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """No two entries alike, as far as the dtype goes; bits do not change on the way."""
    generator = torch.Generator().manual_seed(vocab)
    return torch.randn(vocab, width, generator=generator).to(dtype).to(device)


def packed(weight: Tensor) -> Weight:
    rows, columns = weight.shape
    return Weight(weight.view(rows // 16, 16, columns // 32, 32).transpose(1, 2).contiguous(), "packed")


CASES = [(48, 64, torch.float32), (112, 128, torch.bfloat16), (64, 1056, torch.float16)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("vocab", "width", "dtype"), CASES)
def test_rows_come_out_as_they_are(vocab: int, width: int, dtype: torch.dtype, device: str) -> None:
    weight = table(vocab, width, dtype, device)
    ids = torch.tensor([[0, vocab - 1, 17], [16, 15, 31]], device=device)
    for stored in (Weight(weight), packed(weight)):
        assert torch.equal(embed(stored, ids), weight[ids])
        assert torch.equal(reference.embed(stored, ids), weight[ids])


@pytest.mark.parametrize("device", devices())
def test_ids_out_of_range_read_the_nearest_row(device: str) -> None:
    weight = table(32, 64, torch.float32, device)
    ids = torch.tensor([[-1, 32, 2**40, -(2**40)]], device=device)
    for stored in (Weight(weight), packed(weight)):
        assert torch.equal(embed(stored, ids), weight[torch.tensor([[0, 31, 31, 0]])])
        assert torch.equal(embed(stored, ids), reference.embed(stored, ids))


@pytest.mark.parametrize("device", devices())
def test_an_awkward_row_major_width(device: str) -> None:
    weight = table(19, 111, torch.float32, device)
    ids = torch.tensor([[18], [3]], device=device)
    assert torch.equal(embed(Weight(weight), ids), weight[ids])


@pytest.mark.gpu
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_table_beyond_two_to_the_31_elements(is_packed: bool) -> None:
    width = 8192
    vocab = 2**31 // width + 64
    weight = torch.zeros(vocab, width, dtype=torch.bfloat16, device="cuda")
    row = torch.randn(width).to(torch.bfloat16).cuda()
    weight[-1] = row
    stored = packed(weight) if is_packed else Weight(weight)
    assert torch.equal(embed(stored, torch.tensor([[vocab - 1]], device="cuda"))[0, 0], row)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": Weight(torch.zeros(64, 32).T)}, r"embedding is float32 \[32, 64\] with strides.*Ops.store"),
        ({"ids": torch.zeros(4, 2, dtype=torch.int64).T}, r"ids is int64 \[2, 4\] with strides.*pass ids.contiguous"),
        ({"ids": torch.zeros(4, 2, dtype=torch.int32)}, "ids is int32"),
    ],
)
def test_what_would_be_misread_is_refused(change: dict[str, Any], match: str) -> None:
    given = {"weight": Weight(table(32, 64, torch.float32, "cpu")), "ids": torch.zeros(1, 1, dtype=torch.int64)}
    with pytest.raises(ValueError, match=match):
        embed(**{**given, **change})
