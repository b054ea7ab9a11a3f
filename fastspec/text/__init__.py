"""Token ids to text, and stop strings."""
