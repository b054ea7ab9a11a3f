"""Attention kernels of decoding: a portable one for every GPU, and others for tensor cores and for TMA."""
