"""Structured output: the user's grammar, its compilation, and the state of a row in its grammar."""
