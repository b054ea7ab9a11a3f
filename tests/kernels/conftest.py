"""New memory holds NaN, or the largest number of its type, in tests of kernels: what nobody writes shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic


@pytest.fixture(autouse=True)
def new_memory_is_no_result(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU alone: on a GPU a kernel that fills would stand between launches that are to overlap."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # without it the flag above does nothing
    yield
    torch.use_deterministic_algorithms(before)
