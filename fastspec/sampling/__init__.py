"""The sampling distribution, the verification rules and the randomness, as pure torch functions."""
