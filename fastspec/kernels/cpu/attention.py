"""Attention over a paged KV cache on the CPU, with rotary embedding and K/V append. Defined by `reference.attend`.

Each row of the batch is computed alone, over the keys that it sees. Keys on consecutive pages are read in place. Cache
slots, rotary factors, ranges of keys and masks are the same in all layers. They are computed once a pass (`PassFacts`).

Batch invariance: scores and weighted sums of values are matrix products over blocks of `KEY_BLOCK` keys. Sums of blocks
are added in ascending order. Torch's softmax adds weights in vectors of keys whose length divides `KEY_BLOCK`. A weight
of zero changes no bit, so masked keys do not change the result. The number of queries in a matrix product is one of
`CpuWork.tiles`. The number of keys in a weighted sum is one of `CpuWork.sizes`. All of them give the same bits.

Prefill passes begin at multiples of the smallest size of a pass, and are cut into tiles of `_MOST` queries. So a tile
has the same queries and keys in every pass. Torch's flash attention computes it, in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.cpu.blocked import same_bits
from fastspec.kernels.reference.attention import AttendCall
from fastspec.kernels.reference.linear import norm
from fastspec.shapes import KEY_BLOCK
from fastspec.torch_settings import using_threads

_MOST = 64  # largest number of queries in a matrix product
_TILES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 32, _MOST)
_SINKS = 32  # columns of scores that are added for a sink, a multiple of the vectors of torch's softmax
_SIZES = (32, 64, 128, KEY_BLOCK)  # numbers of keys that a weighted sum may have


@dataclass(slots=True)
class Range:
    """Some query tokens of one row of the batch, and the range of keys that they may see.

    Attributes:
        row: index of the row in the batch.
        first, count: index of the first query token within the row, and number of query tokens.
        tile: number of query tokens in the matrix product, after padding with zeros. At least `count`.
        low, high: the keys are at positions low .. high - 1; `low` is a multiple of KEY_BLOCK.
        start: cache slot of position `low`, if the slots of the range are consecutive. None: they are in `slots`.
        slots: int64, cache slots of positions from `low` on, in whole blocks of KEY_BLOCK. None if `start` is given.
        mask: summand of the scores: 0, or -inf for keys that a query does not see. fp32 [1, group * tile, keys in
            whole blocks], with the same rows for each query head of a group. With `flash`: [tile, high - low] in the
            dtype of the keys.
        flash: True if torch's flash attention computes these queries: a full tile of a prefill pass.
        written: with `flash`, number of keys from `low` on that are stored. Later cache slots may hold anything.
    """

    row: int
    first: int
    count: int
    tile: int
    low: int
    high: int
    start: int | None
    slots: Tensor | None
    mask: Tensor
    flash: bool
    written: int


@dataclass(slots=True)
class PassFacts:
    """Tensors of one forward pass that are the same in all layers.

    Attributes:
        positions, block_table: input tensors of the pass. A call with the same two objects belongs to this pass.
        slots: int64 [B * Q], cache slots for K and V of the new tokens. Slots of the trash page: K and V are not kept.
        ranges: parts of the queries, each with its keys. The key is (attention window, True if scores have neither
            softcap nor sinks).
        rotations: (cosines, signed sines), fp32 [B, Q, 1, D] each. The key is Python's id of the layer's cosine table.
    """

    positions: Tensor
    block_table: Tensor
    slots: Tensor
    ranges: dict[tuple[int | None, bool], list[Range]] = field(default_factory=dict)
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class CpuWork:
    """Tensors of a model's current forward pass, and the numbers of queries and keys that a matrix product may have.

    Args:
        heads: (query heads, KV heads, head_dim).

    Attributes:
        tiles: allowed numbers of queries in a matrix product, ascending. All of them give the same bits.
        sizes: allowed numbers of keys in a weighted sum, ascending. All of them give the same bits. Sums of fewer keys
            are padded with zeros.
        not_sinks: int64 indices 1, 2, ... of the columns that are added to the scores with an attention sink. Column 0
            has the sink. The columns of these indices have -inf.
    """

    def __init__(self, heads: tuple[int, int, int]) -> None:
        self.tiles = _tiles(*heads)
        self.sizes = _sizes(self.tiles, *heads)
        self._group = heads[0] // heads[1]
        self.not_sinks = torch.arange(1, _SINKS, dtype=torch.int64, device="cpu")
        self._facts: PassFacts | None = None

    def facts(self, call: AttendCall) -> PassFacts:
        """Returns the tensors of the forward pass to which `call` belongs. The pass's first layer computes them.

        `positions` and `block_table` are the same objects in all layers of a pass.
        """
        known = self._facts
        if known is None or known.positions is not call.positions or known.block_table is not call.block_table:
            page_size, table, at = call.keys.shape[1], call.block_table, call.positions
            pages = table.gather(1, (at // page_size).clamp_(0, table.shape[1] - 1))
            slots = torch.where(call.write_mask, pages, 0) * page_size + at % page_size
            known = self._facts = PassFacts(at, table, slots.flatten())
        return known

    def ranges(self, call: AttendCall) -> list[Range]:
        """Returns the parts into which the call's queries are split, each with the range of its keys."""
        facts, plain = self.facts(call), call.rule.softcap is None and call.sinks is None
        key = call.rule.window, plain
        if key not in facts.ranges:
            facts.ranges[key] = self._ranges(call, plain)
        return facts.ranges[key]

    def rotation(self, call: AttendCall) -> tuple[Tensor, Tensor]:
        """Returns (cosines, signed sines) for the new tokens, each fp32 [B, Q, 1, D].

        The two halves of the last axis are (cos, cos) and (-sin, sin). `call.cos` must not be None.
        """
        assert call.cos is not None, "the caller saw to it"
        assert call.sin is not None, "there are both or none"
        facts = self.facts(call)
        if id(call.cos) not in facts.rotations:
            at = call.positions.clamp(max=call.cos.shape[0] - 1)
            cos, sin = call.cos[at][:, :, None], call.sin[at][:, :, None]
            facts.rotations[id(call.cos)] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return facts.rotations[id(call.cos)]

    def _ranges(self, call: AttendCall, plain: bool) -> list[Range]:
        places, pages = call.positions.tolist(), call.block_table.tolist()
        return [
            self._range(call, plain, row, first, positions[first : first + _MOST], pages[row])
            for row, positions in enumerate(places)
            for first in range(0, len(positions), _MOST)
        ]

    def _range(
        self, call: AttendCall, plain: bool, row: int, first: int, positions: list[int], pages: list[int]
    ) -> Range:
        """Makes the range of some query tokens of one row.

        Args:
            call: the call.
            plain: True if scores have neither softcap nor sinks.
            row, first: see `Range`.
            positions: position of each of these query tokens.
            pages: page ids of the row, which are valid up to its last position.
        """
        count, window = len(positions), call.rule.window
        low = 0 if window is None else max(min(positions) - window + 1, 0) // KEY_BLOCK * KEY_BLOCK
        high = max(positions) + 1  # positions beyond the table belong to rows that do not run
        size = -(-(high - low) // KEY_BLOCK) * KEY_BLOCK
        tile = next(tile for tile in self.tiles if tile >= count)
        flash = plain and count == _MOST
        at = torch.arange(low, low + size, dtype=torch.int64, device="cpu")
        start = _start(call, pages, low, high, size)
        slots: Tensor | None = None
        if start is None:
            page_size = call.keys.shape[1]
            slots = call.block_table[row, (at // page_size).clamp_(max=len(pages) - 1)] * page_size + at % page_size
        own = call.positions[row, first : first + count, None]
        if tile > count:
            own = F.pad(own, (0, 0, 0, tile - count))
        hidden = at > own
        if window is not None:
            hidden |= at <= own - window
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device="cpu").masked_fill_(hidden, -torch.inf)
        if not flash:
            return Range(row, first, count, tile, low, high, start, slots, mask.repeat(self._group, 1)[None], False, 0)
        kept = int(call.write_mask[row, first : first + count].sum())
        mask = mask[:, : high - low].to(call.keys.dtype)
        return Range(row, first, count, tile, low, high, start, slots, mask, True, positions[0] + kept - low)


def _start(call: AttendCall, pages: list[int], low: int, high: int, size: int) -> int | None:
    """Returns the cache slot of position `low` if the slots from there on are consecutive, else None.

    There must be room for `size` slots. Those at positions from `high` on may hold anything.

    Args:
        call: the call.
        pages: page ids of the row.
        low, high: range of positions.
        size: number of slots that are read.
    """
    count, page_size = call.keys.shape[:2]
    held = pages[low // page_size : (high - 1) // page_size + 1]
    if not held or held != list(range(held[0], held[0] + len(held))):
        return None
    start = held[0] * page_size + low % page_size
    return start if start + size <= count * page_size else None


def _tiles(num_heads: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Returns the numbers of queries in `_TILES` with which matrix products give every query the same bits.

    Each number is tried with random values, on one thread and on all threads.

    Args:
        num_heads, kv_heads, dim: query heads, KV heads and size of a head.
    """
    group = num_heads // kv_heads
    made = torch.Generator("cpu").manual_seed(0)
    size = KEY_BLOCK, kv_heads, dim  # as in the cache: libraries also choose by strides
    keys = torch.randn(size, generator=made, dtype=torch.float32, device="cpu").transpose(0, 1)
    values = torch.randn(size, generator=made, dtype=torch.float32, device="cpu").transpose(0, 1)
    queries = torch.randn((_MOST + 1, kv_heads * group * dim), generator=made, dtype=torch.float32, device="cpu")

    def product(rows: Tensor) -> Tensor:
        heads = rows.view(len(rows), kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim).contiguous()
        scores = torch.bmm(heads, keys.transpose(1, 2))
        out = torch.baddbmm(torch.ones_like(heads), scores, values)
        of_one = [each.view(kv_heads, group, len(rows), -1).permute(2, 0, 1, 3).flatten(1) for each in (scores, out)]
        return torch.cat(of_one, -1)

    with using_threads(1):
        alone = same_bits(product, queries, _TILES)
    shared = same_bits(product, queries, _TILES)
    return tuple(tile for tile in alone if tile in shared)


def _sizes(tiles: tuple[int, ...], num_heads: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """Returns the numbers of keys in `_SIZES` whose weighted sum of values has the bits of a padded sum.

    The padded sum has `KEY_BLOCK` keys; the weights of the added keys are zero. A library may split a long sum into
    parts that depend on its length, which can change bits.

    Args:
        tiles: numbers of queries to try.
        num_heads, kv_heads, dim: query heads, KV heads and size of a head.
    """
    made = torch.Generator("cpu").manual_seed(0)
    weights = torch.rand(
        (kv_heads, _MOST * num_heads // kv_heads, KEY_BLOCK), generator=made, dtype=torch.float32, device="cpu"
    )
    values = torch.randn((KEY_BLOCK, kv_heads, dim), generator=made, dtype=torch.float32, device="cpu").transpose(0, 1)

    def fits(size: int, tile: int) -> bool:
        rows = weights[:, : tile * num_heads // kv_heads]
        start = torch.ones((*rows.shape[:2], dim), dtype=torch.float32, device="cpu")
        wanted = torch.baddbmm(start, F.pad(rows[..., :size], (0, KEY_BLOCK - size)), values)
        some = values[:, :size]
        return all(torch.equal(torch.baddbmm(start, rows[..., :size], v), wanted) for v in (some, some.contiguous()))

    found = []
    for size in _SIZES:
        with using_threads(1):
            alone = all(fits(size, tile) for tile in tiles)
        if alone and all(fits(size, tile) for tile in tiles):
            found.append(size)
    return tuple(found)


def attend(call: AttendCall, work: CpuWork) -> Tensor:
    """Computes a layer's attention from its fused q, k and v, as `reference.attend`, with another order of sums.

    An 8-bit KV cache is not supported.

    Args:
        call: tensors and options. K and V of the new tokens are stored in its `keys` and `values`.
        work: result of `CpuOps.workspace` for the model.

    Returns:
        [B, Q, H * D] in qkv's dtype.
    """
    keys, values, dtype = call.keys, call.values, call.qkv.dtype
    kv_heads, dim = keys.shape[2:]
    heads = call.qkv.unflatten(-1, (-1, dim))
    turned, value = heads[:, :, :-kv_heads], heads[:, :, -kv_heads:]
    if call.norms is not None:
        q_norm, k_norm, eps = call.norms
        parts = turned.split((call.num_heads, kv_heads), dim=2)
        turned = torch.cat((norm(parts[0], q_norm, eps), norm(parts[1], k_norm, eps)), dim=2)
    if call.cos is not None:
        cos, sin = work.rotation(call)
        wide = turned.float()
        turned = (wide * cos).addcmul_(wide.roll(dim // 2, -1), sin).to(dtype)  # its halves change places
    slots = work.facts(call).slots
    keys.view(-1, kv_heads, dim).index_copy_(0, slots, turned[:, :, call.num_heads :].flatten(0, 1))
    values.view(-1, kv_heads, dim).index_copy_(0, slots, value.flatten(0, 1))
    query, ranges = turned[:, :, : call.num_heads], work.ranges(call)
    scaled = query if all(part.flash for part in ranges) else query.float() * call.rule.factor(dim)
    out = [_of_prompt(query, call, part) if part.flash else _attended(scaled, call, part, work) for part in ranges]
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return joined.view(*call.positions.shape, -1).to(dtype)


def _of_prompt(query: Tensor, call: AttendCall, part: Range) -> Tensor:
    """Computes attention for one full tile of a prefill pass by torch's flash attention.

    Args:
        query: [B, Q, H, D], all queries of the pass after QK norm and RoPE.
        call: tensors and options of the layer.
        part: the tile's queries and keys.

    Returns:
        [_MOST, H * D] in the dtype of the model.
    """
    kv_heads, dim = call.keys.shape[2:]
    q = query[part.row, part.first : part.first + _MOST].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    k, v = (_of_range(each, part)[: part.high - part.low].transpose(0, 1)[:, None] for each in (call.keys, call.values))
    if part.written < k.shape[2]:
        k, v = (F.pad(each[:, :, : part.written], (0, 0, 0, k.shape[2] - part.written)) for each in (k, v))
    heads = q.shape[1]
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), attn_mask=part.mask, scale=call.rule.factor(dim)
    )[0]
    return out.permute(2, 0, 1, 3).reshape(_MOST, -1)


def _attended(query: Tensor, call: AttendCall, part: Range, work: CpuWork) -> Tensor:
    """Computes attention for the queries of one range in fp32.

    Args:
        query: fp32 [B, Q, H, D], all queries of the pass after QK norm and RoPE, times the scale of scores.
        call: tensors and options of the layer.
        part: the range's queries and keys.
        work: sizes of matrix products.

    Returns:
        fp32 [part.count, H * D].
    """
    kv_heads, dim = call.keys.shape[2:]
    group = query.shape[2] // kv_heads
    q = query[part.row, part.first : part.first + part.count]
    if part.tile > part.count:
        q = F.pad(q, (0, 0, 0, 0, 0, part.tile - part.count))
    # [tile, H, D] -> [Hkv, group * tile, D]
    q = q.view(part.tile, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * part.tile, dim)
    q = q.contiguous()  # a view has other strides, for which libraries have other products
    k, v = (_of_range(each, part).float().transpose(0, 1) for each in (call.keys, call.values))  # [Hkv, keys, D]
    if call.rule.softcap is None:
        scores = _scores(q, k, part.mask)
    else:
        scores = _scores(q, k, None).div_(call.rule.softcap).tanh_().mul_(call.rule.softcap).add_(part.mask)
    if part.high - part.low < scores.shape[-1]:
        scores[..., part.high - part.low :] = -torch.inf  # keys that no query sees may be NaN
    if call.sinks is not None:
        sink = call.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, part.tile, _SINKS).flatten(1, 2)
        scores = torch.cat((scores, sink.index_fill(-1, work.not_sinks, -torch.inf)), -1)
    weights = torch.softmax(scores, -1)
    out, seen = torch.zeros_like(q), part.high - part.low
    copied = part.start is None or call.values.dtype != torch.float32  # then `v` is no view of the cache
    if copied:
        v[:, seen:] = 0.0  # values that no query sees may be NaN
    for low in range(0, seen, KEY_BLOCK):
        count = min(KEY_BLOCK, seen - low)
        size = next(size for size in work.sizes if size >= count)
        of_block = v[:, low : low + (size if copied else count)]
        if of_block.shape[1] < size:
            of_block = F.pad(of_block, (0, 0, 0, size - count))
        out.baddbmm_(weights[..., low : low + size], of_block)
    out = out.view(kv_heads, group, part.tile, dim).permute(2, 0, 1, 3)
    return out[: part.count].reshape(part.count, -1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Computes attention scores of queries and keys, plus `mask` if it is not None.

    Each matrix product covers one block of keys. A library may split a larger product among threads in a way that
    depends on the number of queries, and then bits depend on it, too.

    Args:
        q: queries [Hkv, R, D].
        k: keys [Hkv, n, D], where n is a multiple of KEY_BLOCK.
        mask: [1, R, n], or None.

    Returns:
        [Hkv, R, n].
    """
    turned = k.transpose(1, 2)
    blocks = (turned,) if k.shape[1] == KEY_BLOCK else turned.split(KEY_BLOCK, -1)
    if mask is None:
        found = [torch.bmm(q, block) for block in blocks]
    else:
        masks = (mask,) if len(blocks) == 1 else mask.split(KEY_BLOCK, -1)
        found = [torch.baddbmm(part, q, block) for part, block in zip(masks, blocks, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _of_range(cache: Tensor, part: Range) -> Tensor:
    """Returns the keys or the values of a range, [n, Hkv, D] where n is a multiple of KEY_BLOCK.

    Elements after the last position of the range are undefined.

    Args:
        cache: the layer's pages of keys, or of values.
        part: the range.
    """
    flat = cache.view(-1, *cache.shape[2:])
    if part.start is None:
        assert part.slots is not None, "slots that are not consecutive are listed"
        return flat[part.slots]
    return flat[part.start : part.start + -(-(part.high - part.low) // KEY_BLOCK) * KEY_BLOCK]
