"""Calls of a user on one running scheduler: what they bring in, how they run, and what they hand back."""
