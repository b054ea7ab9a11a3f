"""Token ids to text, and stop strings."""

from fastspec.text.text_stream import StreamWriter, TextStream, escape_control

__all__ = ["StreamWriter", "TextStream", "escape_control"]
