"""Groups of processes, and what one process makes of the same calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_processes import Processes

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 192}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with 8 heads and 2 key heads, and a draft that is often right: the target with a little noise."""
    path: Path = tmp_path_factory.mktemp("pair")
    more = {"vocab_size": 128, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 256, **SIZES}
    target = make_checkpoint(path / "target", "llama3", seed=1, **more)
    draft = make_checkpoint(path / "draft", "llama3", seed=1, std=0.31, **more)
    return str(target), str(draft)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(2, tmp_path_factory.mktemp("two") / "meeting")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(4, tmp_path_factory.mktemp("four") / "meeting")
    yield made
    made.stop()
