"""Many requests of random kinds and fates at once: nothing is lost, nothing is left, every text is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.services import opened
from tests.helpers.soak import FATES, Soak


def soaked(pair: tuple[Path, Path], requests: int) -> None:
    with opened(pair, max_batch_size=4, page_size=16) as gen:
        soak = Soak.of(gen, 12)
        soak.run(requests, 6)
        assert sum(soak.fates.values()) == requests
        assert set(soak.fates) == set(FATES)


def test_requests_of_every_fate(pair: tuple[Path, Path]) -> None:
    soaked(pair, 80)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_of_them(pair: tuple[Path, Path]) -> None:
    soaked(pair, 100_000)
