"""Models of transformers that run as they are, with attention, K/V and matrix products of this package."""
