"""Prompts and generation options as users pass them, checked before anything is launched."""
