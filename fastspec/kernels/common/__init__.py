"""Parts that all kernels share: launches, argument checks, shared-memory carve-out, weight formats."""
