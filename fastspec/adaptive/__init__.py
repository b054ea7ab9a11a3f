"""Chooses k, the number of draft tokens of a step, for `num_speculative_tokens="auto"`. Does not use torch."""
