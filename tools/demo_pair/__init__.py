"""Trains the small target and draft that ship with fastspec: see README.md beside this file."""
