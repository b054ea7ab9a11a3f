"""Kernels that find draft tokens by lookup in texts."""
