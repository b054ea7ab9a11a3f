"""The pair of tiny models that ships with the package: trained on the Python standard library's sources."""

from __future__ import annotations

from pathlib import Path


def demo_pair() -> tuple[Path, Path]:
    """Directories of the shipped (target, draft), in the Hugging Face layout with their tokenizer."""
    here = Path(__file__).parent
    return here / "target", here / "draft"
