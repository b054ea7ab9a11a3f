"""Attention over paged keys on the CPU, with rotary embedding and K/V append; `reference.attend` is its definition.

A row is computed alone, over the keys that it sees. Keys of consecutive pages are read where they are. Facts that all
layers share are computed once a pass: slots, rotations, ranges of keys, masks (`PassFacts`).

Row invariance: scores are products over the head's elements. Weighted sums are products over blocks of `KEY_BLOCK`
keys, added in ascending order. A weight of zero changes no bit, so later keys and masked blocks do not. The number of
queries in a product is one of `CpuWork.tiles`, which all give the same bits.
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

_MOST = 64  # queries of a product
_TILES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 32, _MOST)
_LEAST = 32  # keys of a product of weights with values: with fewer, libraries have other kernels


@dataclass(slots=True)
class Range:
    """Queries of one row, and the keys that they may see.

    Attributes:
        row: index of the row in the batch.
        first, count: first query, and number of queries.
        tile: queries of the product; zeros behind `count`.
        keys: positions `low`..`high` - 1; `low` is a multiple of KEY_BLOCK.
        start: the slot of position `low`, if the slots of the range are consecutive. None: `slots` has them.
        slots: int64, of positions from `low` on, in whole blocks of KEY_BLOCK.
        hidden: bool [tile, keys in whole blocks]: True for keys that a query does not see.
    """

    row: int
    first: int
    count: int
    tile: int
    low: int
    high: int
    start: int | None
    slots: Tensor | None
    hidden: Tensor


@dataclass(slots=True)
class PassFacts:
    """Facts of one pass that are the same in all layers.

    Attributes:
        positions, block_table: tensors of the pass, by which it is recognised.
        slots: int64 [B * Q], where K and V of the new tokens go; slots of the trash page for tokens that are not kept.
        ranges: by window.
        rotations: cosines [B, Q, 1, D] and signed sines, by the table of cosines.
    """

    positions: Tensor
    block_table: Tensor
    slots: Tensor
    ranges: dict[int | None, list[Range]] = field(default_factory=dict)
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class CpuWork:
    """Facts of the pass that a model is in, and the numbers of queries that products may have.

    Args:
        heads: (query heads, key heads, head_dim).

    Attributes:
        tiles: numbers of queries, ascending.
    """

    def __init__(self, heads: tuple[int, int, int]) -> None:
        self.tiles = _tiles(*heads)
        self._facts: PassFacts | None = None

    def facts(self, call: AttendCall) -> PassFacts:
        """The facts of the call's pass. All layers of a pass have the same tensor of positions."""
        known = self._facts
        if known is None or known.positions is not call.positions or known.block_table is not call.block_table:
            page_size, table, at = call.keys.shape[1], call.block_table, call.positions
            pages = table.gather(1, (at // page_size).clamp_(0, table.shape[1] - 1))
            slots = torch.where(call.write_mask, pages, 0) * page_size + at % page_size
            known = self._facts = PassFacts(at, table, slots.flatten())
        return known

    def ranges(self, call: AttendCall) -> list[Range]:
        """Queries and keys of each product of a layer with this window."""
        facts, window = self.facts(call), call.rule.window
        if window not in facts.ranges:
            facts.ranges[window] = self._ranges(call)
        return facts.ranges[window]

    def rotation(self, call: AttendCall) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the pass, each fp32 [B, Q, 1, D]."""
        assert call.cos is not None, "the caller saw to it"
        assert call.sin is not None, "there are both or none"
        facts = self.facts(call)
        if id(call.cos) not in facts.rotations:
            at = call.positions.clamp(max=call.cos.shape[0] - 1)
            cos, sin = call.cos[at][:, :, None], call.sin[at][:, :, None]
            facts.rotations[id(call.cos)] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return facts.rotations[id(call.cos)]

    def _ranges(self, call: AttendCall) -> list[Range]:
        window, places = call.rule.window, call.positions.tolist()
        pool, page_size, pages = call.keys.shape[0] * call.keys.shape[1], call.keys.shape[1], call.block_table.tolist()
        found = []
        for row, positions in enumerate(places):
            for first in range(0, len(positions), _MOST):
                part = positions[first : first + _MOST]
                low = 0 if window is None else max(min(part) - window + 1, 0) // KEY_BLOCK * KEY_BLOCK
                high = max(part) + 1  # positions beyond the table belong to rows that do not count
                size = -(-(high - low) // KEY_BLOCK) * KEY_BLOCK
                tile = next(tile for tile in self.tiles if tile >= len(part))
                at = torch.arange(low, low + size, dtype=torch.int64, device="cpu")
                own = F.pad(call.positions[row, first : first + _MOST], (0, tile - len(part)))[:, None]
                hidden = at > own
                if window is not None:
                    hidden |= at <= own - window
                index = (at // page_size).clamp_(max=len(pages[row]) - 1)
                start: int | None = None
                slots: Tensor | None = call.block_table[row, index] * page_size + at % page_size
                held = pages[row][low // page_size : (high - 1) // page_size + 1]
                begin = pages[row][int(index[0])] * page_size + low % page_size
                # one range of memory, with room for whole blocks: slots behind the row's own hold anything
                if held == list(range(held[0], held[0] + len(held))) and begin + size <= pool:
                    start = begin
                    slots = None
                found.append(Range(row, first, len(part), tile, low, high, start, slots, hidden))
        return found


def _tiles(num_heads: int, kv_heads: int, dim: int) -> tuple[int, ...]:
    """The numbers of queries whose products all give the same bits, with one thread and with all."""
    group = num_heads // kv_heads
    made = torch.Generator("cpu").manual_seed(0)
    size = kv_heads, KEY_BLOCK, dim
    keys = torch.randn(size, generator=made, dtype=torch.float32, device="cpu")
    values = torch.randn(size, generator=made, dtype=torch.float32, device="cpu")
    queries = torch.randn((_MOST + 1, kv_heads * group * dim), generator=made, dtype=torch.float32, device="cpu")

    def product(rows: Tensor) -> Tensor:
        heads = rows.view(len(rows), kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        scores = torch.bmm(heads, keys.transpose(1, 2))
        out = torch.baddbmm(torch.ones_like(heads), scores, values)
        of_one = [each.view(kv_heads, group, len(rows), -1).permute(2, 0, 1, 3).flatten(1) for each in (scores, out)]
        return torch.cat(of_one, -1)

    with using_threads(1):
        alone = same_bits(product, queries, _TILES)
    shared = same_bits(product, queries, _TILES)
    return tuple(tile for tile in alone if tile in shared)


def attend(call: AttendCall, work: CpuWork) -> Tensor:
    """Computes `reference.attend` in another order of sums; K and V are not in 8 bits.

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
        wide, half = turned.float(), dim // 2
        swapped = torch.cat((wide[..., half:], wide[..., :half]), -1)
        turned = (wide * cos).add_(swapped.mul_(sin)).to(dtype)
    slots = work.facts(call).slots
    keys.view(-1, kv_heads, dim).index_copy_(0, slots, turned[:, :, call.num_heads :].flatten(0, 1))
    values.view(-1, kv_heads, dim).index_copy_(0, slots, value.flatten(0, 1))
    query = turned[:, :, : call.num_heads].float() * call.rule.factor(dim)
    out = [_attended(query, call, part) for part in work.ranges(call)]
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return joined.view(*call.positions.shape, -1).to(dtype)


def _attended(query: Tensor, call: AttendCall, part: Range) -> Tensor:
    """Attention of the queries of one range: fp32 [count, H * D]."""
    kv_heads, dim = call.keys.shape[2:]
    group = query.shape[2] // kv_heads
    q = query[part.row, part.first : part.first + part.count]
    if part.tile > part.count:
        q = F.pad(q, (0, 0, 0, 0, 0, part.tile - part.count))
    # [tile, H, D] -> [Hkv, group * tile, D]
    q = q.view(part.tile, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * part.tile, dim)
    k, v = (_of_range(each, part).transpose(0, 1) for each in (call.keys, call.values))  # [Hkv, keys, D]
    scores = torch.bmm(q, k.transpose(1, 2))
    if call.rule.softcap is not None:
        scores = scores.div_(call.rule.softcap).tanh_().mul_(call.rule.softcap)
    scores.view(kv_heads, group, part.tile, -1).masked_fill_(part.hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if part.tile > part.count or call.rule.window is not None:
        top.masked_fill_(top == -torch.inf, 0.0)  # of queries that are padding: exp(-inf) is 0, and not NaN
    weights = scores.sub_(top).exp_()
    # cumsum adds one block after the other, whatever their number
    total = weights.unflatten(-1, (-1, KEY_BLOCK)).sum(-1).cumsum(-1)[..., -1:]
    if call.sinks is not None:
        sink = call.sinks.float().view(kv_heads, group, 1).expand(-1, -1, part.tile).reshape(kv_heads, -1, 1)
        total = total + torch.exp(sink - top)
    out = torch.zeros_like(q)
    for low in range(0, part.high - part.low, KEY_BLOCK):
        size = min(KEY_BLOCK, part.high - part.low - low)
        of_block = v[:, low : low + size]
        if size < _LEAST:
            of_block, size = F.pad(of_block, (0, 0, 0, _LEAST - size)), _LEAST
        out.baddbmm_(weights[..., low : low + size], of_block)
    out = out.div_(total).view(kv_heads, group, part.tile, dim).permute(2, 0, 1, 3)
    return out[: part.count].reshape(part.count, -1)


def _of_range(cache: Tensor, part: Range) -> Tensor:
    """Keys or values of a range in whole blocks, fp32 [keys, Hkv, D]. Slots above the newest position hold anything."""
    flat = cache.view(-1, *cache.shape[2:])
    if part.start is None:
        assert part.slots is not None, "slots that are not consecutive are listed"
        return flat[part.slots].float()
    return flat[part.start : part.start + len(part.hidden[0])].float()
