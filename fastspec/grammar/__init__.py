"""Structured output: the caller's grammar, the library that compiles it, and the state of a row in its grammar."""
