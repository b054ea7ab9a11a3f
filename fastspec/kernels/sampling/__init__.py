"""Kernels on logits: distributions, draws, verification, commit, published results."""
