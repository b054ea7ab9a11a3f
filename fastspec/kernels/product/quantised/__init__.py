"""Products with quantised weights: codes become 16-bit operands in registers."""
