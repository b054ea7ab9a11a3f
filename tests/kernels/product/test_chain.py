"""Layers of products, norms and attention that start early, against the same ones that wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from tests.helpers import attention as cases
from tests.helpers.products import product_case

REPLAYS = 10_000
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 512, 1024, 2, 1, 128, 2


def weights_of_layers() -> list[list[Weight]]:
    """Packed weights of each layer: into attention, out of it, gate and up, down."""
    shapes = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    return [
        [
            Weight.pack(product_case(1, n, k, torch.bfloat16, "cuda", seed=10 * layer + i)[1], i == 2)
            for i, (n, k) in enumerate(shapes)
        ]
        for layer in range(LAYERS)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (1, 6), (3, 4), (4, 6), (8, 5)])
def test_ten_thousand_early_starts(batch: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastspec.kernels.attention import dispatch as attending
    from fastspec.kernels.gpu import has_pdl
    from fastspec.kernels.product.dispatch import packed_linear

    if not has_pdl(torch.device("cuda")):
        pytest.skip("programmatic dependent launch needs sm_90")
    lengths = [40 + 7 * row for row in range(batch)]
    shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": torch.bfloat16}
    caches = [cases.case("cuda", lengths=lengths, queries=queries, seed=i, **shape) for i in range(LAYERS)]
    work = attending.attend_work(torch.device("cuda"), batch * queries, 128, (HEADS, KV_HEADS, DIM))
    first = product_case(batch * queries, 16, HIDDEN, torch.bfloat16, "cuda")[0]
    gamma = (torch.rand(HIDDEN, device="cuda").bfloat16(), 1e-5)
    weights = weights_of_layers()

    def chain(pdl: bool) -> Tensor:
        monkeypatch.setattr(attending, "has_pdl", lambda device: pdl)
        x = first
        for (qkv, out, gate_up, down), cache in zip(weights, caches, strict=True):
            fed = packed_linear(x, qkv, norm=gamma, pdl=pdl).view(batch, queries, -1)
            seen = cases.run(attending.attend, {**cache, "qkv": fed}, work).view(batch * queries, -1)
            x = packed_linear(seen, out, residual=x, pdl=pdl)
            x = packed_linear(packed_linear(x, gate_up, norm=gamma, gated=True, pdl=pdl), down, residual=x, pdl=pdl)
        return x

    monkeypatch.setattr(attending, "uses_mma", lambda *given: True)  # whether it starts early or not
    expected = chain(False)
    chain(True)
    graphs, results = [], []
    for pdl in (False, True):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(chain(pdl))
        graphs.append(graph)
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        for i, (graph, result) in enumerate(zip(graphs, results, strict=True)):
            result.fill_(float("nan"))
            graph.replay()
            wrong[i] += (result != expected).any()
    assert wrong.tolist() == [0, 0]
