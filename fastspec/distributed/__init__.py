"""Splits one model over several processes: who has which part, their exchanges, and the handling of failures."""
