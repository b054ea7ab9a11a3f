"""Families whose layers have mixtures of experts."""
