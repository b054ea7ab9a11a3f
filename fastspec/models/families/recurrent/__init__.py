"""Families whose layers have Mamba, short convolutions, or Kimi delta attention."""
