"""Checkpoints: finding them, reading their tensors, and converting these to weights for the kernels."""
