"""Times the packed products of a decode pass against F.linear with the same weights as rows.

Microseconds a product and milliseconds a chain of layers from graph replays (perf.timing). Single products take turns
over more weights than the L2 cache holds; in a chain each layer has weights of its own. `share` is what part of the
read ceiling, measured in the same run, the weights' bytes come to. --plain leaves out what is fused.

Usage: python -m perf.kernels.linear [--rows 1 6 8 16 40 64] [--models 8b 1b] [--repeats 15] [--plain] [--chains]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import has_pdl
from fastspec.kernels.product.dispatch import packed_argmax, packed_linear
from fastspec.kernels.triton_ops import TRITON_OPS
from fastspec.shapes import UNTILED
from perf import timing


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [N, K] of a layer, and what is fused with it: "norm", "gated", "residual", "fp32" or "pick"."""

    name: str
    n: int
    k: int
    fused: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return 2 * self.n * self.k


def layer(hidden: int, qkv: int, inner: int) -> list[Product]:
    return [
        Product("qkv", qkv, hidden, ("norm",)),
        Product("o", hidden, hidden, ("residual",)),
        Product("gate_up", 2 * inner, hidden, ("norm", "gated")),
        Product("down", hidden, inner, ("residual",)),
    ]


MODELS = {"8b": (32, layer(4096, 6144, 14336)), "1b": (16, layer(2048, 3072, 8192))}
HEADS = {"8b": (128256, 4096), "1b": (128256, 2048)}
FUSED = {"norm", "gated", "residual"}
GPU_ONLY = True  # for perf.bench


def packed_weights(product: Product, count: int) -> list[Weight]:
    """Random weights, packed as they are drawn."""
    shape = (product.n // 16, product.k // 32, 16, 32)
    gated = "gated" in product.fused
    drawn = [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=product.k**-0.5) for _ in range(count)]
    return [Weight(data, "packed", gated) for data in drawn]


def call_of(product: Product, rows: int, plain: bool) -> tuple[Callable[[Weight], object], Callable[[Tensor], object]]:
    """Ours and F.linear as functions of a weight: packed, and as rows."""
    fused = set(product.fused) - FUSED if plain else set(product.fused)
    device = torch.device("cuda")
    x = torch.randn(rows, product.k, device=device).bfloat16()
    width = product.n // 2 if "gated" in fused else product.n
    given: dict[str, Any] = {"pdl": has_pdl(device)}
    if "norm" in fused:
        given["norm"] = (torch.ones(product.k, device=device).bfloat16(), 1e-5)
    if "pick" in fused:
        scratch = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        return lambda weight: packed_argmax(x, weight, product.n, scratch, **given), partial(F.linear, x)
    if "residual" in fused:
        given["residual"] = torch.randn(rows, width, device=device).bfloat16()
    if "fp32" in fused:
        given["out_dtype"] = torch.float32
    return lambda weight: packed_linear(x, weight, gated="gated" in fused, **given), partial(F.linear, x)


def product_rows(
    model: str, product: Product, rows: list[int], ceiling: float, plain: bool, repeats: int
) -> list[dict[str, Any]]:
    """A record for each number of rows of x."""
    weights = packed_weights(product, timing.copies_for(product.nbytes))
    records = []
    for count in rows:
        ours, theirs = call_of(product, count, plain)
        # cuBLAS's time does not depend on values: the same memory read as rows
        plain_rows = [weight.data.view(product.n, product.k) for weight in weights]
        mine = timing.graph_time([partial(ours, weight) for weight in weights], repeats=repeats)
        torchs = timing.graph_time([partial(theirs, weight) for weight in plain_rows], repeats=repeats)
        records.append(record(f"{model} {product.name}", [product], count, mine, torchs, ceiling))
    return records


def layers_of(products: list[Product], weights: list[list[Weight]]) -> list[Any]:
    """Layers as `Ops.layer_tail` takes them, without biases."""
    names = [product.name for product in products]
    norm = torch.ones(products[0].k, device="cuda").bfloat16()
    rest: dict[str, Any] = dict.fromkeys((f"{name}_bias" for name in names), None)
    rest |= {"input_norm": norm, "post_norm": norm}
    return [SimpleNamespace(**dict(zip(names, each, strict=True)), **rest) for each in zip(*weights, strict=True)]


