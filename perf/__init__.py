"""Measures fastspec and its peers: `python -m perf --help`. Not part of the package that is installed.

How to measure and what the columns mean: docs/performance.md.
"""
