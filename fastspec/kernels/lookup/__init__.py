"""Kernels that find drafts in texts."""
