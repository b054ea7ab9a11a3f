"""Families whose layers have Mamba-2, short convolutions, or Kimi delta attention."""
