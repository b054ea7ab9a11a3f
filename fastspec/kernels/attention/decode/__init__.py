"""Attention kernels of decode passes: a portable kernel for every GPU, and kernels for tensor cores and for TMA."""
