"""Times the products of prompt chunks, with packed weights, against F.linear with the same weights unpacked.

Microseconds a product from graph replays (perf.timing), taking turns over more weights than the L2 cache holds.
`ratio` is ours over F.linear's, both of this run; the gated product is compared with F.linear and silu(gate) * up
left out of it. --sweep times every tile on Hopper instead, which is where the costs in its table come from.

Usage: python -m perf.kernels.prefill [--rows 256 1024 2048] [--only qkv o] [--repeats 15] [--sweep]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.product import prefill_sm90 as hopper
from fastspec.kernels.product.prefill import prefill_linear
from perf import timing

GPU_ONLY = True  # for perf.bench
# (N, K), gated: a Llama 8B's products
PRODUCTS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}


def time(call: Callable[[Any], object], weights: Sequence[Weight | Tensor], repeats: int) -> float:
    return timing.graph_time([partial(call, weight) for weight in weights], repeats=repeats).us


def sweep(x: Tensor, weights: list[Weight], gated: bool, repeats: int) -> str:
    """Every tile's time, fastest first."""
    n, _ = weights[0].shape
    out = torch.empty(x.shape[0], n // 2 if gated else n, dtype=x.dtype, device=x.device)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count

    def call(tile: hopper.PrefillTile, weight: Weight) -> None:
        hopper.run(x, weight, None, None, out, gated, tile, programs)

    times = sorted((time(partial(call, tile), weights, repeats), tile) for tile in hopper.TILES)
    return ", ".join(f"{tile.rows}x{tile.columns} {us:.1f}" for us, tile in times)


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    for name, (n, k, gated) in PRODUCTS.items():
        weights = [Weight.pack((torch.randn(n, k, device=device) / k**0.5).to(torch.bfloat16), gated)]
        weights += [
            replace(weights[0], data=weights[0].data.clone()) for _ in range(min(8, timing.copies_for(n * k * 2)) - 1)
        ]
        for count in (1024,) if quick else (256, 1024, 2048):
            x = torch.randn(count, k, device=device).to(torch.bfloat16)
            calls = [partial(prefill_linear, x, weight, gated=gated) for weight in weights]
            took = timing.graph_time(calls, repeats=9)
            torchs = time(partial(F.linear, x), [weight.data.view(n, k) for weight in weights], 9)
            yield {
                "op": f"8b {name}, prompt",
                "shape": f"{n}x{k}",
                "rows": count,
                "us": round(took.us, 2),
                "us_iqr": round(took.spread * 1e6, 3),
                "bytes": 2 * n * k,
                "operations": 2 * n * k * count,
                "torch_us": round(torchs, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--only", choices=PRODUCTS, nargs="+", default=list(PRODUCTS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    for name in given.only:
        n, k, gated = PRODUCTS[name]
        count = min(8, timing.copies_for(n * k * 2))
        plain = [(torch.randn(n, k, device=device) / k**0.5).to(torch.bfloat16) for _ in range(count)]
        weights = [Weight.pack(rows, gated) for rows in plain]
        for rows in given.rows:
            x = torch.randn(rows, k, device=device).to(torch.bfloat16)
            torchs = time(partial(F.linear, x), plain, given.repeats)
            if given.sweep:
                print(
                    f"{name:8} {rows:5} rows: F.linear {torchs:.1f}; {sweep(x, weights, gated, given.repeats)}",
                    flush=True,
                )
                continue
            ours = time(lambda weight, x=x, gated=gated: prefill_linear(x, weight, gated=gated), weights, given.repeats)
            flops = 2 * rows * n * k / ours / 1e6
            line = f"{ours:8.1f} us {flops:6.0f} TFLOP/s, F.linear {torchs:8.1f} us, ratio {ours / torchs:.2f}"
            print(f"{name:8} {rows:5} rows: {line}", flush=True)


if __name__ == "__main__":
    main()
