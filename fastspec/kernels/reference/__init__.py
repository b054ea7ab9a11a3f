"""The torch definition of every op: runs where Triton does not, and is what the kernels are tested against."""

from fastspec.kernels.reference.attention import attend, paged_attention, rope, rotate, store_heads
from fastspec.kernels.reference.experts import experts, experts_normed, normed_logits, route, route_normed
from fastspec.kernels.reference.layer import attention_out, layer_tail, mlp
from fastspec.kernels.reference.linear import (
    add_norm,
    argmax,
    gelu_tanh,
    gelu_tanh_mul,
    keys_of,
    largest_of,
    linear,
    norm,
    packed_argmax,
    packed_linear,
    prefill_linear,
    rms_norm,
    silu_mul,
    tile_argmax,
    tile_linear,
)
from fastspec.kernels.reference.recurrent import delta_rule, gated, gated_norm, sigmoid
from fastspec.kernels.reference.sampled import sampled_commit, sampled_draw
from fastspec.kernels.reference.step import commit, embed, feed_rows, joined_norms, publish, verify_commit

__all__ = [
    "add_norm",
    "argmax",
    "attend",
    "attention_out",
    "commit",
    "delta_rule",
    "embed",
    "experts",
    "experts_normed",
    "feed_rows",
    "gated",
    "gated_norm",
    "gelu_tanh",
    "gelu_tanh_mul",
    "joined_norms",
    "keys_of",
    "largest_of",
    "layer_tail",
    "linear",
    "mlp",
    "norm",
    "normed_logits",
    "packed_argmax",
    "packed_linear",
    "paged_attention",
    "prefill_linear",
    "publish",
    "rms_norm",
    "rope",
    "rotate",
    "route",
    "route_normed",
    "sampled_commit",
    "sampled_draw",
    "sigmoid",
    "silu_mul",
    "store_heads",
    "tile_argmax",
    "tile_linear",
    "verify_commit",
]
