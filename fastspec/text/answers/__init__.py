"""Parses the text of an answer while it arrives, into reasoning, content and tool calls."""
