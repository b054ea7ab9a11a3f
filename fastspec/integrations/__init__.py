"""Integrations of fastspec into other frameworks."""
