"""Finds the models of a generator and checks its arguments, before anything is loaded."""

from __future__ import annotations

from typing import TypeAlias

from fastspec.config import Config, Source
from fastspec.distributed.rank_settings import agreed_settings
from fastspec.distributed.ranks import Ranks
from fastspec.engine.draft_format import with_format
from fastspec.engine.settings import Settings, settings_of
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint

Pair: TypeAlias = "tuple[Checkpoint, Checkpoint | HeadCheckpoint | None]"


def checked_arguments(
    target: Source, draft: Source | None, config: Config, ranks: Ranks
) -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]:
    """Returns target, draft and settings of a generator. Loads and allocates nothing.

    Args:
        target, draft, config: arguments of the constructor of `FastSpecGenerator`. draft is None if it was not given.
        ranks: the processes that share the models.

    Raises:
        The errors of the constructor of `FastSpecGenerator`.
    """

    def pair() -> Pair:
        """Checks the arguments and finds target and draft."""
        config.check(with_draft=draft is not None)  # inside `pair`, so that the other ranks get this error, too
        revisions = config.target_revision, config.draft_revision
        found, drafter = resolve_pair(
            target, draft, revisions, config.formats, config.feature_layers, config.draft_vocab
        )
        if config.chooses_format:
            drafter = with_format(found, drafter, config, alone=not ranks.asked)
        return found, drafter

    if ranks.asked:
        return agreed_settings(ranks, pair, config)
    found, drafter = pair()
    return found, drafter, settings_of(found, drafter, config)
