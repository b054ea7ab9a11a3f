"""Scheduling of requests: when each prefill and decode step runs, with how many draft tokens, and in which thread."""
