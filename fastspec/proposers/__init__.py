"""Proposers: objects that make the draft tokens of a decode step."""
