"""Structured output: what a caller asks for, the library that compiles it, and the state of one row in its grammar."""
