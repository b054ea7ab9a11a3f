"""Attention, matrix products and lookup of drafts for the CPU."""
