"""Reads and checks prompts and generation options, before any kernel is launched."""
