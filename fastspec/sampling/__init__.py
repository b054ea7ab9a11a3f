"""Sampling distribution, verification rules and random numbers, as pure torch functions."""
