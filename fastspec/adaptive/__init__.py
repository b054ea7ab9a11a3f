"""Chooses k for `num_speculative_tokens="auto"`. Plain arithmetic, no torch."""
