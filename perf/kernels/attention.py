"""Times attention over a paged cache, rotation and K/V append included, against SDPA on the same keys gathered.

Microseconds a call from graph replays (perf.timing) over more layers of cache than the L2 holds: a chain of calls as
in a step, with early launches and without. `share` is what part of the read ceiling, measured in the same run, the
bytes of K and V come to. SDPA gets K and V contiguous, queries rotated, and nothing to store: it does less.
--flex adds FlexAttention, compiled, on the same gathered keys.
--chain adds what a layer pays: the time of a chain of layers, all their products in it, less that of the products.

Usage: python -m perf.kernels.attention [--models 8b 1b] [--queries 1 6] [--contexts 128 1024 32768 131072]
       [--batch 1] [--splits 128 256] [--chunks 2048 8192] [--repeats 15] [--chain] [--flex]
       [--kernel tiles | mma | tma]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from fastspec.kernels import reference
from fastspec.kernels.attention import dispatch as attention
from fastspec.kernels.attention import plan
from fastspec.kernels.reference import AttendCall
from fastspec.shapes import KEY_BLOCK, AttentionRule
from perf import timing
from perf.kernels import linear

PAGE_SIZE = 64
IN_A_LAYER = 8  # layers of such a chain
GPU_ONLY = True  # for perf.bench


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key heads, their size, and the model's hidden size."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


MODELS = {"8b": Heads(32, 8, 128, 4096), "1b": Heads(32, 8, 64, 2048)}


class Case:
    """`queries` new tokens a row at the end of `context` positions; as many layers of cache as keep it cold."""

    def __init__(self, model: Heads, batch: int, queries: int, context: int, split_keys: int | None) -> None:
        self.model, self.batch, self.queries, self.context = model, batch, queries, context
        per_row = -(-context // PAGE_SIZE)
        device = torch.device("cuda")
        self.nbytes = batch * context * model.kv_heads * model.dim * 2 * 2
        shape = (1 + batch * per_row, PAGE_SIZE, model.kv_heads, model.dim)
        self.layers = timing.copies_for(self.nbytes)
        self.cache = [
            tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)) for _ in range(self.layers)
        ]
        self.table = (1 + torch.randperm(batch * per_row, device=device)).view(batch, per_row)
        angles = torch.arange(per_row * PAGE_SIZE, device=device)[:, None] * torch.rand(model.dim // 2, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.qkv = torch.randn(batch, queries, model.width, device=device, dtype=torch.bfloat16)
        self.positions = (context - queries + torch.arange(queries, device=device)).expand(batch, -1).contiguous()
        self.write_mask = torch.ones(batch, queries, dtype=torch.bool, device=device)
        capacity = per_row * PAGE_SIZE
        self.work = attention.attend_work(
            device, batch * max(queries, 1), capacity, (model.heads, model.kv_heads, model.dim)
        )
        if split_keys is not None:
            room = -(-capacity // split_keys) * 2 + 2
            self.work = attention.AttendWork(
                split_keys,
                torch.zeros(batch * queries * model.heads * room, dtype=torch.int32, device=device),
                torch.empty(batch * queries * model.heads * room * (model.dim + 1), device=device),
            )

    def call(self, layer: int, attend: Callable[..., Tensor] = attention.attend, qkv: Tensor | None = None) -> Tensor:
        """One layer's attention."""
        call = AttendCall(
            self.qkv if qkv is None else qkv,
            self.cos,
            self.sin,
            *self.cache[layer],
            self.table,
            self.positions,
            self.write_mask,
            num_heads=self.model.heads,
            num_blocks=-(-self.context // KEY_BLOCK),
            first_block=(self.context - self.queries) // KEY_BLOCK,  # as of calls with long prompts alone
            rule=AttentionRule(),
        )
        return attend(call, self.work)

    def error(self) -> float:
        """Largest difference from the torch twin, as a share of the largest output: a wrong kernel has no figure."""
        exact = self.call(0, reference.attend).float()
        return float((self.call(0).float() - exact).abs().max() / exact.abs().max())

    def _gathered(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(query [B, H, Q, D], keys, values [B, Hkv, context, D]) of the layers, as if gathered beforehand."""
        model = self.model
        query = self.qkv[..., : model.heads * model.dim].view(self.batch, self.queries, -1, model.dim).transpose(1, 2)
        shape = (self.batch, model.kv_heads, self.context, model.dim)
        for layer in self.cache:
            k, v = (x.view(-1)[: torch.Size(shape).numel()].view(shape) for x in layer)
            yield query, k, v

    def sdpa(self) -> list[Callable[[], Tensor]]:
        """SDPA of the layers' keys and values, gathered beforehand."""
        mask = causal_lower_right(self.queries, self.context)
        attend = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        return [partial(attend, *tensors) for tensors in self._gathered()]

    def flex(self) -> list[Callable[[], Tensor]]:
        """FlexAttention of the same, compiled for this shape."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        before = self.context - self.queries

        def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return torch.le(key, row + before)

        mask = create_block_mask(seen, None, None, self.queries, self.context, device="cuda")
        attend = partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=True)
        return [partial(attend, *tensors) for tensors in self._gathered()]


def timed(calls: list[Any], repeats: int) -> float:
    return timing.graph_time(calls, repeats=repeats).us


def without_early_launches(case: Case, repeats: int) -> float:
    kept, attention.has_pdl = attention.has_pdl, lambda device: False
    try:
        return timed([partial(case.call, layer) for layer in range(case.layers)], repeats)
    finally:
        attention.has_pdl = kept


def in_a_layer(case: Case, name: str, repeats: int) -> float:
    """What attention adds to a layer with all its products, with early launches throughout.

    All of them, for what attention leaves behind (of L2, of shared memory) slows down those furthest from it as well.
    """
    products = linear.MODELS[name][1]
    chained = linear.layers_of(products, [linear.packed_weights(product, IN_A_LAYER) for product in products])
    rows, hidden = case.batch * case.queries, case.model.hidden
    start = torch.randn(rows, 1, hidden, device="cuda").bfloat16()

    def attend(index: int, qkv: Tensor) -> Tensor:
        return case.call(index % case.layers, qkv=qkv.view(case.batch, case.queries, -1)).view(rows, 1, hidden)

    ways = (attend, lambda index, qkv: start)
    both, alone = (timed([partial(linear.in_turn, chained, start, way)], repeats) for way in ways)
    return (both - alone) / IN_A_LAYER


def decode_record(
    name: str, batch: int, queries: int, context: int, split: int | None, ceiling: float, given: argparse.Namespace
) -> dict[str, Any]:
    case = Case(MODELS[name], batch, queries, context, split)
    error = case.error()
    assert error < 2**-6, f"{name} {batch} x {queries} over {context} is wrong by {error:.1%}"
    took = timing.graph_time([partial(case.call, layer) for layer in range(case.layers)], repeats=given.repeats)
    us, heads = took.us, MODELS[name]
    record = {
        "op": "attend",
        "shape": f"{name}, {batch} x {context}",
        "rows": queries,
        "model": name,
        "batch": batch,
        "queries": queries,
        "context": context,
        "split_keys": case.work.split_keys,
        "us": round(us, 2),
        "us_iqr": round(took.spread * 1e6, 3),
        "operations": 4 * batch * queries * context * heads.heads * heads.dim,
        "read_gb_s": round(ceiling),
        "us_late_launch": round(without_early_launches(case, given.repeats), 2),
        "bytes": case.nbytes,
        "share": round(case.nbytes / us / 1e3 / ceiling, 3),
        "sdpa_us": round(timed(case.sdpa(), given.repeats), 2),
        "error": round(error, 5),
    }
    if given.flex:
        try:
            record["flex_us"] = round(timed(case.flex(), given.repeats), 2)
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:  # it refuses some shapes: no figure
            record["flex_error"] = str(error)[:200]
    if given.chain:
        record["us_in_a_layer"] = round(in_a_layer(case, name, given.repeats), 2)
    return record


def chunk_record(name: str, rows: int, repeats: int) -> dict[str, Any]:
    """A prompt's first chunk of that many rows."""
    case = Case(MODELS[name], 1, rows, rows, None)
    error = case.error() if rows <= 2048 else 0.0  # the twin holds every score
    assert error < 2**-6, f"a chunk of {rows} rows is wrong by {error:.1%}"
    us = timed([partial(case.call, 0)], repeats)
    sdpa_us = timed(case.sdpa()[:1], repeats)
    flops = 2 * rows * (rows + 1) * case.model.dim * case.model.heads
    return {
        "op": "chunk",
        "model": name,
        "rows": rows,
        "us": round(us, 1),
        "tflop_s": round(flops / us / 1e6),
        "sdpa_us": round(sdpa_us, 1),
        "sdpa_tflop_s": round(flops / sdpa_us / 1e6),
    }


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    ceiling, given = timing.read_ceiling(device=device), argparse.Namespace(repeats=9, chain=False, flex=False)
    for name in MODELS:
        for context in (128, 1024) if quick else (128, 1024, 8192, 32768):
            for batch, queries in ((1, 1), (1, 5)) if quick else ((1, 1), (1, 5), (8, 5), (32, 5)):
                if batch * context > 2**18:
                    continue  # more cache than fits
                record = decode_record(name, batch, queries, context, None, ceiling, given)
                yield {**record, "torch_us": record["sdpa_us"]}
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 32768, 131072])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--splits", type=int, nargs="+", help="keys of a partial sum, in place of the library's own")
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--flex", action="store_true")
    kernels = ["tiles", "mma", "tma"]
    parser.add_argument("--kernel", choices=kernels, help="for steps; by default what the library takes")
    given = parser.parse_args(arguments)
    if given.kernel:
        attention.uses_mma = lambda *args: given.kernel != "tiles"
        plan.LATE_FROM = 0 if given.kernel == "tma" else 2**30  # every row, or none
    ceiling = timing.read_ceiling()
    print(f"read ceiling {ceiling:.0f} GB/s", flush=True)
    records = []
    for name in given.models:
        for context in given.contexts:
            for batch in given.batch:
                for queries in given.queries:
                    for split in given.splits or [None]:
                        records.append(decode_record(name, batch, queries, context, split, ceiling, given))
                        print(json.dumps(records[-1]), flush=True)
        for rows in given.chunks:
            records.append(chunk_record(name, rows, given.repeats))
            print(json.dumps(records[-1]), flush=True)
        torch.cuda.empty_cache()
    return records


if __name__ == "__main__":
    main()
