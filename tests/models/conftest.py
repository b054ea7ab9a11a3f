from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Llama in one safetensors file."""
    return make_checkpoint(tmp_path / "model", "llama2")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several files, with an index."""
    return make_checkpoint(tmp_path / "model", "llama2", max_shard_size="60KB")
