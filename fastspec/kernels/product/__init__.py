"""Matrix products with the weights: kernels for different numbers of rows, and the choice between them."""
