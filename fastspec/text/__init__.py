"""Converts token ids to text, and finds stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastspec.text.terminal import escape_control

if TYPE_CHECKING:
    from fastspec.text.text_stream import StreamWriter, TextStream

__all__ = ["StreamWriter", "TextStream", "escape_control"]

if not TYPE_CHECKING:  # a type checker that sees it takes any misspelt name for an export

    def __getattr__(name: str) -> Any:
        """Imports a public name of this package at its first use, if the name needs transformers."""
        if name not in ("StreamWriter", "TextStream"):
            raise AttributeError(f"module 'fastspec.text' has no attribute {name!r}")
        from fastspec.text import text_stream

        return getattr(text_stream, name)
