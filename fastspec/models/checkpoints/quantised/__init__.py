"""Quantised checkpoints as they are published: what their configs mean, and their tensors as `Codes`."""
