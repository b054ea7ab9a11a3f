"""Finds and checks checkpoints, reads their tensors, and converts the tensors to the weights that the kernels read."""
