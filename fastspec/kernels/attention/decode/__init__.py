"""Decoding attention: one kernel for every GPU, and those of tensor cores and of TMA with their parts."""
