"""The demo pair of tiny models, trained on the source code of Python's standard library. It is part of the package."""

from __future__ import annotations

from pathlib import Path


def demo_pair() -> tuple[Path, Path]:
    """Returns the directories of the demo (target, draft) in the Hugging Face layout, with their tokenizer."""
    here = Path(__file__).parent
    return here / "target", here / "draft"
