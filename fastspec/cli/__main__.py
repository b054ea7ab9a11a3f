"""The `fastspec` command, and `python -m fastspec.cli`, the same without an installed script."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while torch is imported ends it as it does later."""
    try:
        from fastspec.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="fastspec")


if __name__ == "__main__":
    main()
