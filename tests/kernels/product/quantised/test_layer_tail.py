"""What lies between two attentions, of quantised weights and many rows: as one chain and product by product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.product.quantised import plan
from fastspec.shapes import UNTILED
from tests.helpers.devices import devices
from tests.helpers.packed_codes import modules, on_device, random_codes, stored
from tests.helpers.products import product_case
from tests.kernels.product.test_layer_tail import regrouped

SHAPES = {"o": (256, 128), "gate_up": (512, 256), "down": (256, 256), "qkv": (384, 256)}
PDL = {"cpu": True, "cuda": False}


def a_layer(kinds: tuple[str, ...], device: str, biases: bool) -> Any:
    given: dict[str, Any] = {}
    for seed, (kind, (name, (n, k))) in enumerate(zip(kinds, SHAPES.items(), strict=True)):
        given[name] = stored(on_device(random_codes(kind, n, k, seed), device), name == "gate_up")
        bias = product_case(1, n, k, torch.bfloat16, device, "bias", seed)[2]["bias"]
        given[f"{name}_bias"] = bias if biases else None
    norm = (torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16().to(device)
    return SimpleNamespace(**given, input_norm=norm, post_norm=norm.flip(0))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "kinds", [("int4 zeros", "int4", "int4 64", "int4"), ("fp8", "int8", "fp8 blocks", "int8 with -128")], ids=str
)
def test_a_chain_is_its_products(kinds: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: rows that go on regrouped, sums and norms as one kernel, with attention's result in both orders."""
    monkeypatch.setattr(plan, "split_of", lambda *given: plan.Split(2, 128))
    with modules(device) as found:
        for rows, biases in ((17, True), (33, False)):
            layer = a_layer(kinds, device, biases)
            attended, x = (product_case(rows, 16, w, torch.bfloat16, device)[0][None] for w in (128, 256))
            weights = [getattr(layer, name) for name in SHAPES]
            assert found.layer_tail.runs_on_tma(weights, rows)

            def linear(x: Tensor, weight: Weight, bias: Tensor | None, tiling: Any, **options: Any) -> Tensor:
                residual = options.pop("residual", None)
                parts = [
                    found.dispatch.packed_linear(
                        x[:, i : i + 8],
                        weight,
                        bias,
                        pdl=PDL[device],
                        residual=None if residual is None else residual[:, i : i + 8],
                        **options,
                    )
                    for i in range(0, x.shape[1], 8)  # so few that each warp has its own K tiles
                ]
                return torch.cat(parts, 1)

            wanted = reference.layer_tail(linear, attended, x, layer, layer, 1e-5, UNTILED)
            for given in (attended, regrouped(attended)):
                ours = found.layer_tail.layer_tail(given, x, layer, layer, 1e-5, PDL[device])
                assert all(map(torch.equal, ours, wanted))
