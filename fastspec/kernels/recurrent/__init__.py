"""Kernels of recurrent layers: convolutions, the gated delta rule, Mamba-2, and the gated norms after them."""
