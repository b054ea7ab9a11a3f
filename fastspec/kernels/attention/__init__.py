"""Attention over a paged KV cache: decode and prefill kernels, and the choice between them."""
