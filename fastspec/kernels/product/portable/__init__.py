"""The product for every GPU, dtype and shape, in Triton."""
