"""The ops of the CPU."""
