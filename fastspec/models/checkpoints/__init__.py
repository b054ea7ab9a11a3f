"""Weights: where they come from, how they are read, and the form the kernels want."""
