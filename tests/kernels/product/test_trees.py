"""Sums over K that ranks may share: a rank with a part of K has a subtree of one rank's sum, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.distributed.exchange import add_rounded, tree_sum
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices
from tests.kernels.product.test_dispatch import PDL, modules


def parts_of(rows: Tensor, ranks: int) -> list[Weight]:
    """Each rank's part of a weight [N, K] whose K is cut."""
    whole = (rows.shape[0], rows.shape[1])
    return [replace(Weight.pack(part.contiguous()), whole=whole, tree=True) for part in rows.chunk(ranks, dim=1)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("n", "k"), [(272, 2560), (48, 8192)])
def test_ranks_have_subtrees_of_one_sum(n: int, k: int, device: str) -> None:
    with modules(device) as packed:

        def product(x: Tensor, weight: Weight, **more: Any) -> Tensor:
            found: Tensor = packed.dispatch.packed_linear(x, weight, pdl=PDL[device], **more)
            return found

        x = torch.randn(20, k).to(device, torch.bfloat16)
        rows = torch.randn(n, k).to(device, torch.bfloat16)
        residual = torch.randn(20, n).to(device, torch.bfloat16)
        weight = replace(Weight.pack(rows), tree=True)
        whole = product(x, weight, residual=residual)
        sums = product(x, weight, out_dtype=torch.float32)
        assert torch.equal(product(x[:3], weight, residual=residual[:3]), whole[:3])
        for ranks in (2, 4):
            for count in (3, 20):
                partial = [
                    product(part.contiguous(), own, out_dtype=torch.float32)
                    for part, own in zip(x[:count].chunk(ranks, dim=1), parts_of(rows, ranks), strict=True)
                ]
                assert torch.equal(tree_sum(partial), sums[:count]), (ranks, count)
                assert torch.equal(add_rounded(tree_sum(partial), None, residual[:count]), whole[:count])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(272, 2560), (4096, 4096), (2048, 8192)])
def test_prompts_on_ranks_have_subtrees_of_one_sum(n: int, k: int) -> None:
    """In every tile: full, and with edges on both sides."""
    from fastspec.kernels.product.prefill import prefill_linear

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products for prompts add trees on sm_90 alone")
    rows = torch.randn(n, k, device="cuda").bfloat16()
    weight = replace(Weight.pack(rows), tree=True)
    for count in (64, 300, 700, 2048):
        x = torch.randn(count, k, device="cuda").bfloat16()
        residual = torch.randn(count, n, device="cuda").bfloat16()
        whole = prefill_linear(x, weight, residual=residual)
        exact = x.double() @ rows.double().t()
        error = (prefill_linear(x, weight, out_dtype=torch.float32) - exact).abs().max().item()
        # a tensor core cuts off up to 2^-23 of the running sum at each of K / 16 additions, half of that on average
        assert error <= k / 16 * 2**-24 * exact.abs().max().item()
        for ranks in (2, 4):
            partial = [
                prefill_linear(part.contiguous(), own, out_dtype=torch.float32)
                for part, own in zip(x.chunk(ranks, dim=1), parts_of(rows, ranks), strict=True)
            ]
            assert torch.equal(add_rounded(tree_sum(partial), None, residual), whole), (ranks, count)


def test_splits_are_those_of_the_whole_matrix() -> None:
    with modules("cpu") as packed:
        plan = packed.plan
        for n, k in ((4096, 4096), (4096, 14336), (2048, 2048), (2048, 8192), (8192, 28672), (256, 768)):
            one = plan.split_for((n, k), None, True)
            assert one.runs
            for ranks in (2, 4):
                if k // ranks % (one.split_k // ranks * one.k_tile):
                    continue
                cut = plan.split_for((n, k // ranks), (n, k), True)
                assert cut.tile_of_k(k // ranks) == one.tile_of_k(k), (n, k, ranks)
                assert cut.split_k * ranks == one.split_k
            assert plan.split_for((n // 2, k), (n, k)) == plan.split_of(n, k)
        # cut by rows, it would be taken for a long sum of few rows
        assert plan.split_for((5120, 8192), (10240, 8192)) == plan.split_of(10240, 8192) != plan.split_of(5120, 8192)
        # more ranks than the tree has leaves
        assert not plan.split_for((4096, 512), (4096, 4096), True).runs


def test_a_norm_does_not_go_before_a_tree() -> None:
    weight = replace(Weight.pack(torch.zeros(32, 256, dtype=torch.bfloat16)), tree=True)
    norm = torch.ones(256, dtype=torch.bfloat16), 1e-5
    with modules("cpu") as packed, pytest.raises(ValueError, match="no norm in front"):
        packed.dispatch.packed_linear(torch.zeros(1, 256, dtype=torch.bfloat16), weight, norm=norm, pdl=False)
