"""Every number of queries that a step feeds, and pages of every size that the kernels cut in another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.attention import case, copied
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.kernels.attention.test_dispatch import KINDS, attend, check, choose, dtype_for


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoding kernel runs."""
    return choose(request.param, monkeypatch)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("page_size", [16, 32, 80, 128, 256])
def test_pages_of_any_size(page_size: int, window: int | None, kind: str, device: str) -> None:
    """Two pages or more, the last with a few keys in it; 80 is no power of two, and is cut into pieces of 16."""
    dtype = dtype_for(device, kind)
    check(
        case(device, lengths=[max(page_size, 64) + 9], queries=3, dim=64, page_size=page_size, dtype=dtype), 128, window
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("length", "window"), [(139, None), (40, 20)])
def test_any_number_of_queries(length: int, window: int | None, kind: str, device: str) -> None:
    """Each of 1 to 17, three heads to one: tiles of rows that are full and that are not; two splits, and one."""
    dtype = dtype_for(device, kind)
    for queries in range(1, 18):
        given = case(device, lengths=[length], queries=queries, heads=3, kv_heads=1, dim=64, dtype=dtype)
        check(given, 128, window)


@pytest.mark.parametrize("queries", [3, 40])
def test_a_cache_beyond_two_to_the_31_elements(queries: int, kind: str) -> None:
    """Page 2^31 / (page_size * kv_heads * dim) starts at element 2^31: int32 offsets would wrap there.

    A step, and a chunk of a prompt. Memory that nobody touches costs nothing: numpy's zeros are not even written.
    Each comes to lie below the one before: of offsets that wrap the last keeps the process alive, and the test fails.
    """
    dtype = torch.bfloat16 if kind == "tma" and queries == 3 else torch.float16
    small = case("cpu", lengths=[40], queries=queries, dim=64, page_size=16, dtype=dtype)
    pages = 2**31 // (16 * 2 * 64) + 4
    beyond = torch.arange(pages - 4, pages)[None]
    large = {**copied(small), "block_table": beyond}
    memory = [torch.from_numpy(np.zeros((pages, 16, 2, 64), np.int16)) for _ in range(3)]
    for name, zeros in zip(("keys", "values"), memory, strict=False):
        large[name] = zeros.view(dtype)
        large[name][beyond] = small[name][small["block_table"]]
    assert torch.equal(attend(large), attend(small))
    for name in ("keys", "values"):
        assert torch.equal(large[name][beyond].nan_to_num(7), small[name][small["block_table"]].nan_to_num(7))
