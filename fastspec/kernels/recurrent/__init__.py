"""Kernels of recurrent layers: the gated delta rule with the convolution before it, and the gated norm behind it."""
