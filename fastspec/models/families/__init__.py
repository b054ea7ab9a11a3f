"""Supported families, one file each. To add one, write its file and add a line to the table here."""

from __future__ import annotations

from typing import Final

from fastspec.models.families.llama import LLAMA
from fastspec.models.families.mistral import MISTRAL
from fastspec.models.families.plan import Family
from fastspec.models.families.qwen2 import QWEN2
from fastspec.models.families.qwen3 import QWEN3

FAMILIES: Final[dict[str, Family]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
"""By the config's `model_type`."""
