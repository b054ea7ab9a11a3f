"""Runs decode steps and prefill passes: launched by the host, or captured once as a CUDA graph and replayed."""
