"""What a compiling process does with one job, with stand-ins for Triton's compiler and its launchers."""

from __future__ import annotations

import json
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

import triton
from triton.backends.nvidia import driver

from fastspec.kernels.common import compile_jobs

META = object()


def job(*kinds: Any) -> bytes:
    return json.dumps([False, {}, {"dict": [[f"x{n}", kind] for n, kind in enumerate(kinds)]}, {}]).encode()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was done in which order. If the launcher has begun, the kernel waits until it is made."""
    order: list[Any] = []
    begun, made = Event(), Event()

    def launcher(source: Any, metadata: Any) -> None:
        begun.set()
        order.append(("launcher", metadata))
        made.set()
        metadata.global_scratch_size  # noqa: B018  (as Triton's own does, after it has stored the function)

    def compiled(source: Any, **_: Any) -> Any:
        if source == "fails":
            raise ValueError("no kernel")
        begun.wait(0.2)
        if begun.is_set():
            made.wait(5)
        order.append("kernel")
        return SimpleNamespace(metadata=META)

    def read(text: bytes) -> Any:
        return ("fails" if b"fails" in text else "source"), None, None, None

    monkeypatch.setattr(compile_jobs, "read_job", read)
    monkeypatch.setattr(triton, "compile", compiled)
    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    return order


def test_the_launcher_is_made_while_the_kernel_compiles(done: list[Any]) -> None:
    compile_jobs._compile(job("*fp32", {"tuple": ["*i32", "i32"]}), launcher=True)
    assert done == [("launcher", None), "kernel"]


@pytest.mark.parametrize("kinds", [["tensordesc<fp16[64, 64]>"], ["i32", {"tuple": ["tensordesc<fp16[64, 64]>"]}]])
def test_the_launcher_of_tma_descriptors_waits_for_the_kernel(kinds: list[Any], done: list[Any]) -> None:
    compile_jobs._compile(job(*kinds), launcher=True)
    assert done == ["kernel", ("launcher", META)]


def test_two_processes_are_forked_before_all_kernels_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(compile_jobs, "leave_out_torch", lambda: None)
    monkeypatch.setattr(compile_jobs, "import_module", order.append)
    monkeypatch.setattr(compile_jobs, "gc", SimpleNamespace(disable=lambda: None, freeze=lambda: None))
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: order.insert(0, "hashed"))
    monkeypatch.setattr(triton.knobs.cache, "dir", "")
    ended = SimpleNamespace(
        fork=lambda: order.append("fork") or 1, close=lambda end: None, wait=lambda: order.append("wait")
    )
    monkeypatch.setattr(compile_jobs, "os", ended)
    compile_jobs.serve("all kernels", "", list(range(9)))
    sampled = list(compile_jobs._SAMPLED)
    assert order == ["hashed", *sampled, *["fork"] * 2, "all kernels", *["fork"] * 7, *["wait"] * 9]


def test_kernels_that_differ_in_elements_share_a_launcher() -> None:
    first = job("*fp32", {"tuple": ["*i32", "i32"]}, "tensordesc<fp16[64, 64],NVMMASharedLayout(a=[1, 0])>")
    alike = job("*bf16", {"tuple": ["*u8", "i32"]}, "tensordesc<bf16[8, 32],NVMMASharedLayout(a=[0, 1])>")
    assert compile_jobs.launcher_of(first) == compile_jobs.launcher_of(alike)


@pytest.mark.parametrize("kind", ["i64", "fp32", "*fp32", "tensordesc<fp16[64, 64]>", "constexpr"])
def test_other_kinds_of_arguments_have_other_launchers(kind: str) -> None:
    others = ["i32", "fp64", "tensordesc<fp16[8, 64, 64]>", {"tuple": ["i32"]}]
    assert len({compile_jobs.launcher_of(job(each)) for each in (kind, *others)}) == len(others) + 1


def test_a_launcher_that_another_process_makes_is_left_to_it(done: list[Any]) -> None:
    compile_jobs._compile(job("*fp32"), launcher=False)
    assert done == ["kernel"]


def test_a_kernel_that_does_not_compile_leaves_its_launcher(done: list[Any]) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        compile_jobs._compile(job("fails"), launcher=True)
    assert done == [("launcher", None)]
