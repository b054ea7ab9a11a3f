"""The proposer of an EAGLE-3 head."""

from __future__ import annotations

from fastspec.proposers.chain import ChainDrafts


class Eagle3Drafts(ChainDrafts):
    """Drafts with an EAGLE-3 head; see `ChainDrafts`."""

    article = "an"
