"""Products with quantised weights: codes are converted to 16-bit operands in registers."""
