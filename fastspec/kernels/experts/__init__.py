"""Mixtures of experts as Triton kernels: choice of experts, their products, and the weighted sum of their outputs."""
