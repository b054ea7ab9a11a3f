"""Learned drafters, also called heads: small published models that draft tokens from the target's hidden states."""
