"""Mixtures of experts as Triton kernels: which experts a token has, their products, and the sum of what they give."""
