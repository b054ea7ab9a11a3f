"""The ops of every implementation have the parameters of their definitions."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.compiled_ops import OUTSIDE, CompiledOps
from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.kernels.triton_ops import TRITON_OPS, TritonOps

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
