"""Hosted models: transformers' own modules, with attention, KV cache and matrix products of this package."""
