"""Attention of a layer on CUDA: head norms, rotary embedding, K/V append, attention.

A decode pass mostly needs one launch. A prefill chunk needs two.

    out[b, i, h] = sum_j softmax_j(s[j]) v[j],  s[j] = scale q[b, i, h] . k[j],  j <= positions[b, i]
                                                       and with a window W also j > positions[b, i] - W

With a softcap c, scores are c tanh(s[j] / c), before the mask. A sink of a head is the score of one more key, whose
value is zero. Every kernel supports all of these.

| argument     | shape, dtype                                   | notes                                             |
|--------------|------------------------------------------------|---------------------------------------------------|
| qkv          | [B, Q, (H + 2 Hkv) D] bf16, fp16 or fp32       | contiguous                                        |
| cos, sin     | [positions, D/2] fp32                          | contiguous; both None: no rotation                |
| keys, values | [num_pages, page_size, Hkv, D], as qkv or e4m3 | contiguous; may exceed 2^31 elements              |
| block_table  | [B, P] int64                                   | rows may be views of longer rows                  |
| positions    | [B, Q] int64                                   | >= 0, ascending in a row where `write_mask`       |
| write_mask   | [B, Q] bool                                    | False: K/V are not stored, the output is undefined |
| sinks        | [H] fp32 or as qkv                             | contiguous; None: none                            |

Kernels:

| pass                                  | kernels                                                           |
|---------------------------------------|-------------------------------------------------------------------|
| prefill chunk (Q > MAX_SPLIT_QUERIES) | rope.py appends K/V; prefill_sm90.py attends if                   |
|                                       | `plan.uses_chunks` is True, else prefill.py                       |
| decode, if `plan.uses_mma` is True    | early rows (below position `plan.LATE_FROM`): decode/mma.py or    |
|                                       | mma_batch.py; late rows (from there on): decode/tma_sm90.py       |
| decode, otherwise                     | `_decode_kernel` of decode/portable.py                            |

A decode pass that may have early and late rows launches the kernels of both. Each kernel skips the rows of the other.

A decode pass splits the keys of a row between CTAs (Flash-Decoding). CTA (t, s) has query tile t of one row and KV
head, and the keys from position s * split_keys on. It first stores the new K/V of positions in its range. It reads all
its keys back from the cache in blocks, and stores its partial result: the attention output over its keys, and the log2
of the sum of softmax weights. The last CTA of a tile, found by an integer counter, combines the partial results in
ascending order. `_decode_kernel` combines FAN splits to a group, then the groups. The other kernels have no groups.

Batch invariance. The bits of a row do not depend on other rows. The choice of the kernel and of the splits depends on
the model and the row's position; for `_decode_kernel` it also depends on the size of its cache. Blocks and splits begin
at absolute positions, and sums over them run in ascending order. A block or split that is masked for a row does not
change its result. A sink is added once, when all keys of a row are combined. No fused multiply-add is used
(enable_fp_fusion=False). So all kernels store K with the same bits, which are the bits of the torch definition.

Programmatic dependent launch (PDL): the next kernel may start at once. Before its wait, none of these kernels reads the
output of the preceding matrix product. `_decode_kernel` reads positions and the block table before its wait, past L1,
to prefetch keys into L2. Stale values only prefetch the wrong cache lines and change no result. With the tile sizes in
`plan.EARLY` it also uses these values after the wait. The other kernels read positions, the block table, and K and V of
earlier passes before their wait, and use them. `attend` says what its caller must guarantee for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastspec.kernels.attention import plan
from fastspec.kernels.attention.arguments import NewTokens, PagedCache, WorkArea, check_heads, new_tokens, paged_cache
from fastspec.kernels.attention.decode import launch as decoding
from fastspec.kernels.attention.decode.launch import DecodingPass
from fastspec.kernels.attention.prefill import paged_attention
from fastspec.kernels.attention.rope import store_heads
from fastspec.kernels.common.checks import check_sinks
from fastspec.kernels.common.kv_scales import KVScales, scales_of
from fastspec.kernels.common.packing import BLOCK
from fastspec.kernels.gpu import gpu_of, has_pdl
from fastspec.kernels.reference.attention import AttendCall
from fastspec.shapes import KEY_BLOCK

MAX_SPLIT_QUERIES = 17  # a pass with more query tokens per row is a prefill chunk; it fills the device without splits


@dataclass(frozen=True, slots=True)
class AttendWork:
    """Scratch memory of attention in the decode passes of one model. Only one pass may use it at a time.

    Attributes:
        split_keys: number of keys in a split of `_decode_kernel`. The bits of a row depend on it.
        counters: int32, zero between launches: for each query tile, the number of CTAs that have finished.
        partials: fp32, partial results of splits; see `WorkArea`.
    """

    split_keys: int
    counters: Tensor
    partials: Tensor


def attend_work(device: torch.device, max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> AttendWork:
    """Allocates the scratch memory of `attend` for the decode passes of a model.

    Args:
        device: device of the model.
        max_rows: B * Q of the largest decode pass.
        max_positions: largest number of positions of a batch row in the block table.
        heads: (number of query heads, number of KV heads, head_dim).
    """
    counters, partials = plan.work_sizes(max_rows, max_positions, heads)
    return AttendWork(
        plan.split_keys_for(max_positions, heads[2]),
        torch.zeros(counters, dtype=torch.int32, device=device),
        torch.empty(partials, dtype=torch.float32, device=device),
    )


def attend_work_bytes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> int:
    """Returns the bytes of device memory that `attend_work` allocates for the same arguments."""
    return 4 * sum(plan.work_sizes(max_rows, max_positions, heads))


def attend(call: AttendCall, work: AttendWork, regroup: bool = False) -> Tensor:
    """Computes the attention of a layer, as `Ops.attend`. Does not write to page 0 of the KV cache.

    Positions, write mask, block table and cache are read before the kernel waits for the kernel that computes `qkv`.
    All writes to these inputs must have ended before that kernel began. `embed`, the first kernel of a pass, guarantees
    this: it waits for the input of the pass.

    Args:
        call: tensors and options. `product` and `tiling` are not read.
        work: scratch memory of the pass.
        regroup: True if the result may be [B, Q, H * D / 64, 64], with the column order that packing.py describes. The
            result has this order if tensor-core kernels compute the pass and no position is `plan.LATE_FROM` or later.

    Returns:
        The attention output, [B, Q, H * D] unless it is regrouped.

    Raises:
        ValueError: shapes, dtypes or layouts other than in the table above, or `work` is too small for the pass.
    """
    if not (call.qkv.is_contiguous() and call.positions.is_contiguous() and call.write_mask.is_contiguous()):
        qkv, positions = call.qkv.contiguous(), call.positions.contiguous()
        call = replace(call, qkv=qkv, positions=positions, write_mask=call.write_mask.contiguous())
    keys, values, table = call.keys, call.values, call.block_table
    if call.positions.shape[1] > MAX_SPLIT_QUERIES:
        query = store_heads(call)
        out = paged_attention(
            query, keys, values, table, call.positions,
            num_blocks=call.num_blocks, rule=call.rule, sinks=call.sinks, out=query, kv_scales=call.kv_scales,
        )  # fmt: skip
        return out.flatten(2)
    check_heads(call)
    check_sinks(call.sinks, call.num_heads, call.qkv.dtype)
    scales = scales_of(keys, call.kv_scales)
    return _decode(call, new_tokens(call, scales), paged_cache(keys, values, table), scales, work, regroup)


def uses_mma(
    device: torch.device, dtype: torch.dtype, dim: int, page_size: int, capacity: int, cached: torch.dtype | None = None
) -> bool:  # fmt: skip
    """True if a model's decode passes run the tensor-core kernels on `device`, see `plan.uses_mma`.

    Args:
        device: device of the model.
        dtype: dtype of queries.
        dim: head_dim.
        page_size, capacity: see `plan.uses_mma`.
        cached: dtype of K and V in the cache. None: `dtype`.
    """
    return plan.uses_mma(gpu_of(device), dtype.itemsize, dim, page_size, capacity, (cached or dtype).itemsize)


def _decode(
    given: AttendCall, tokens: NewTokens, cache: PagedCache, scales: KVScales | None, work: AttendWork, regroup: bool
) -> Tensor:
    qkv, (_num_pages, page_size, _kv_heads, dim) = tokens.qkv, cache.k.shape
    (batch, num_queries), num_heads = tokens.positions.shape, given.num_heads
    out = torch.empty(batch, num_queries, num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    area = WorkArea(work.partials, work.counters)
    call = DecodingPass(tokens, cache, out, area, has_pdl(qkv.device), given.rule, given.sinks, scales)
    begin, room = given.first_block * KEY_BLOCK, given.num_blocks * KEY_BLOCK
    row_size, sizes = batch * num_queries * num_heads * (dim + 1), call.sizes
    capacity = max(cache.table_width * page_size, room)
    if uses_mma(qkv.device, qkv.dtype, dim, page_size, capacity, cache.k.dtype):
        early, late = plan.early_and_late(begin, room)
        counters = sizes.pairs * plan.cdiv(sizes.num_rows, plan.ROW_GROUP)
        _check_room(work, counters, row_size * plan.partial_sums(early, late))
        regroup = regroup and not late
        if early:
            decoding.start_early(call, early, regroup)
        if late:
            decoding.start_late(call, late)
        return out.unflatten(2, (-1, BLOCK)) if regroup else out
    splits = plan.cdiv(room, work.split_keys)
    planned = plan.tiles_plan(sizes, qkv.dtype.itemsize, splits)
    if splits > 1:
        groups = plan.cdiv(splits, plan.FAN)
        _check_room(work, planned.grid[0] * (1 + groups), row_size * (splits + groups))
    decoding.start_tiles(call, planned, work.split_keys)
    return out


def _check_room(work: AttendWork, counters: int, partials: int) -> None:
    if work.counters.numel() < counters or work.partials.numel() < partials:
        raise ValueError(
            f"work has {work.counters.numel()} counters and {work.partials.numel()} partials; this pass needs "
            f"{counters} and {partials}: make it with attend_work for passes as large"
        )
