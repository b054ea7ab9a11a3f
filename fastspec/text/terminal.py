"""Makes text safe to print on a terminal."""

from __future__ import annotations

import unicodedata

_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape_control(text: str) -> str:
    r"""Writes control characters as `\xNN` or `\uNNNN`, so that text cannot control the terminal.

    Line feeds and tabs stay. Characters that reorder a line (bidirectional embeddings, overrides and isolates) count as
    control characters. The zero-width joiner of emojis does not.
    """
    return "".join(_escaped(char) if _steers(char) else char for char in text)


def _steers(char: str) -> bool:
    return (unicodedata.category(char) == "Cc" and char not in "\n\t") or char in _BIDI


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"
