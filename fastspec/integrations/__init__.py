"""Classes and functions that let other libraries generate with fastspec, one file for each library."""
