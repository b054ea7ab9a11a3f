"""Devices that a test runs on."""

from __future__ import annotations

from typing import Any

import pytest


def devices() -> list[Any]:
    """The CPU always, and CUDA under the marker `gpu`."""
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
