"""Every rule of verification and every proposer inside a step: no host read, no shape that depends on data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from fastspec.engine.engine import Engine
from fastspec.proposers.choose import Guarded
from fastspec.proposers.deterministic import DeterministicProposer
from fastspec.proposers.ngram import NGram
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import MODES, SyntheticAcceptance, Verification
from fastspec.shapes import GREEDY, SAMPLERS
from fastspec.step import step
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.helpers.variants import looking_up_first, proposing
from tests.step.test_step_static import NoHostReads, shape, start_rows

PROPOSERS: dict[str, Callable[[Engine], Engine]] = {
    "model": lambda engine: engine,
    "lookup": lambda engine: proposing(engine, NGram()),
    "both": lambda engine: looking_up_first(engine, NGram()),
    "guarded": lambda engine: proposing(engine, Guarded(NGram(), VOCAB)),
}
FULL = SAMPLERS[-1]  # the kind of step that can do everything
RULES: list[Verification] = [*MODES, SyntheticAcceptance(rate=0.7), SyntheticAcceptance(pattern=(3, 0))]


def one_step(engine: Engine, rule: Verification, k: int, sampler: str) -> None:
    view = engine.state.rows(0, 2)
    step(engine.modules, view, replace(shape(k, sampler), verification=rule), PhiloxDraws(view.seeds))


def started(engine: Engine) -> Engine:
    start_rows(engine.state)
    engine.state.temperature.fill_(1.0)
    return engine


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_step_reads_nothing(proposer: str, rule: Verification, sampler: str) -> None:
    for k in (1, 4):
        engine = started(PROPOSERS[proposer](tiny_engine(k=4, max_length=100)))
        with NoHostReads(), torch.inference_mode():
            one_step(engine, rule, k, sampler)
        assert engine.state.emitted[:2].min() >= 1


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_step_runs_on_tensors_without_values(proposer: str, rule: Verification) -> None:
    with FakeTensorMode(), torch.inference_mode():
        one_step(started(PROPOSERS[proposer](tiny_engine(k=4))), rule, 4, FULL)


@pytest.mark.parametrize(
    ("proposer", "rule"),
    [("lookup", MODES[1]), ("both", MODES[2]), ("model", RULES[3]), ("guarded", RULES[4])],
    ids=str,
)
def test_a_step_traces_as_one_graph(proposer: str, rule: Verification) -> None:
    plain, traced = (started(PROPOSERS[proposer](tiny_engine(k=3))) for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad():
        chosen = replace(shape(3, FULL), verification=rule)
        step(plain.modules, plain.state, chosen, PhiloxDraws(plain.state.seeds))
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        compiled(traced.modules, traced.state, chosen, PhiloxDraws(traced.state.seeds))
    assert torch.equal(plain.state.tokens, traced.state.tokens)
    assert torch.equal(plain.state.lengths, traced.state.lengths)


class Reads(DeterministicProposer):
    """A proposer that asks the device."""

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        count = k if int(lengths.max()) > 3 else 0
        return tokens[:, :k], torch.full_like(lengths, count)


def test_a_proposer_that_reads_is_seen() -> None:
    with pytest.raises(AssertionError, match="depends on data"), NoHostReads(), torch.inference_mode():
        one_step(started(proposing(tiny_engine(), Reads())), MODES[0], 4, GREEDY)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)), FakeTensorMode():
        one_step(started(proposing(tiny_engine(), Reads())), MODES[0], 4, GREEDY)
