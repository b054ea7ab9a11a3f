"""Fixtures for every test, and the rule that tests marked `gpu` run only where there is one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.devices import devices

if not torch.cuda.is_available():
    # before anything imports triton: its own library functions are bound to interpreter or compiler at import
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and CUDA where there is one."""
    return torch.device(request.param)
