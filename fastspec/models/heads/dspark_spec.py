"""Makes specs of DSpark heads from their configs in the layouts of DeepSpec and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastspec.errors import CheckpointError
from fastspec.models.heads.config import refuse_unknown
from fastspec.models.heads.dflash_spec import KNOWN, BlockSettings, DFlashSpec, dflash_spec
from fastspec.models.heads.spec import NAMES, StoredHead

if TYPE_CHECKING:
    from fastspec.models.checkpoints.tensor_source import Use

BEFORE: Final = "markov_head.markov_w1.weight"
AFTER: Final = "markov_head.markov_w2.weight"
MAX_RANK: Final = 8192
_OWN: Final = (
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("confidence_head_alpha", "dspark_bonus_anchor"),
)


@dataclass(frozen=True, slots=True)
class DSparkSpec(DFlashSpec):
    """Sizes and arithmetic of a DSpark head: a DFlash head in which a draft token also depends on the token before it.

        logits of draft token j = scale * (norm(x_j) Whead^T + W2 W1[token before it])

    W1 has a row for each id of the target, W2 for each id of the head. The tensors of the confidence head, which
    estimates the probability of acceptance, are not read.

    Attributes:
        rank: number of elements of a row of W1 and W2.
    """

    rank: int = 256

    @property
    def uses(self) -> Mapping[str, Use]:
        """Use of W1, whose rows are read like those of an embedding, and of W2, whose product is added to logits."""
        return {BEFORE: "table", AFTER: "head"}

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that are not read: those of the confidence head, and `mask_embedding`.

        The embedding of the token `mask_id` is used instead of `mask_embedding`.
        """
        return ("confidence_head.proj.weight", "confidence_head.proj.bias", "mask_embedding")


def dspark_spec(head: StoredHead) -> DFlashSpec:
    """Makes the spec of a DSpark head. If its `markov_rank` is 0, the result is the spec of a DFlash head.

    For errors see `dflash_spec`.
    """
    base, infos, target = dflash_spec(head), head.infos, head.target
    settings = BlockSettings.of(head.raw, head.where, NAMES["dspark"])
    refuse_unknown(head.raw, "dflash_config", (*KNOWN, *_OWN), NAMES["dspark"])
    stored = infos[BEFORE].shape if BEFORE in infos else (target.vocab_size, 0)
    rank = settings.whole("markov_rank", 0, MAX_RANK, stored[-1])
    if rank == 0:
        return base
    if settings.get("markov_head_type") not in (None, "vanilla"):
        settings.refuse("markov_head_type", "'vanilla', in which only the token before counts")
    if settings.get("final_logit_softcapping") not in (None, 0):
        settings.refuse("final_logit_softcapping", "none, for engines differ in where it is applied")
    if stored[0] < target.vocab_size:
        raise CheckpointError(
            f"{BEFORE} has {stored[0]} rows, and {target.name} {target.vocab_size} ids: wanted a row of each"
        )
    shapes = {BEFORE: (stored[0], rank), AFTER: (base.vocab_size, rank)}
    return DSparkSpec.extending(base, shapes, rank=rank)
