"""Reads and checks prompts and generation options, before anything is launched."""
