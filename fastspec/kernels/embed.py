"""Rows of the embedding, alone or together with the rows that a pass feeds (feed_rows.py): one launch.

| argument | shape, dtype                                                   | notes                       |
|----------|----------------------------------------------------------------|-----------------------------|
| weight   | [V, H], or packed [V/16, H/32, 16, 32]: 16 rows by 32 columns  | contiguous, any float dtype |
| ids      | [B, Q] int64                                                   | contiguous; clamped to the table |

The other arguments are those of feed_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.device import has_pdl, launch
from fastspec.kernels.feed_rows import check_feed, count_drafts, fed

BLOCK, NUM_WARPS = 1024, 4  # columns per program: 16 bytes a thread


@triton.jit
def _copy_row(weight_ptr, out_ptr, token, out_row, rows, width, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Columns program_id(1) * BLOCK.. of the table's row `token`."""
    token = tl.minimum(tl.maximum(token, 0), rows - 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        at = token // 16 * 16 * width + token % 16 * 32 + column // 32 * 512 + column % 32
    else:
        at = token * width + column
    value = tl.load(weight_ptr + at, mask=column < width, other=0.0)
    tl.store(out_ptr + out_row * width + column, value, mask=column < width)


@triton.jit
def _embed_kernel(
    weight_ptr,
    ids_ptr,
    out_ptr,
    rows,
    width,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    _copy_row(weight_ptr, out_ptr, tl.load(ids_ptr + row), row, rows, width, PACKED, BLOCK)


@triton.jit(do_not_specialize=["queries", "first", "limit", "num_drafts"])
def _feed_embed_kernel(
    weight_ptr,
    tokens_ptr,
    lengths_ptr,
    finish_ptr,
    drafts_ptr,
    counts_ptr,
    out_ptr,
    positions_ptr,
    writes_ptr,
    rows,
    width,
    tokens_stride,
    tokens_width,
    drafts_stride,
    queries,
    first,
    limit,
    vocab,
    num_drafts,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row // queries
    token, position, writes = fed(
        row,
        out_row % queries,
        True,
        tokens_ptr,
        lengths_ptr,
        finish_ptr,
        drafts_ptr,
        counts_ptr,
        tokens_stride,
        tokens_width,
        drafts_stride,
        first,
        limit,
        vocab,
        num_drafts,
    )
    if tl.program_id(1) == 0:
        tl.store(positions_ptr + out_row, position)
        tl.store(writes_ptr + out_row, writes)
        if counts_ptr is not None:
            count_drafts(row, lengths_ptr, counts_ptr, limit, num_drafts)
    _copy_row(weight_ptr, out_ptr, token, out_row, rows, width, PACKED, BLOCK)


def embed(weight: Tensor, ids: Tensor) -> Tensor:
    """As `reference.embed`, which defines it.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    rows, width, packed = table_shape(weight)
    if not ids.is_contiguous():
        raise ValueError("ids must be contiguous")
    out = torch.empty(*ids.shape, width, dtype=weight.dtype, device=weight.device)
    pdl = has_pdl(weight.device)
    launch(
        _embed_kernel,
        (ids.numel(), triton.cdiv(width, BLOCK)),
        weight,
        ids,
        out,
        rows,
        width,
        PACKED=packed,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )
    return out


def feed_embed(
    weight: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    finish: Tensor,
    draft_tokens: Tensor,
    *,
    first: int,
    queries: int,
    limit: int,
    vocab: int,
    draft_counts: Tensor | None = None,
    num_drafts: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.feed_embed`, which defines it.

    Raises:
        ValueError: a tensor's layout is not as above, or fewer drafts are there than the pass feeds.
    """
    rows, width, packed = table_shape(weight)
    check_feed(tokens, lengths, finish, draft_tokens, draft_counts, first + queries)
    batch, device = lengths.shape[0], lengths.device
    out = torch.empty(batch, queries, width, dtype=weight.dtype, device=device)
    positions = torch.empty(batch, queries, dtype=torch.int64, device=device)
    writes = torch.empty(batch, queries, dtype=torch.bool, device=device)
    pdl = has_pdl(device)
    launch(
        _feed_embed_kernel,
        (batch * queries, triton.cdiv(width, BLOCK)),
        weight,
        tokens,
        lengths,
        finish,
        draft_tokens,
        draft_counts,
        out,
        positions,
        writes,
        rows,
        width,
        tokens.stride(0),
        tokens.shape[1],
        draft_tokens.stride(0),
        queries,
        first,
        limit,
        vocab,
        num_drafts,
        PACKED=packed,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )
    return out, positions, writes


def table_shape(weight: Tensor) -> tuple[int, int, bool]:
    """(rows, columns, whether packed) of an embedding table."""
    if not weight.is_contiguous():
        raise ValueError("the embedding must be contiguous")
    if weight.dim() == 2:
        return weight.shape[0], weight.shape[1], False
    return weight.shape[0] * 16, weight.shape[1] * 32, True
