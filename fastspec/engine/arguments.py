"""Turns the arguments of `FastSpecGenerator` into checkpoints and settings, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from fastspec.adaptive.controller import AUTO
from fastspec.distributed.agreed import agreed_settings
from fastspec.distributed.ranks import Ranks
from fastspec.engine.draft_format import with_format
from fastspec.engine.settings import Caches, Settings, settings_of
from fastspec.errors import UnsupportedOption
from fastspec.inputs.values import flag
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.proposers.choose import check
from fastspec.proposers.interface import Proposer
from fastspec.sampling.rules import Verification

if TYPE_CHECKING:  # transformers' models are heavy to import, and a directory needs none of them
    from transformers import PreTrainedModel

_FLAGS = frozenset(["prefix_cache", "exact", "graphs", "compile"])  # a text such as "no" would be true

Source: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"


class PlanOptions(TypedDict, total=False):
    """Arguments of `FastSpecGenerator` that memory depends on: what `plan` takes. Defaults are `settings_of`'s."""

    proposer: Proposer | None
    verification: Verification
    num_speculative_tokens: int | str
    max_batch_size: int
    max_length: int | None
    page_size: int
    dtype: torch.dtype | str | None
    device: torch.device | str | None
    target_revision: str | None
    draft_revision: str | None
    target_quantization: str | None
    draft_quantization: str | None
    feature_layers: Sequence[int] | None
    draft_vocab: Sequence[int] | None
    kv_dtype: str | Sequence[str | None] | None
    prefix_cache: bool


def checked_arguments(
    target: Source, draft: Source | None, options: PlanOptions, ranks: Ranks | None = None, **modes: Any
) -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]:
    """Target and draft, and the settings of a generator of them; nothing is loaded or allocated.

    Args:
        target, draft, options: arguments of the constructor.
        ranks: that share the models; None: this process is alone.
        **modes: arguments of `settings_of` that no memory depends on, and `prefill_budget`.

    Raises:
        As the constructor.
    """
    equal = {"prefill_budget": modes.pop("prefill_budget", None)}  # of all ranks: it decides which passes there are
    sizes: dict[str, Any] = {**options}
    revisions = sizes.pop("target_revision", None), sizes.pop("draft_revision", None)
    target_format, draft_format = sizes.pop("target_quantization", None), sizes.pop("draft_quantization", AUTO)
    of_heads = sizes.pop("feature_layers", None), sizes.pop("draft_vocab", None)
    sizes["caches"] = Caches(**{name: sizes.pop(name) for name in Caches._fields if name in sizes})
    chooses_format = draft_format == AUTO
    formats = target_format, None if chooses_format else draft_format

    def pair() -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None]:
        _check(draft, options, modes)  # here, where other ranks are told of what this one refuses
        found, drafter = resolve_pair(target, draft, revisions, formats, *of_heads)
        if chooses_format:
            place = {name: sizes[name] for name in ("device", "dtype", "max_batch_size") if name in sizes}
            alone = ranks is None or not ranks.asked
            drafter = with_format(found, drafter, **place, ours=alone and not modes.get("compile"))
        return found, drafter

    if ranks is not None and ranks.asked:
        return agreed_settings(ranks, pair, equal, **sizes, **modes)
    found, drafter = pair()
    return found, drafter, settings_of(found, drafter, **sizes, **modes)


def _check(draft: Source | None, options: PlanOptions, modes: Mapping[str, Any]) -> None:
    """Refuses what can be told from the arguments alone."""
    check(options.get("proposer"), with_draft=draft is not None)
    for name, value in {**options, **modes}.items():
        if value is None and name in _FLAGS - {"graphs"}:  # None is no default here, and would be False
            raise ValueError(f"{name} must be True or False, got None; leave it out for the default")
        if name in _FLAGS:
            flag(name, value)
    rounded = options.get("draft_quantization")
    if draft is None and rounded not in (None, AUTO):
        raise UnsupportedOption(f"draft_quantization={rounded!r}, and there is no draft; leave it out")
