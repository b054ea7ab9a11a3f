"""Attention over paged keys: decode and prefill kernels, and which one runs."""
