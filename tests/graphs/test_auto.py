"""k chosen while decoding, on a GPU: steps launched ahead, one launch each, nothing that waits, nothing captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastspec.adaptive.controller import Controller, Observation, StepContext
from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.scheduling.requests import Request
from fastspec.shapes import GREEDY
from tests.helpers.devices import needs_idle_gpu
from tests.helpers.scheduling import run_all
from tests.helpers.steady import calls_of, waits_raise
from tests.helpers.tiny import capture_all, tiny_engine

pytestmark = pytest.mark.gpu
KS = (0, 2, 4)
STEPS = 200
GREEDY_ROW = RowOptions(0.0, 0, 1.0, 0.0, seed=0)


class Switching(Controller):
    """As the controller, but k changes all the time: among drafting ks, or to plain steps and back."""

    pattern: tuple[int, ...] = (2, 4)
    few = None  # and all rows draft

    def choose(self, context: StepContext) -> int:
        super().choose(context)  # what it costs counts too
        return self.pattern[self._seen // 3 % len(self.pattern)]


class ToPlain(Switching):
    pattern = (4, 0, 2)


def loop_with(engine: Engine, controller: Controller, new: int = 3000) -> Iterator[dict[int, list[int]]]:
    capture_all(engine, set(KS), GREEDY)
    requests = [Request([1, 2, 3], new, GREEDY_ROW), Request([4], new, GREEDY_ROW)]
    return iter(run_all(engine, requests, (), GREEDY, lambda made: 0, policy=controller))


def engine_of(**options: int) -> Engine:
    return tiny_engine(batch=2, max_length=3100, device="cuda", graphs=True, depth=2, **options)  # type: ignore[arg-type]


def test_switching_waits_for_nothing() -> None:
    """Coming back from plain steps included: what the draft missed is queued, and read by nobody."""
    engine = engine_of()
    for kind in (ToPlain, Switching, Controller):
        loop = loop_with(engine, kind(KS))
        for _ in range(40):  # the first kind's catching up compiles kernels
            next(loop)
        captured = len(engine.runner._graphs)  # type: ignore[attr-defined]
        with waits_raise():
            for _ in range(STEPS):
                next(loop)
        assert len(engine.runner._graphs) == captured  # type: ignore[attr-defined]


def test_one_launch_a_step_whatever_k() -> None:
    loop = loop_with(engine_of(), Switching(KS))
    for _ in range(20):
        next(loop)
    calls = calls_of(loop, STEPS)
    assert calls["cudaGraphLaunch"] == STEPS
    assert not calls.keys() & {"cudaMemcpy", "cudaStreamSynchronize", "cudaEventSynchronize"}


def test_two_steps_stay_under_way() -> None:
    """Whenever a result is read a later step was launched already, but where the draft has to catch up first."""
    engine = engine_of()
    ahead: list[int] = []

    class Watching(Switching):
        def observe(self, step: Observation) -> None:
            ahead.append(engine.ring.launched)
            super().observe(step)

    loop = loop_with(engine, Watching(KS))
    first = engine.ring.launched
    for _ in range(STEPS):
        next(loop)
    lags = [launched - first - number for number, launched in enumerate(ahead, start=1)]
    assert set(lags) == {1}, lags


@needs_idle_gpu
def test_times_come_from_the_clock_of_the_host() -> None:
    """The median interval is that of a step: replays in a row take as long, within what the host adds."""
    engine = engine_of()
    seen: list[Observation] = []

    class Recording(Switching):
        pattern = (4,)

        def observe(self, step: Observation) -> None:
            seen.append(step)

    loop = loop_with(engine, Recording(KS))
    for _ in range(STEPS):
        next(loop)
    times = sorted(step.seconds for step in seen[20:] if step.seconds is not None)
    assert len(times) > STEPS // 2
    with engine.on_device():
        alone = engine.seconds(2, engine.shapes.typical(4, GREEDY, None), 30)
    assert 0.8 * alone < times[len(times) // 2] < 2.0 * alone + 300e-6


def test_text_stays_and_a_run_adapts() -> None:
    texts = []
    for controller in (Controller(KS), Switching(KS), ToPlain(KS), None):
        engine = tiny_engine(batch=2, device="cuda", graphs=True, depth=2)
        capture_all(engine, set(KS), GREEDY)
        requests = [Request([1, 2, 3], 150, GREEDY_ROW), Request([4], 100, GREEDY_ROW)]
        for _ in run_all(engine, requests, (), GREEDY, lambda made: 0, policy=controller):
            pass
        texts.append([request.new_tokens for request in requests])
    assert texts[0] == texts[1] == texts[2] == texts[3]
