"""Decoder models: the checked spec, checkpoints, weights, and the forward pass."""
