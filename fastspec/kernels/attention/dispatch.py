"""Attention of a layer, for CUDA, in one launch: head norms, rotary embedding, K/V append, attention.

    out[b, i, h] = sum_j softmax_j(q[b, i, h] . k[j] / sqrt(D)) v[j],  j <= positions[b, i]
                                                       and with a window W also j > positions[b, i] - W

| argument     | shape, dtype                                   | notes                                             |
|--------------|------------------------------------------------|---------------------------------------------------|
| qkv          | [B, Q, (H + 2 Hkv) D] bf16, fp16 or fp32       | contiguous                                        |
| cos, sin     | [positions, D/2] fp32                          | contiguous                                        |
| keys, values | [num_pages, page_size, Hkv, D], as qkv         | contiguous; may exceed 2^31 elements              |
| block_table  | [B, P] int64                                   | rows may be views of a longer table               |
| positions    | [B, Q] int64                                   | >= 0, ascending in a row where `write_mask`
 |
| writes       | [B, Q] bool                                    | K/V of other rows are not stored, outputs are junk |

A decoding pass (Q <= MAX_SPLIT_QUERIES) splits the keys: program (t, s) holds query tile t of one row and kv head and
the keys at positions s * split_keys and up. It stores the new K/V that fall among its keys, reads all its keys back
from the cache in blocks, and leaves the average of what it saw and its weight. The last program of a tile to arrive,
by an integer counter, combines these in ascending order: FAN splits to a group, then the groups. What
`uses_fragments` names does the same out of registers and without groups: by way of plan_short.py as
decode_mma.py or, with several splits to a program, as decode_mma_batch.py; rows at `plan_long.FROM` and later, by
way of plan_long.py, as decode_tma_sm90.py. A pass that has room for both launches both, and each leaves the other's
rows alone. `_decode_kernel` here is for all else, and for all rows of a cache with room beyond FROM where
decode_tma_sm90.py cannot run. A prompt chunk (more rows) appends in one launch
(rope.py) and attends in a second (prefill.py).

Row invariance. The bits of a row are those of the row alone: which kernel runs and how it cuts keys depends on the
model and on the row's position, for `_decode_kernel` on the room of its cache; blocks and splits lie at absolute
positions, sums over them are taken in ascending order, and a block or split that is masked for a row is an exact no-op
for it. Nothing is fused behind the compiler's back (enable_fp_fusion=False): every product is rounded where it stands,
so that K has the same bits whichever kernel writes it, and the torch twin's.

Programmatic launch (PDL): the next kernel may start at once. Before its wait none of these kernels reads what the
product before it writes. `_decode_kernel` peeks at positions and table there, past L1, to bring keys into L2 while that
product ends; a stale peek prefetches the wrong lines and changes nothing. The others take them for good, and K and V
of earlier passes with them: `attend` says what that asks of its caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention import plan_long, plan_short
from fastspec.kernels.attention.decode import FAN, attended, combine, finish, keep, peek
from fastspec.kernels.attention.prefill import LOG2E, MAX_REGISTERS, Launch, paged_attention
from fastspec.kernels.attention.rope import NEW_ROWS, append, rope, turned
from fastspec.kernels.common.checks import check_heads
from fastspec.kernels.common.launch import has_pdl, launch
from fastspec.kernels.common.packing import BLOCK
from fastspec.shapes import KEY_BLOCK, UNTILED, Tiling

MAX_SPLIT_QUERIES = 17  # more query tokens are a prompt chunk, which fills the device without splitting keys

# by (element size, head_dim padded to a power of two); never by the number of rows
LAUNCH = {
    (2, 16): Launch(32, 64, 4, 3),
    (2, 32): Launch(32, 64, 4, 3),
    (2, 64): Launch(32, 64, 4, 3),
    (2, 128): Launch(32, 64, 4, 3),
    (2, 256): Launch(16, 32, 4, 2),
    (4, 16): Launch(32, 16, 4, 1),
    (4, 32): Launch(32, 16, 4, 1),
    (4, 64): Launch(32, 16, 4, 1),
    (4, 128): Launch(16, 16, 8, 1),
    (4, 256): Launch(16, 16, 8, 1),
}
FRAGMENT_DIMS = (64, 128)  # head_dim that plan_short.py and plan_long.py are used for


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "num_pairs",
        "split_keys",
        "table_stride",
        "table_width",
        "num_pages",
        "num_angles",
    ]
)
def _decode_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    write_ptr,
    out_ptr,  # [B, Q, H * D]
    partial_ptr,  # fp32 [B * Hkv, splits + groups, Q * GROUP, D]: averages of values; then [B * Hkv, splits + groups,
    # Q * GROUP]: log2 of the sums of their weights
    count_ptr,  # int32 [B * Hkv * tiles, 1 + groups]: arrivals; zero between launches
    split_keys,
    num_queries,
    num_pairs,  # B * Hkv
    table_stride,
    table_width,
    num_pages,
    num_angles,
    scale,  # of scores, times log2(e)
    eps,
    WINDOW: tl.constexpr,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(1)
    rows = num_queries * GROUP  # of one kv head
    tiles = tl.cdiv(rows, ROWS)
    tile, pair = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    start = split * split_keys
    if PDL:
        gdc_launch_dependents()
        peek(
            key_ptr, value_ptr, table_ptr, position_ptr, batch, kv_head, start, num_queries, split_keys,
            table_stride, table_width, num_pages, WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE,
        )  # fmt: skip
        gdc_wait()

    row = tile * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    at = batch * num_queries + row // GROUP
    # a padding row sees nothing
    position = tl.load(position_ptr + at, mask=valid, other=-1)
    column = tl.arange(0, BLOCK_D // 2)
    mask = valid[:, None] & (column < HEAD_DIM // 2)[None, :]
    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    source = qkv_ptr + head[:, None] + column[None, :]
    q1 = tl.load(source, mask=mask, other=0.0)
    q2 = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0)

    # the splits that this tile looks into; positions beyond the launch are clamped to it
    newest = tl.minimum(tl.max(position, axis=0), tl.num_programs(1) * split_keys - 1).to(tl.int32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.min(tl.where(valid, position, newest), axis=0) - WINDOW + 1
        oldest = tl.minimum(tl.maximum(oldest, 0), newest).to(tl.int32)
    first, last = oldest // split_keys, newest // split_keys
    if (split < first) | (split > last):
        return
    begin, stop = tl.maximum(start, oldest // BLOCK_N * BLOCK_N), tl.minimum(start + split_keys, newest + 1)

    table_ptr += batch * table_stride
    q1, q2 = turned(q1, q2, position, valid, cos_ptr, sin_ptr, q_norm_ptr, num_angles, eps, HEAD_DIM, BLOCK_D, NORM)
    append(
        qkv_ptr, cos_ptr, sin_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr, write_ptr,
        batch, kv_head, 0, start, stop, num_queries, num_angles, table_width, num_pages, eps,
        KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, NORM,
    )  # fmt: skip
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # apart: what precedes is free of branches
        append(
            qkv_ptr, cos_ptr, sin_ptr, k_norm_ptr, key_ptr, value_ptr, table_ptr, position_ptr, write_ptr,
            batch, kv_head, first_row, start, stop, num_queries, num_angles, table_width, num_pages, eps,
            KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, PAGE_SIZE, NORM,
        )  # fmt: skip
    tl.debug_barrier()  # what other threads stored is read below
    mean, weight = attended(
        q1, q2, key_ptr, value_ptr, table_ptr, position, kv_head, begin, stop, table_width, num_pages, scale,
        WINDOW, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, ROWS, BLOCK_N, STAGES,
    )  # fmt: skip

    if first == last:
        finish(out_ptr, batch, kv_head, row, num_queries, mean, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)
        return
    splits = tl.num_programs(1)
    groups = tl.cdiv(splits, FAN)
    nodes = num_pairs.to(tl.int64) * (splits + groups) * rows
    base = pair * (splits + groups) * rows
    mean_ptr, weight_ptr = partial_ptr + base * HEAD_DIM, partial_ptr + (nodes * HEAD_DIM + base)
    count_ptr += tl.program_id(0) * (1 + groups)
    keep(mean_ptr, weight_ptr, split * rows + row, valid, mean, weight, HEAD_DIM, BLOCK_D)
    group = split // FAN
    begin, end = tl.maximum(first, group * FAN), tl.minimum(last, group * FAN + FAN - 1)
    tl.debug_barrier()  # the counter is raised by one thread, for all
    if tl.atomic_add(count_ptr + 1 + group, 1, sem="acq_rel") != end - begin:
        return
    tl.store(count_ptr + 1 + group, 0)
    tl.debug_barrier()
    only = first // FAN == last // FAN
    AT_ONCE: tl.constexpr = min(ROWS, 512 // BLOCK_D)  # rows of which FAN averages are held
    row_start, row_stop = tile * ROWS, tl.minimum(rows, tile * ROWS + ROWS)
    combine(
        mean_ptr, weight_ptr, 0, begin, end, splits + group, only, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE,
    )  # fmt: skip
    if only:
        return
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") != last // FAN - first // FAN:
        return
    tl.store(count_ptr, 0)
    tl.debug_barrier()
    combine(
        mean_ptr, weight_ptr, splits, first // FAN, last // FAN, 0, True, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, AT_ONCE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttendWork:
    """Memory that the decoding passes of one model work in, one pass at a time.

    Attributes:
        split_keys: keys of one partial sum of `_decode_kernel`; part of what the bits of a row depend on.
        counters: int32, zero between launches.
        partials: fp32.
    """

    split_keys: int
    counters: Tensor
    partials: Tensor


def split_keys_for(max_positions: int) -> int:
    """Keys of a partial sum of `_decode_kernel` in a cache of rows of `max_positions`: never by how many are in use."""
    if max_positions <= 4096:
        return 128
    return 256 if max_positions <= 8192 else 512


def _sizes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> tuple[int, int]:
    """Elements of (counters, partials)."""
    num_heads, kv_heads, dim = heads
    room, split_keys = triton.cdiv(max_positions, KEY_BLOCK) * KEY_BLOCK, split_keys_for(max_positions)
    splits = triton.cdiv(room, split_keys)
    groups = triton.cdiv(splits, FAN.value)
    tiles = max_rows * kv_heads * triton.cdiv(num_heads // kv_heads, 8)  # no tile has fewer than 8 rows
    sums = splits + groups if splits > 1 else 0
    sums = max(sums, plan_short.sums(*plan_short.near_and_far(0, room)))
    return tiles * (1 + groups), max_rows * num_heads * sums * (dim + 1)


def attend_work(device: torch.device, max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> AttendWork:
    """What `attend` needs for decoding passes of a model.

    Args:
        device: of the model.
        max_rows: B * Q of the largest decoding pass.
        max_positions: that the block table has room for.
        heads: (query heads, key heads, head_dim).
    """
    counters, partials = _sizes(max_rows, max_positions, heads)
    return AttendWork(
        split_keys_for(max_positions),
        torch.zeros(counters, dtype=torch.int32, device=device),
        torch.empty(partials, dtype=torch.float32, device=device),
    )


def attend_work_bytes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> int:
    """Bytes of `attend_work`."""
    return 4 * sum(_sizes(max_rows, max_positions, heads))


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_blocks: int,
    first_block: int = 0,
    window: int | None,
    work: AttendWork,
    tiling: Tiling = UNTILED,
    regroup: bool = False,
) -> Tensor:
    """As `reference.attend`, which defines it; `tiling` has no say here, and nothing is written for page 0.

    Args:
        regroup: the result may be [B, Q, H * D / 64, 64], regrouped: see `packing.in_order`. It is where the kernels
            of plan_short.py run alone.

    Positions, writes, the table and the cache are read before the kernel waits for the one that makes `qkv`: all work
    on them must have ended before that one began. `embed` sees to it: nothing of a pass begins before what it feeds is
    there.

    Raises:
        ValueError: shapes, dtypes or layouts that are not as above, or `work` is too small for the pass.
    """
    qkv, positions, write_mask = qkv.contiguous(), positions.contiguous(), write_mask.contiguous()
    if q_norm is None or k_norm is None:
        q_norm = k_norm = None
    if positions.shape[1] > MAX_SPLIT_QUERIES:
        query = rope(
            qkv, cos, sin, keys, values, block_table, positions, write_mask,
            num_heads=num_heads, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        out = paged_attention(
            query, keys, values, block_table, positions, num_blocks=num_blocks, window=window, out=query
        )
        return out.flatten(2)
    tensors = (qkv, cos, sin, q_norm, k_norm, keys, values, block_table, positions, write_mask)
    check_heads(*tensors, num_heads)
    blocks = first_block, num_blocks
    return _decode(*tensors, num_heads=num_heads, eps=eps, blocks=blocks, window=window, work=work, regroup=regroup)


def uses_fragments(device: torch.device, dtype: torch.dtype, dim: int, page_size: int, capacity: int) -> bool:
    """Whether a model's decoding passes run out of registers, from sm_90 on: never by what a pass holds.

    Args:
        capacity: positions that a row's block table has room for. Where some lie at `plan_long.FROM` or later, the
            device and the pages must allow decode_tma_sm90.py, which decodes those.
    """
    fits = dtype.itemsize == 2 and dim in FRAGMENT_DIMS
    return fits and has_pdl(device) and (capacity <= plan_long.FROM or plan_long.rings(device, page_size))


def tile_launch(dtype: torch.dtype, dim: int) -> tuple[dict[str, int], dict[str, Any]]:
    """(constants, options) of `_decode_kernel`."""
    block_d = max(16, triton.next_power_of_2(dim))
    entry = LAUNCH[dtype.itemsize, block_d]
    tiles = {"ROWS": entry.rows, "BLOCK_N": entry.block_n, "STAGES": entry.num_stages}
    return {"HEAD_DIM": dim, "BLOCK_D": block_d, **tiles}, {"num_warps": entry.num_warps, "maxnreg": MAX_REGISTERS}


def _decode(
    *tensors: Any,
    num_heads: int,
    eps: float,
    blocks: tuple[int, int],
    window: int | None,
    work: AttendWork,
    regroup: bool,
) -> Tensor:
    qkv, cos, q_norm, keys, block_table, positions = (tensors[i] for i in (0, 1, 3, 5, 7, 8))
    batch, num_queries = positions.shape
    num_pages, page_size, kv_heads, dim = keys.shape
    group = num_heads // kv_heads
    sizes: tuple[float, ...] = (block_table.stride(0), block_table.shape[1], num_pages, cos.shape[0])
    sizes = (num_queries, batch * kv_heads, *sizes, dim**-0.5 * LOG2E, eps)
    out = torch.empty(batch, num_queries, num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    begin, room = (block * KEY_BLOCK for block in blocks)
    row_size, pdl = batch * num_queries * num_heads * (dim + 1), has_pdl(qkv.device)
    capacity = max(block_table.shape[1] * page_size, room)
    if uses_fragments(qkv.device, qkv.dtype, dim, page_size, capacity):
        near, far = plan_short.near_and_far(begin, room)
        counters, sums = batch * kv_heads * triton.cdiv(num_queries * group, 8), plan_short.sums(near, far)
        _check_room(work, counters, row_size * sums)
        regroup = regroup and not far
        if near:
            plan_short.short(tensors, out, (work.partials, work.counters), sizes, near, window, pdl, regroup)
        if far:
            plan_long.long(tensors, out, work.partials, sizes, far, window, pdl)
        return out.unflatten(2, (-1, BLOCK)) if regroup else out
    splits = triton.cdiv(room, work.split_keys)
    constants, options = tile_launch(qkv.dtype, dim)
    grid = (batch * kv_heads * triton.cdiv(num_queries * group, constants["ROWS"]), splits)
    if splits > 1:
        groups = triton.cdiv(splits, FAN.value)
        _check_room(work, grid[0] * (1 + groups), row_size * (splits + groups))
    launch(
        _decode_kernel,
        grid,
        *tensors,
        out,
        work.partials,
        work.counters,
        work.split_keys,
        *sizes,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        NORM=q_norm is not None,
        PDL=pdl,
        enable_fp_fusion=False,
        **constants,
        **options,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _check_room(work: AttendWork, counters: int, partials: int) -> None:
    if work.counters.numel() < counters or work.partials.numel() < partials:
        raise ValueError(
            f"work has {work.counters.numel()} counters and {work.partials.numel()} partials; this pass needs "
            f"{counters} and {partials}: make it with attend_work for passes as large"
        )
