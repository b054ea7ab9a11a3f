"""Builds the input of a forward pass in one launch: token ids, positions, and the mask of tokens whose K/V are stored.

    position[b, i] = lengths[b] + first + i
    id[b, i]       = tokens[b, position]                         if position < lengths[b]
                     draft_tokens[b, position - lengths[b]]      otherwise

| argument     | shape, dtype  | notes                                                                          |
|--------------|---------------|--------------------------------------------------------------------------------|
| tokens       | [B, T] int64  | rows may be views of longer rows; so may those of draft_tokens                 |
| lengths      | [B] int64     |                                                                                |
| finish       | [B] int64     | 0: the row is running                                                          |
| draft_tokens | [B, K] int64  | read from column max(first, 0) to column first + queries - 1                   |
| draft_counts | [B] int64     | written if given: number of draft tokens for which the draft model has room    |
| id_map       | [vocab] int64 | if given, id t is fed as id_map[t]                                            |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch, new_ids


@triton.jit
def fed(
    row,
    query,
    in_range,
    tokens_ptr,
    lengths_ptr,
    finish_ptr,
    drafts_ptr,
    counts_ptr,  # None: this is not a draft model's first pass of a step
    tokens_stride,
    tokens_width,
    drafts_stride,
    first,
    limit,
    vocab,
    num_drafts,
):
    """Returns (id, position, write mask) of the tokens with indices `query` among a row's tokens in this pass.

    `query` is a scalar or a block; `in_range` masks its valid indices. The write mask is True if K and V of the token
    are stored. `row` is the index of the row in the batch. For the other arguments see `Ops.feed_rows`.
    """
    length = tl.load(lengths_ptr + row)
    running = tl.load(finish_ptr + row) == 0
    position = length + first + query
    known = first + query < 0
    # valid lengths are in range; clamped because the kernel cannot check these values
    at = tl.minimum(tl.maximum(position, 0), tokens_width - 1)
    token = tl.load(tokens_ptr + row * tokens_stride + at, mask=known & in_range, other=0)
    draft = tl.load(drafts_ptr + row * drafts_stride + first + query, mask=(first + query >= 0) & in_range, other=0)
    token = tl.where(known, token, draft)
    token = tl.where((token >= 0) & (token < vocab), token, 0)
    write_mask = running & (position >= 0) & (position < limit)
    if counts_ptr is not None:
        write_mask = write_mask & (num_drafts > 0) & (length <= limit)
    return token, tl.maximum(position, 0), write_mask


@triton.jit
def count_drafts(row, lengths_ptr, counts_ptr, limit, num_drafts):
    """Stores at `counts_ptr` the number of draft tokens that the draft model may make for a row, at most `num_drafts`.

    To make n draft tokens, the draft model stores K and V up to position lengths[row] + n - 2. This position must be
    below `limit`.
    """
    room = limit - tl.load(lengths_ptr + row) + 1  # computed in this order to stay in 64 bits
    tl.store(counts_ptr + row, tl.minimum(tl.maximum(room, 0), num_drafts))


@triton.jit(do_not_specialize=["queries", "first", "limit", "num_drafts"])
def _feed_kernel(
    tokens_ptr,
    lengths_ptr,
    finish_ptr,
    drafts_ptr,
    counts_ptr,
    id_map_ptr,
    ids_ptr,
    positions_ptr,
    writes_ptr,
    tokens_stride,
    tokens_width,
    drafts_stride,
    queries,
    first,
    limit,
    vocab,
    num_drafts,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    query = tl.arange(0, QUERIES)
    in_range = query < queries
    token, position, write_mask = fed(
        row,
        query,
        in_range,
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
    if id_map_ptr is not None:
        token = tl.load(id_map_ptr + token, mask=in_range, other=0)
    out = row * queries + query
    tl.store(ids_ptr + out, token, mask=in_range)
    tl.store(positions_ptr + out, position, mask=in_range)
    tl.store(writes_ptr + out, write_mask, mask=in_range)
    if counts_ptr is not None:
        count_drafts(row, lengths_ptr, counts_ptr, limit, num_drafts)


def feed_rows(
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
    id_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Builds the token ids, positions and write mask of a pass, as `Ops.feed_rows`, with a Triton kernel.

    Raises:
        ValueError: a tensor's rows are not contiguous, `draft_tokens` has fewer columns than the pass reads, or
            `id_map` has not `vocab` elements.
    """
    check_feed(tokens, lengths, finish, draft_tokens, draft_counts, first + queries)
    if id_map is not None and (id_map.shape != (vocab,) or not id_map.is_contiguous()):
        raise ValueError(f"id_map is {tuple(id_map.shape)}; wanted contiguous [{vocab}]: an id for each id to feed")
    batch, device = lengths.shape[0], lengths.device
    # new_ids: torch uses them as indices of tables, also within `compiling()`
    ids, positions = (new_ids(batch * queries, device).view(batch, queries) for _ in range(2))
    write_mask = torch.empty(batch, queries, dtype=torch.bool, device=device)
    launch(
        _feed_kernel,
        (batch,),
        tokens,
        lengths,
        finish,
        draft_tokens,
        draft_counts,
        id_map,
        ids,
        positions,
        write_mask,
        tokens.stride(0),
        tokens.shape[1],
        draft_tokens.stride(0),
        queries,
        first,
        limit,
        vocab,
        num_drafts,
        QUERIES=triton.next_power_of_2(queries),
        num_warps=1,
    )
    return ids, positions, write_mask


def check_feed(
    tokens: Tensor, lengths: Tensor, finish: Tensor, draft_tokens: Tensor, draft_counts: Tensor | None, drafts: int
) -> None:
    """Raises ValueError for layouts of tensors that `_feed_kernel` would misread.

    drafts: number of columns of `draft_tokens` that the kernel reads.
    """
    columns = (lengths, finish) if draft_counts is None else (lengths, finish, draft_counts)
    if tokens.stride(1) != 1 or any(column.stride(0) != 1 for column in columns):
        raise ValueError("the rows of tokens, and lengths, finish and draft_counts, must be contiguous")
    if drafts > draft_tokens.shape[1] or (drafts > 0 and draft_tokens.stride(1) != 1):
        raise ValueError(f"draft_tokens must hold contiguous rows of at least {drafts} drafts")
