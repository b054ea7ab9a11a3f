"""Trains heads that draft from a target's hidden states."""
