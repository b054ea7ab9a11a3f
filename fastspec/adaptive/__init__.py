"""How `num_speculative_tokens="auto"` chooses k. Plain arithmetic, no torch."""
