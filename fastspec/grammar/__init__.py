"""Structured output: the user's grammar, its compilation, and the state of each request in its grammar."""
