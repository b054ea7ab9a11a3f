"""Decoder models: the checked spec of a config, checkpoints, weights, and the forward pass."""
