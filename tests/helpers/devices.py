"""Devices that a test runs on."""

from __future__ import annotations

import os
from typing import Any

import pytest

needs_idle_gpu = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="other tests take the GPU in turn with what is timed: run it without -n"
)


def devices() -> list[Any]:
    """The CPU always, and CUDA under the marker `gpu`."""
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
