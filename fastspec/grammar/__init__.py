"""Texts that a grammar allows: what a caller asks for, the library that reads it, and one row's place in it."""
