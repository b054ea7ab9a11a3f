"""How long a test waits for what should come: a limit for what hangs, so that no slow machine fails a test."""

HANGS = 1500.0  # seconds; below the limit of a whole test, so that the message is the one of who waited
