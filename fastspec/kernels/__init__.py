"""Ops of the step. `reference` holds the torch definition of each."""
