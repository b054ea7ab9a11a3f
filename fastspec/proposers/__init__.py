"""Proposers, which make the draft tokens of a step."""
