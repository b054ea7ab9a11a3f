"""The torch definition of every op: runs where Triton does not, and is what the kernels are tested against."""

from fastspec.kernels.reference.attention import attend, paged_attention, rope
from fastspec.kernels.reference.layer import between
from fastspec.kernels.reference.linear import (
    linear,
    packed_linear,
    packed_pick,
    pick,
    prefill_linear,
    rms_norm,
    silu_mul,
    tile_linear,
    tile_pick,
)
from fastspec.kernels.reference.sampled import sampled_commit, sampled_draw
from fastspec.kernels.reference.step import commit, embed, feed_rows, publish, verify_commit

__all__ = [
    "attend",
    "between",
    "commit",
    "embed",
    "feed_rows",
    "linear",
    "packed_linear",
    "packed_pick",
    "paged_attention",
    "pick",
    "prefill_linear",
    "publish",
    "rms_norm",
    "rope",
    "sampled_commit",
    "sampled_draw",
    "silu_mul",
    "tile_linear",
    "tile_pick",
    "verify_commit",
]
