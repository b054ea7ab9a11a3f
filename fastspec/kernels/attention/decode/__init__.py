"""Decode attention: a portable kernel for every GPU, and kernels for tensor cores and for TMA."""
