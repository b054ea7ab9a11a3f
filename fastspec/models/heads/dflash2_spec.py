"""Makes specs of DFlash2 heads from their configs in the layouts of z-lab and of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastspec.models.heads.config import refuse_unknown
from fastspec.models.heads.dflash_spec import KNOWN, BlockSettings, DFlashSpec, dflash_spec
from fastspec.models.heads.spec import NAMES, StoredHead

if TYPE_CHECKING:
    from fastspec.models.checkpoints.tensor_source import Use

BEFORE: Final = "candidate_selector.predecessor_codebook"
AFTER: Final = "candidate_selector.successor_codebook"
PROJECTION: Final = "candidate_selector.hidden_projection.weight"
CONVOLUTIONS: Final = ("attention_conv", "mlp_conv")
MAX_SIZE: Final = 8192


@dataclass(frozen=True, slots=True)
class DFlash2Spec(DFlashSpec):
    """Sizes and arithmetic of a DFlash2 head: a DFlash head with convolutions and a selector of candidate tokens.

    There is a convolution before and one after each layer's attention and MLP, here called `part`. A convolution runs
    over the tokens i = 0, 1, .. of a block:

        h = norm(x);  d = h Wkernel^T, as [2, taps, groups];  x = x + conv(part(conv(h, 0)), 1)
        conv(h, side)_i = sum over taps t <= i of (base[side, t] + d_i[side, t]) h_(i - t)

    `side` is 0 before a part and 1 after it. d has one value for each group of neighbouring elements of h.

    The selector changes the logits u of draft token j for its most probable ids c, the candidates. Their scores depend
    on the token before the draft token:

        score(c) = u(c) + (P[token before] * norm(x_j) Wp^T) . S[c];  other ids have probability 0

    The draft tokens of a step are selected one after the other. The publisher also has a search over several sequences
    of draft tokens, which is not implemented.

    Attributes:
        taps: number of tokens that a convolution reads, its kernel size.
        group: number of neighbouring elements of h that use the same value of d.
        rank: number of elements of a row of P and S.
        candidates: number of candidates of each draft token.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16

    @property
    def uses(self) -> Mapping[str, Use]:
        """Use of the matrices P and S, whose rows are read like those of an embedding."""
        return {BEFORE: "table", AFTER: "table"}


def dflash2_spec(head: StoredHead) -> DFlash2Spec:
    """Makes the spec of a DFlash2 head. For errors see `dflash_spec`."""
    base = dflash_spec(head)
    settings = BlockSettings.of(head.raw, head.where, NAMES["dflash2"])
    refuse_unknown(head.raw, "dflash_config", (*KNOWN, *_OWN), NAMES["dflash2"])
    own = {size: settings.whole(name, 1, MAX_SIZE) for name, size in _OWN.items()}
    hidden, known = base.hidden_size, head.target.vocab_size
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
