"""The packed form of weights."""

from __future__ import annotations

import pytest
import torch

from fastspec.kernels.common import packing
from tests.helpers.devices import devices

SHAPES = [(16, 128), (32, 256), (48, 896), (160, 384), (256, 128)]


def weight(n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Every element another value: small integers for bf16 would repeat, bits do not."""
    return torch.arange(n * k, device=device).to(torch.int16).view(n, k).view(dtype)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", packing.DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_elements_are_where_the_table_says(n: int, k: int, dtype: torch.dtype, device: str) -> None:
    rows = weight(n, k, dtype, device)
    packed = packing.pack(rows).view(torch.int16)
    assert packed.shape == (n // 16, k // 32, 16, 32)
    assert packed.is_contiguous()
    at_n, at_k = torch.arange(n)[:, None], torch.arange(k)[None]
    found = packed[at_n // 16, at_k // 32, at_n % 16, at_k % 32]
    assert torch.equal(found, rows.view(torch.int16))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gate_and_up_take_turns_of_eight_rows(n: int, k: int, device: str) -> None:
    rows = weight(n, k, torch.bfloat16, device)
    gate, up = rows.chunk(2)
    mixed = torch.stack((gate.view(-1, 8, k), up.view(-1, 8, k)), 1).view(n, k)
    assert torch.equal(packing.pack(rows, gated=True).view(torch.int16), packing.pack(mixed).view(torch.int16))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacked_is_what_was_packed(n: int, k: int, gated: bool, device: str) -> None:
    rows = weight(n, k, torch.float16, device)
    assert torch.equal(packing.unpack(packing.pack(rows, gated), gated).view(torch.int16), rows.view(torch.int16))


@pytest.mark.parametrize("device", devices())
def test_a_view_packs_as_its_copy(device: str) -> None:
    rows = weight(64, 384, torch.bfloat16, device)
    for part in (rows[16:48], rows[:, 128:256]):
        ours, theirs = packing.pack(part, gated=True), packing.pack(part.clone(), gated=True)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ids", [[0], [79, 0, 16], [[17, 31], [33, 79]], []])
def test_rows_of_an_embedding(ids: list[object], device: str) -> None:
    rows = weight(80, 256, torch.bfloat16, device)
    at = torch.tensor(ids, dtype=torch.int64, device=device)
    found = packing.embed_rows(packing.pack(rows), at)
    assert found.shape == (*at.shape, 256)
    assert torch.equal(found.view(torch.int16), rows[at].view(torch.int16))


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (8, 128, torch.bfloat16),
        (24, 128, torch.bfloat16),
        (16, 32, torch.bfloat16),
        (16, 352, torch.float16),
        (16, 128, torch.float32),
        (16, 128, torch.int16),
        (0, 128, torch.bfloat16),
        (16, 0, torch.bfloat16),
    ],
)
def test_what_cannot_be_packed(n: int, k: int, dtype: torch.dtype) -> None:
    assert not packing.can_pack((n, k), dtype)
    with pytest.raises(ValueError, match="no packed form"):
        packing.pack(torch.zeros(n, k, dtype=dtype))


def test_only_16_bit_matrices_of_whole_tiles_can_be_packed() -> None:
    for shape in [(128256, 4096), (151936, 896), (4864, 896), (896, 4864), (201088, 2880), (16, 64)]:
        assert packing.can_pack(shape, torch.bfloat16)
        assert packing.can_pack(shape, torch.float16)


def test_only_weights_of_two_dimensions_are_packed() -> None:
    with pytest.raises(ValueError, match="no packed form"):
        packing.pack(torch.zeros(1, 16, 128, dtype=torch.bfloat16)[0, 0])


def test_packing_takes_one_copy() -> None:
    """The copy that it returns, and nothing beside it."""
    rows = weight(160, 384, torch.bfloat16)
    for gated in (False, True):
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            packed = packing.pack(rows, gated)
        allocated = sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)
        assert allocated == packed.nbytes
