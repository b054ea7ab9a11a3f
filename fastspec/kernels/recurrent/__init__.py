"""Kernels of recurrent layers: the causal convolution, the gated delta rule, and the gated norm after it."""
