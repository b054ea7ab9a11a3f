"""Proposers: whatever writes the draft tokens of a step."""
