"""A generator with a random draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama2", seed=0)


@pytest.fixture(scope="module", params=devices())
def gen(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    draft = make_checkpoint(tmp_path_factory.mktemp("draft"), "llama2", seed=1, num_hidden_layers=1)
    with FastSpecGenerator(
        directory, draft, max_batch_size=2, max_length=200, dtype="float32", device=request.param, progress=False
    ) as made:
        yield made
