"""Decoder models: the checked spec, where checkpoints come from, weights, and the forward pass."""
