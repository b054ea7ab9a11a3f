"""compile=True on CUDA: compiled passes inside of captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.kernels.attention import dispatch
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL, GREEDY, UNTILED
from tests.helpers.compiled import compiled_engine, graphs_compiled
from tests.helpers.scheduling import run_all
from tests.helpers.steady import waits_raise
from tests.helpers.tiny import VOCAB, capture_all, tiny_engine

pytestmark = pytest.mark.gpu


def texts(engine: Engine, seed: int, *, k: int, temperature: float = 0.0) -> list[list[int]]:
    """Of five prompts that come and go."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (5,), generator=generator).tolist()
    requests = [
        Request(
            torch.randint(VOCAB, (length,), generator=generator).tolist(),
            10 + length,
            RowOptions(temperature, 0, 1.0, 0.0, seed=index),
        )
        for index, length in enumerate(lengths)
    ]
    sampler = FULL if temperature else GREEDY
    capture_all(engine, {k}, sampler)
    for _ in run_all(engine, requests, (), sampler, lambda made: k):
        pass
    return [request.new_tokens for request in requests]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """The plain path, launched from the host, and the compiled one, captured."""
    options: dict[str, Any] = {"batch": 2, "k": 4, "max_length": 400, "device": "cuda"}
    return tiny_engine(tiling=UNTILED, **options), compiled_engine("inductor", graphs=True, depth=2, **options)


@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (1, 0.0), (4, 0.0), (4, 1.0)])
def test_text_is_that_of_the_plain_path(engines: tuple[Engine, Engine], k: int, temperature: float) -> None:
    """fp32 models, whose near-ties are rarer than these texts are long."""
    plain, traced = (texts(engine, k, k=k, temperature=temperature) for engine in engines)
    assert traced == plain


def test_captured_steps_compile_nothing_and_wait_for_nothing(engines: tuple[Engine, Engine]) -> None:
    engine = engines[1]
    texts(engine, 1, k=4)
    before = graphs_compiled()
    with waits_raise():
        texts(engine, 1, k=4)
    assert graphs_compiled() == before


def test_no_cache_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functional graphs copy what an op mutates unless the compiler sees that it need not."""
    seen: set[int] = set()
    launched = dispatch.attend

    def recorded(call: Any, work: Any) -> torch.Tensor:
        seen.update((call.keys.data_ptr(), call.values.data_ptr(), work.partials.data_ptr()))
        return launched(call, work)

    monkeypatch.setattr(dispatch, "attend", recorded)
    engine = compiled_engine("inductor", batch=1, k=2, device="cuda")
    texts(engine, 0, k=2)
    models: list[Any] = [engine.modules.target, engine.modules.proposer.model]  # type: ignore[union-attr]
    expected = {layer.data_ptr() for model in models for layer in (*model.cache.keys, *model.cache.values)}
    assert seen == expected | {model._work.partials.data_ptr() for model in models}
