"""DFlash2 heads: their configs in the layouts of z-lab and of speculators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastspec.models.checkpoints.tensor_source import TensorInfo
from fastspec.models.heads.config import refuse_unknown
from fastspec.models.heads.dflash_spec import KNOWN, BlockSettings, DFlashSpec, dflash_spec
from fastspec.models.heads.spec import NAMES, Recognised, TargetSizes

if TYPE_CHECKING:
    from fastspec.models.checkpoints.tensor_source import Use

BEFORE: Final = "candidate_selector.predecessor_codebook"
AFTER: Final = "candidate_selector.successor_codebook"
PROJECTION: Final = "candidate_selector.hidden_projection.weight"
CONVOLUTIONS: Final = ("attention_conv", "mlp_conv")
MAX_SIZE: Final = 8192


@dataclass(frozen=True, slots=True)
class DFlash2Spec(DFlashSpec):
    """Sizes and arithmetic of a DFlash2 head: a DFlash head with convolutions, and with a selector of candidates.

    Each of a layer's two parts, attention and MLP, has a convolution over the rows of a block before and after it:

        h = norm(x);  d = h Wkernel^T, as [2, taps, groups];  x = x + conv(part(conv(h, 0)), 1)
        conv(h, side) at row i = sum over taps t <= i of (base[side, t] + d[side, t] of row i, for each group) h_(i - t)

    The selector changes the logits u of the `candidates` most probable ids c of draft j, after the token before it:

        score(c) = u(c) + (P[token before] * norm(x_j) Wp^T) . S[c];  other ids have probability 0

    Candidates are taken one draft after the other. The publisher's search over several chains of drafts is not done.

    Attributes:
        taps: rows that a convolution reads.
        group: neighbouring elements that share d.
        rank: elements of a row of P and S.
        candidates: ids that are scored again.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16

    @property
    def uses(self) -> Mapping[str, Use]:
        """P and S are tables of rows."""
        return {BEFORE: "table", AFTER: "table"}


def dflash2_spec(
    found: Recognised,
    raw: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    target: TargetSizes,
    feature_layers: Sequence[int] | None,
    where: Path,
) -> DFlash2Spec:
    """Makes the spec of a DFlash2 head. For arguments and errors see `dflash_spec`."""
    base = dflash_spec(found, raw, infos, target, feature_layers, where)
    settings = BlockSettings.of(raw, where, NAMES["dflash2"])
    refuse_unknown(raw, "dflash_config", (*KNOWN, *_OWN), NAMES["dflash2"])
    own = {size: settings.whole(name, 1, MAX_SIZE) for name, size in _OWN.items()}
    hidden, known = base.hidden_size, target.vocab_size
    if hidden % own["group"]:
        settings.refuse("conv_group_size", f"a divisor of hidden_size={hidden}")
    if own["taps"] > base.block_size:
        settings.refuse("conv_kernel_size", f"at most block_size={base.block_size}")
    if own["candidates"] > base.vocab_size:
        settings.refuse("selector_top_k", f"at most the {base.vocab_size} ids that it drafts")
    shapes: dict[str, tuple[int, ...]] = {
        BEFORE: (known, own["rank"]),
        AFTER: (known, own["rank"]),
        PROJECTION: (own["rank"], hidden),
    }
    for layer in range(base.num_layers):
        for which in CONVOLUTIONS:
            shapes[f"layers.{layer}.{which}.base_kernel"] = (2, own["taps"], hidden)
            rows = 2 * own["taps"] * (hidden // own["group"])
            shapes[f"layers.{layer}.{which}.kernel_projection.weight"] = (rows, hidden)
    return DFlash2Spec.extending(base, shapes, **own)


_OWN: Final[Mapping[str, str]] = {
    "conv_kernel_size": "taps",
    "conv_group_size": "group",
    "selector_rank": "rank",
    "selector_top_k": "candidates",
}
