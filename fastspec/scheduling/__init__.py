"""Scheduling of calls and requests: when each prompt and step runs, with how many drafts, and in which thread."""
