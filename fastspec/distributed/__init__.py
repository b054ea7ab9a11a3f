"""Tensor parallelism: splits models over ranks, exchanges tensors between them, and handles failed ranks."""
