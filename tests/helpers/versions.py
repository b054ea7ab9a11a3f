"""Which transformers the tests run with, asked in one place: what an older one lacks is skipped by this alone."""

from __future__ import annotations

from typing import Final

import transformers
from packaging.version import Version

OLDER: Final = Version(transformers.__version__) < Version("5.24")
"""Than the one that docs/models.md was made with."""
