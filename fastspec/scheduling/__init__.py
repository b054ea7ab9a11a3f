"""Calls and requests: when each prompt and each step runs, with how many drafts, and in which thread."""
