"""Kernels that process logits: distributions, draws, verification, commit, and publication of results."""
