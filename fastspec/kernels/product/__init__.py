"""Matrix products with the weights: kernels by number of rows, and which one runs."""