def in_turn(layers: list[Any], x: Tensor, attend: Callable[[int, Tensor], Tensor]) -> None:
    """A pass through `layers_of` products, x [R, 1, hidden]; attend(index, qkv) stands in attention's place."""
    ops, eps = TRITON_OPS, 1e-5
    qkv = ops.linear(x, layers[0].qkv, None, UNTILED, norm=(layers[0].input_norm, eps))
    for index, (layer, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
        x, qkv = ops.layer_tail(ops.linear, attend(index, qkv), x, layer, following, eps, UNTILED)


def chain_rows(model: str, rows: list[int], ceiling: float, plain: bool, repeats: int) -> list[dict[str, Any]]:
    """A model's layers one after the other, each with weights of its own, for each number of rows of x.

    As a model's pass has them, but for attention, in whose place stands what it could have left; --plain: one by one.
    """
    layers, products = MODELS[model]
    weights = [packed_weights(product, layers) for product in products]
    chained = layers_of(products, weights)
    records = []
    for count in rows:
        calls = [call_of(product, count, plain) for product in products]
        start, attended = torch.randn(2, count, 1, products[0].k, device="cuda").bfloat16()

        def one_by_one(which: int, calls: list[Any] = calls) -> None:
            for place in range(layers):
                for product, call, each in zip(products, calls, weights, strict=True):
                    weight = each[place]
                    call[which](weight if which == 0 else weight.data.view(product.n, product.k))

        chain = partial(in_turn, chained, start, lambda index, qkv, attended=attended: attended)
        mine = timing.graph_time(partial(one_by_one, 0) if plain else chain, repeats=repeats)
        torchs = timing.graph_time(partial(one_by_one, 1), repeats=repeats)
        records.append(record(f"{model} chain", products * layers, count, mine, torchs, ceiling))
    return records


def record(
    op: str, products: list[Product], rows: int, mine: timing.Timing, torchs: timing.Timing, ceiling: float
) -> dict[str, Any]:
    nbytes = sum(product.nbytes for product in products)
    return {
        "op": op,
        "shape": f"{products[0].n}x{products[0].k}" if len(products) == 1 else f"{len(products)} products",
        "rows": rows,
        "us": round(mine.us, 2),
        "us_iqr": round(mine.spread * 1e6, 3),
        "bytes": nbytes,
        "operations": nbytes * rows,  # two for each weight of two bytes
        "share": round(nbytes / mine.us / 1e3 / ceiling, 3),
        "torch_us": round(torchs.us, 2),
        "read_gb_s": round(ceiling),
    }


def right(product: Product, rows: int) -> bool:
    """Whether ours is F.linear to what bf16 rounds away: a figure of a wrong kernel is none."""
    (weight,) = packed_weights(product, 1)
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    ours = packed_linear(x, weight, pdl=False, out_dtype=torch.float32)
    exact = x.float() @ weight.unpack().float().T
    return bool((ours - exact).norm() / exact.norm() < 2**-8)


def heads(model: str) -> list[Product]:
    return [Product("head", *HEADS[model], ("norm", "fp32")), Product("pick", *HEADS[model], ("norm", "pick"))]


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    ceiling = timing.read_ceiling(device=device)
    counts = [1, 5] if quick else [1, 2, 5, 8, 16, 24, 32, 40, 64, 128, 160]
    for model in MODELS:
        for product in [*MODELS[model][1], *heads(model)]:
            if all(right(product, count) for count in counts):
                yield from product_rows(model, product, counts, ceiling, False, 9)
            else:
                yield {"op": f"{model} {product.name}", "status": "failed: it is not F.linear"}
        yield from chain_rows(model, counts, ceiling, False, 9)
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 8, 16, 40, 64])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--chains", action="store_true", help="chains alone")
    given = parser.parse_args(arguments)
    ceiling = timing.read_ceiling()
    print(f"read ceiling {ceiling:.0f} GB/s")
    records = []
    for model in given.models:
        for product in [] if given.chains else [*MODELS[model][1], *heads(model)]:
            assert all(right(product, rows) for rows in given.rows), f"{product} is wrong"
            records += product_rows(model, product, given.rows, ceiling, given.plain, given.repeats)
        records += chain_rows(model, given.rows, ceiling, given.plain, given.repeats)
        torch.cuda.empty_cache()
    for each in records:
        print(json.dumps(each))
    return records


if __name__ == "__main__":
    main()
