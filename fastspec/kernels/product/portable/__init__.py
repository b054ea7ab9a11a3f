"""Matrix product in Triton for every GPU, dtype and shape."""
