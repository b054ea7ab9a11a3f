"""Hosted models: modules of transformers that run with attention, KV cache and matrix products of this package."""
