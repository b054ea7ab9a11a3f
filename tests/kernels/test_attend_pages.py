"""Every number of queries that a step feeds, and pages of every size that the kernels cut in another way."""

from __future__ import annotations

import pytest

from tests.helpers.attention import case
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.kernels.test_attend import KINDS, check, choose, dtype_for


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
