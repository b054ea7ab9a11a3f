"""compile=True: passes as one graph each, compiled once for every shape, with the text of the plain path."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.kernels import reference
from fastspec.kernels.compiled_ops import CompiledOps, PerShape, attend_op
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kernels.select import ops_for
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL, GREEDY, UNTILED, AttentionRule
from tests.helpers.compiled import compiled_engine, graphs_compiled
from tests.helpers.devices import devices
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import VOCAB, tiny_engine


def results(
    engine: Engine, prompts: list[list[int]], new: int, *, k: int, temperature: float = 0.0
) -> list[tuple[list[int], int]]:
    """New tokens of every prompt, and how many drafts were accepted: which only a draft that drafts alike repeats."""
    requests = [Request(list(row), new, RowOptions(temperature, 0, 1.0, 0.0, seed)) for seed, row in enumerate(prompts)]
    for _ in run_all(engine, requests, (), FULL if temperature else GREEDY, lambda made: k):
        pass
    return [(request.new_tokens, request.accepted) for request in requests]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("k", [0, 1, 4])
def test_text_is_that_of_the_plain_path(k: int) -> None:
    """Each pass is one graph: fullgraph=True raises at a break. aot_eager runs the traced ops one by one."""
    options: dict[str, Any] = {"batch": 2, "k": 4}
    before = graphs_compiled()
    prompts = prompts_of(3, 50, 17)
    plain, traced = tiny_engine(tiling=UNTILED, **options), compiled_engine(**options)
    assert results(traced, prompts, 24, k=k) == results(plain, prompts, 24, k=k)
    shapes = 1 + (2 if k > 1 else 1 if k else 0)  # of passes: the target's, and the draft's of two tokens and of one
    heads = 1 + (2 if k > 1 else 1 if k else 0)
    assert 0 < graphs_compiled() - before <= 2 * (shapes + heads)  # for one row, and for two


def test_sampled_text_is_that_of_the_plain_path() -> None:
    prompts = prompts_of(5, 9)
    engines = tiny_engine(batch=2, k=2, tiling=UNTILED), compiled_engine(batch=2, k=2)
    plain, traced = (results(engine, prompts, 20, k=2, temperature=1.0) for engine in engines)
    assert traced == plain


def test_nothing_but_a_shape_compiles() -> None:
    """Other prompts, lengths beyond a block of keys, stops, page orders and prompt chunks: all was there before."""
    options: dict[str, Any] = {"batch": 2, "k": 2, "max_length": 600, "num_pages": 90}
    engine = compiled_engine(**options)
    for prompts in (prompts_of(3, 4), prompts_of(3)):  # two rows, and one
        results(engine, prompts, 8, k=2)
    before = graphs_compiled()
    results(engine, prompts_of(7, 90, 31, seed=1), 20, k=2)
    long = prompts_of(300, 2, seed=2)
    expected = results(tiny_engine(tiling=UNTILED, **options), long, 20, k=2)
    assert results(engine, long, 20, k=2) == expected
    assert graphs_compiled() == before
    results(engine, prompts_of(3), 12, k=1)  # the target's pass of two tokens a row is a new one
    assert graphs_compiled() > before


class Settings:
    """Something a compiled function reads."""

    factor = 2


def scaled(settings: Settings, x: Tensor, places: int = 1) -> Tensor:
    return x * settings.factor + places


def test_shapes_count_apart() -> None:
    """More shapes than torch.compile keeps for one function, each compiled once; two owners of one shape are two."""
    limit = torch._dynamo.config.recompile_limit
    function = PerShape(scaled, "aot_eager")
    before = graphs_compiled()
    for _ in range(2):
        for size in range(2, 2 * limit + 2):
            assert torch.equal(function(Settings(), torch.ones(size), 1), torch.full((size,), 3.0))
    assert torch.equal(function(Settings(), torch.ones(4)[::2], 1), torch.full((2,), 3.0))
    assert graphs_compiled() - before == 2 * limit + 1
    assert torch._dynamo.config.recompile_limit == limit


def test_arguments_keep_their_defaults() -> None:
    assert torch.equal(PerShape(scaled, "aot_eager")(Settings(), torch.ones(3)), torch.full((3,), 3.0))


def test_the_counter_sees_a_recompilation_and_their_number_is_bounded() -> None:
    function, settings = PerShape(scaled, "aot_eager"), Settings()
    function(settings, torch.ones(3), 0)
    before = graphs_compiled()

    def go_on() -> None:
        for factor in range(3, 99):
            settings.factor = factor
            assert function(settings, torch.ones(3), 0)[0] == factor

    with pytest.raises(FailOnRecompileLimitHit):
        go_on()
    assert graphs_compiled() - before == torch._dynamo.config.recompile_limit - 1


def test_a_break_is_an_error() -> None:
    engine = compiled_engine(batch=2, k=2)
    target: Any = engine.modules.target

    def invalid(*args: Any, **options: Any) -> Tensor:
        torch._dynamo.graph_break()
        return reference.linear(*args, **options)

    target.ops = target.ops.replaced(linear=invalid)
    with pytest.raises(Unsupported):
        results(engine, prompts_of(3), 4, k=2)


def test_a_model_that_is_let_go_is_gone() -> None:
    """Weights must not wait for the collector of cycles."""
    gc.disable()
    try:
        engine = compiled_engine(batch=1, k=1)
        results(engine, prompts_of(3), 4, k=1)
        gone = [weakref.ref(engine.modules.target), weakref.ref(engine.modules.target.weights.head.data)]  # type: ignore[attr-defined]
        del engine
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def attend_arguments(
    device: torch.device, queries: int, *, norm: bool, window: int | None, softcap: float
) -> tuple[Any, ...]:
    """Arguments of the op for two rows of 20 + queries positions, 4 query heads and 2 key heads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    angles = torch.arange(96)[:, None] * torch.rand(8, generator=generator)
    weights = (1 + normal(16), 1 + normal(16)) if norm else (None, None)
    work = CompiledOps(ops_for(device)).workspace(device, 2, queries, 96, (4, 2, 16))
    work.partials.zero_()  # what is compared must not be what memory held before
    return (
        normal(2, queries, 8 * 16),
        angles.cos().to(device),
        angles.sin().to(device),
        normal(13, 16, 2, 16),
        normal(13, 16, 2, 16),
        torch.arange(1, 13, device=device).view(2, 6),
        torch.arange(20, 20 + queries, device=device).expand(2, -1).contiguous(),
        torch.ones(2, queries, dtype=torch.bool, device=device),
        *weights,
        torch.linspace(-2, 3, 4, device=device) if softcap else None,
        work.counters,
        work.partials,
        [4, window or 0, work.split_keys],
        [0.3, softcap, 1e-5],
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("queries", "norm", "window", "softcap"),
    [(1, False, None, 0.0), (5, True, None, 0.0), (5, False, 7, 2.0), (40, True, None, 0.0)],
)
def test_the_registered_op_is_what_it_says(
    device: str, queries: int, norm: bool, window: int | None, softcap: float
) -> None:
    """Schema, mutations, shapes of results: torch.library.opcheck."""
    arguments = attend_arguments(torch.device(device), queries, norm=norm, window=window, softcap=softcap)
    torch.library.opcheck(attend_op, arguments)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("queries", "window", "softcap"), [(1, None, 2.0), (5, 7, 0.0), (40, None, 2.0)])
