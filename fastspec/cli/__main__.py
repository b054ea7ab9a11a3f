"""`python -m fastspec.cli`: the `fastspec` command without an installed script."""

from fastspec.cli.app import app

app(prog_name="fastspec")
