"""Command line: the commands of `fastspec`."""
