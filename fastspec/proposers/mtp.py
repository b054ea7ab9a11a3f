"""The proposer of an MTP layer."""

from __future__ import annotations

from fastspec.proposers.chain import ChainDrafts


class MtpDrafts(ChainDrafts):
    """Drafts with the MTP layer of the target's own checkpoint; see `ChainDrafts`."""

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        ids = f", which drafts {self.model.vocab_size} of {self._target.vocab_size} ids" if self._map else ""
        return f"the checkpoint's own {self.model.head.found}{ids}"