def test_the_registered_op_means_what_its_definition_does(
    device: str, queries: int, window: int | None, softcap: float
) -> None:
    arguments, twins = (
        attend_arguments(torch.device(device), queries, norm=True, window=window, softcap=softcap) for _ in range(2)
    )
    out = attend_op(*arguments)
    q_norm, k_norm = twins[8:10]
    rule = AttentionRule(window, 0.3, softcap or None)
    norms = (q_norm, k_norm, 1e-5)
    expected = reference.attend(
        reference.AttendCall(*twins[:8], num_heads=4, norms=norms, num_blocks=1, rule=rule, sinks=twins[10])
    )
    # the same sums of fp32 in another order on CUDA; on the CPU the same operations
    tolerance = {"cpu": 0.0, "cuda": 1e-4}[device]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(arguments[3:5], twins[3:5], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_compiled_ops_leave_what_stands_outside_of_passes() -> None:
    ops = CompiledOps(TORCH_OPS)
    assert ops.name == "compiled"
    weight = torch.ones(16, 128)
    stored = ops.store(weight, True)
    assert stored.data is weight
    assert stored.format == "rows"
    for name in ("feed_rows", "verify_commit", "commit", "publish", "commit_scratch"):
        assert getattr(ops, name) is getattr(TORCH_OPS, name)


@pytest.mark.slow
def test_inductor_copies_no_cache_and_writes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs a C++ compiler. Functional graphs copy what an op mutates unless the compiler sees that it need not."""
    seen: set[int] = set()
    attend = reference.attend

    def recorded(call: reference.AttendCall) -> Tensor:
        seen.add(call.keys.data_ptr())
        return attend(call)

    plain, traced = tiny_engine(batch=1, k=2, tiling=UNTILED), compiled_engine("inductor", batch=1, k=2)
    prompts = prompts_of(3, 50)
    expected = results(plain, prompts, 24, k=2)
    monkeypatch.setattr(reference, "attend", recorded)
    assert results(traced, prompts, 24, k=2) == expected
    models: list[Any] = [traced.modules.target, traced.modules.proposer.model]  # type: ignore[union-attr]
    assert seen == {layer.data_ptr() for model in models for layer in model.cache.keys}
