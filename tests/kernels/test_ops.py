"""The ops of every implementation have the parameters of their definitions; which kernels serve many rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import triton_ops
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.compiled_ops import OUTSIDE, CompiledOps
from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.kernels.triton_ops import DECODE_ROWS, TRITON_OPS, TritonOps
from fastspec.shapes import UNTILED, Tiling

OPS = sorted(name for name in vars(Ops) if callable(getattr(Ops, name)) and not name.startswith("_"))
WITHOUT_KERNEL = {"store", "replaced"}  # which are made of other ops


def parameters(op: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults. Types may be narrower, which mypy checks."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(op).parameters.values()]


def test_there_are_ops() -> None:
    assert len(OPS) >= 36
    assert {"attend", "linear", "commit", "publish", "workspace"} <= set(OPS)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "ops", [TRITON_OPS, CPU_OPS, CompiledOps(TORCH_OPS), CompiledOps(TRITON_OPS)], ids=lambda ops: ops.name
)
def test_an_override_has_the_parameters_of_its_op(name: str, ops: Ops) -> None:
    assert parameters(getattr(ops, name)) == parameters(getattr(TORCH_OPS, name))


def test_triton_has_a_kernel_for_every_op() -> None:
    assert set(OPS) - set(vars(TritonOps)) == WITHOUT_KERNEL


def test_compiled_ops_take_what_is_outside_of_passes_from_the_given_ops() -> None:
    ops = CompiledOps(TRITON_OPS)
    assert all(getattr(ops, name) is getattr(TRITON_OPS, name) for name in OUTSIDE)
    within = set(OPS) - set(OUTSIDE) - {*WITHOUT_KERNEL, "attend", "workspace"}
    assert all(getattr(ops, name) is getattr(TORCH_OPS, name) for name in within)


def test_only_ops_are_replaced() -> None:
    ops = TORCH_OPS.replaced(gated=TRITON_OPS.gated)
    assert ops.gated is TRITON_OPS.gated
    assert ops.gated_norm is TORCH_OPS.gated_norm
    assert TORCH_OPS.gated is not TRITON_OPS.gated
    with pytest.raises(AttributeError, match="gate_all"):
        TORCH_OPS.replaced(gate_all=TRITON_OPS.gated)


def _packed(n: int, k: int, device: str = "cpu", *, gated: bool = False) -> Weight:
    drawn = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) / k**0.5
    return Weight.pack(drawn.to(device, torch.bfloat16), gated)


@pytest.mark.parametrize(("rows", "exact"), [(160, False), (161, False), (161, True)])
def test_many_rows_run_as_prompts_where_bits_may_change(
    rows: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = _packed(64, 128), torch.zeros(rows, 1, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(triton_ops, "has_warp_groups", lambda device: True)
    for name in ("packed_linear", "prefill_linear"):
        monkeypatch.setattr(triton_ops, name, lambda *given, name=name, **options: name)
    tiling = Tiling(DECODE_ROWS, 1) if exact else UNTILED
    found = TRITON_OPS.linear(x, weight, None, tiling)
    assert found == ("prefill_linear" if rows > 160 and not exact else "packed_linear")


@pytest.mark.gpu
def test_steps_of_many_rows_have_the_bits_of_prompts_if_exact_is_false() -> None:
    rows, hidden, inner = 192, 512, 1024
    shapes = {"o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (768, hidden)}
    held: dict[str, Any] = {name: _packed(*shape, "cuda", gated=name == "gate_up") for name, shape in shapes.items()}
    held |= {f"{name}_bias": None for name in shapes}
    held |= dict.fromkeys(("input_norm", "post_norm"), torch.ones(hidden, device="cuda").bfloat16())
    layer: Any = SimpleNamespace(**held)
    attended, x = torch.randn(2, rows, 1, hidden, device="cuda").bfloat16()

    def tail(a: Tensor, x: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
        made, qkv = TRITON_OPS.layer_tail(TRITON_OPS.linear, a, x, layer, layer, 1e-5, tiling)
        assert qkv is not None
        return made, qkv

    step = tail(attended, x, UNTILED)
    prompt = tail(attended.view(1, rows, hidden), x.view(1, rows, hidden), UNTILED)
    assert all(torch.equal(mine.flatten(), other.flatten()) for mine, other in zip(step, prompt, strict=True))
    exact = tail(attended, x, Tiling(DECODE_ROWS, 1))
    assert not torch.equal(step[1], exact[1])  # or the promise would not need exact=True
    for mine, other in zip(step, exact, strict=True):  # both round the result to bf16, 8 significant bits
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=float(other.abs().max()) * 2**-6)
