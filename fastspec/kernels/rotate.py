"""Rotary embedding of separate query and key tensors, as modules of transformers have them, in one launch.

| argument | shape, dtype                            | notes                                  |
|----------|-----------------------------------------|----------------------------------------|
| q, k     | [B, H, Q, D] and [B, Hkv, Q, D]         | one dtype, any strides, D is even      |
| cos, sin | [B or 1, Q, D], their dtype             | any strides                            |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import told
from fastspec.kernels.common.launch import launch


@triton.jit
def _rotate_kernel(
    given,  # (q, k)
    strides,  # strides of q by row, head and token, and those of k
    angles,  # (cos, sin)
    steps,  # strides of cos by row and token, and those of sin
    rotated,  # (q, k) [B, Q, H, D], contiguous
    tokens,
    H: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotates one query or key head of one token. Heads from H on are key heads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, token, head = tl.program_id(0) // tokens, tl.program_id(0) % tokens, tl.program_id(1)
    half = tl.arange(0, BLOCK)
    inside = half < DIM // 2
    cos = angles[0] + row.to(tl.int64) * steps[0] + token * steps[1]
    sin = angles[1] + row.to(tl.int64) * steps[2] + token * steps[3]
    if head < H:
        at = given[0] + row.to(tl.int64) * strides[0] + head * strides[1] + token * strides[2]
        to = rotated[0] + (tl.program_id(0).to(tl.int64) * H + head) * DIM
        _rotate_head(at, cos, sin, to, half, inside, DIM)
    else:
        at = given[1] + row.to(tl.int64) * strides[3] + (head - H) * strides[4] + token * strides[5]
        to = rotated[1] + (tl.program_id(0).to(tl.int64) * KV_HEADS + head - H) * DIM
        _rotate_head(at, cos, sin, to, half, inside, DIM)


@triton.jit
def _rotate_head(at, cos, sin, to, half, inside, DIM: tl.constexpr):
    """Reads the DIM elements of a head at address `at`, rotates them, and writes them to address `to`.

    Each product is rounded to the dtype of `to`, and so is the sum of the products. `cos` and `sin` are the addresses
    of the token's DIM factors. `half` are offsets in half a head; `inside` masks valid ones.
    """
    HALF: tl.constexpr = DIM // 2
    kind: tl.constexpr = to.dtype.element_ty
    first = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + half, mask=inside, other=0.0).to(tl.float32)
    one = (first * tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    one -= (second * tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(to + half, one.to(kind), mask=inside)
    two = (second * tl.load(cos + HALF + half, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    two += (first * tl.load(sin + HALF + half, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(to + HALF + half, two.to(kind), mask=inside)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary embedding to q and k, as `Ops.rotate`, with a Triton kernel.

    The results [B, H, Q, D] are transposed views of contiguous [B, Q, H, D].

    Args:
        q, k, cos, sin: see `Ops.rotate`.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    batch, heads, tokens, dim = q.shape
    kv_heads = k.shape[1]
    same_form = all(each.dtype == q.dtype and each.stride(-1) == 1 for each in (q, k, cos, sin))
    if k.shape != (batch, kv_heads, tokens, dim) or cos.shape[1:] != (tokens, dim) or dim % 2 or not same_form:
        raise ValueError(
            f"q is {told(q)}, k {told(k)}, cos {told(cos)}; wanted [B, H, Q, D], [B, Hkv, Q, D] and [B, Q, D] of one "
            "dtype and of an even D"
        )
    if sin.shape != cos.shape or cos.shape[0] not in (1, batch):
        raise ValueError(f"cos is {told(cos)}, sin {told(sin)} for {batch} rows; wanted [B or 1, Q, D]")
    out = q.new_empty(batch, tokens, heads, dim), k.new_empty(batch, tokens, kv_heads, dim)
    if q.numel() > 0:
        shared = cos.shape[0] == 1  # all rows have the same angles
        steps = [step for each in (cos, sin) for step in (0 if shared else each.stride(0), each.stride(1))]
        launch(
            _rotate_kernel, (batch * tokens, heads + kv_heads),
            (q, k), (*q.stride()[:3], *k.stride()[:3]), (cos, sin), tuple(steps), out, tokens,
            H=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out[0].transpose(1, 2), out[1].transpose(1, 2)
