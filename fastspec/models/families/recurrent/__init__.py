"""Families whose layers have Mamba-2 or short convolutions."""
