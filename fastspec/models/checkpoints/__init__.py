"""Checkpoints: finds them, checks them, reads their tensors, and converts the tensors to weights for the kernels."""
