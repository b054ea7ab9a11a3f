"""One tiny generator for all tests of calls and handles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastspec import FastSpecGenerator
from tests.helpers.services import opened, small_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def gen(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with opened(pair, max_batch_size=4) as made:
        yield made
