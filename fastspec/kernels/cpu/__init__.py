"""Attention and matrix products for the CPU."""
