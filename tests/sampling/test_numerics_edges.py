"""Laws at their edges, through a step in fp32: what is emitted and accepted where formulas divide by nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastspec.sampling import distribution, processors, verify
from fastspec.sampling.distribution import TARGET, PhiloxDraws, SamplerRows
from fastspec.sampling.rules import BLOCK, MODES
from fastspec.shapes import FULL, StepShape
from fastspec.state import RUNNING, DecodeState
from fastspec.step import step
from tests.helpers.devices import devices
from tests.helpers.tables import WHOLE, table_modules, table_state

ROWS, K, VOCAB = 4000, 3, 5
OFF = -math.inf
PLAIN = torch.tensor([0.5, 1.0, -1.0, 2.0, 0.0])
RULES = {"rejection": verify.rejection, "block": verify.block}


def one_step(target: Tensor, draft: Tensor, mode: str, device: str, **state: Tensor) -> DecodeState:
    """Rows with seeds of their own after one step; every place has the logits [V] of target and draft."""
    places = K + 8
    parts = table_modules(*(logits.to(device).expand(places, VOCAB, VOCAB).contiguous() for logits in (target, draft)))
    made = table_state(torch.ones(ROWS, 2, dtype=torch.int64), k=K, vocab=VOCAB, limit=20, stop_ids=[], device=device)
    made.seeds.copy_(torch.arange(ROWS))
    for name, value in state.items():
        getattr(made, name).copy_(value)
    step(parts, made, StepShape(K, FULL, 1, WHOLE, verification=mode), PhiloxDraws(made.seeds))
    return made


def shares(state: DecodeState) -> Tensor:
    """How often each id was the first emitted."""
    return torch.bincount(state.block[:, 0], minlength=VOCAB).double().cpu() / ROWS


def assert_law(state: DecodeState, law: Tensor) -> None:
    """Impossible ids never come, the others as often as they should, to five standard errors."""
    found, law = shares(state), law.double()
    assert torch.equal(found[law == 0], torch.zeros(int((law == 0).sum()), dtype=torch.float64))
    assert ((found - law).abs() <= 5 * (law * (1 - law) / ROWS).sqrt()).all(), (found, law)
    assert (state.finish == RUNNING).all()
    assert (state.accepted >= 0).all()


LOW, HIGH = torch.tensor([0.0, 1.0, OFF, OFF, OFF]), torch.tensor([OFF, OFF, 0.0, 1.0, 2.0])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_drafts_that_the_target_never_picks_are_all_refused(mode: str, device: str) -> None:
    """The target knows none of the drafts: none is accepted, and its own law is left."""
    state = one_step(HIGH, LOW, mode, device)
    assert (state.accepted == 0).all()
    assert_law(state, HIGH.softmax(-1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_with_the_targets_distribution_is_always_accepted(mode: str, device: str) -> None:
    """All is accepted, and the last token is drawn all the same."""
    state = one_step(PLAIN, PLAIN, mode, device)
    assert (state.accepted == K).all()
    assert_law(state, PLAIN.softmax(-1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_one_hot_distributions_of_draft_and_target_give_the_targets(mode: str, device: str) -> None:
    """Of the draft, of the target, of both alike and apart."""
    first, second = (torch.where(torch.arange(VOCAB) == token, 0.0, OFF) for token in (1, 3))
    assert_law(one_step(PLAIN, first, mode, device), PLAIN.softmax(-1))
    assert_law(one_step(first, PLAIN, mode, device), first.softmax(-1))
    assert (one_step(first, first, mode, device).accepted == K).all()
    assert (one_step(first, second, mode, device).accepted == 0).all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_underflows(mode: str, device: str) -> None:
    """Ids whose draft probability is 0 in fp32, though their logits are finite, keep their chance."""
    draft = torch.tensor([0.0, -200.0, -200.0, 0.0, -200.0])
    assert_law(one_step(PLAIN, draft, mode, device), PLAIN.softmax(-1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
def test_everything_is_filtered_but_one(mode: str, device: str) -> None:
    """top_p = 0, min_p = 1 and top_k = 1 at once: the largest is left, and draft and target agree on the filters."""
    options = {"top_p": torch.zeros(ROWS), "min_p": torch.ones(ROWS), "top_k": torch.ones(ROWS, dtype=torch.int64)}
    state = one_step(PLAIN, PLAIN.flip(0), mode, device, **options)
    assert shares(state)[3] == 1.0


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_draft_costs_acceptance_alone(value: float, mode: str, device: str) -> None:
    """NaN and infinities in the draft's logits: the text follows the target's law."""
    draft = torch.where(torch.arange(VOCAB) == 2, value, PLAIN)
    assert_law(one_step(PLAIN, draft, mode, device), PLAIN.softmax(-1))
    assert_law(one_step(PLAIN, torch.full((VOCAB,), OFF), mode, device), PLAIN.softmax(-1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_target_emits_nothing(value: float, mode: str, device: str) -> None:
    invalid = torch.where(torch.arange(VOCAB) == 2, value, PLAIN)
    for target in (invalid, torch.full((VOCAB,), OFF)):
        state = one_step(target, PLAIN, mode, device)
        assert (state.accepted == -1).all()  # at place 0
        assert (state.emitted == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_chances_are_probabilities_whatever_the_laws(rule: str) -> None:
    """fp32 laws with zeros, subnormal numbers and ones: every coin's chance is in 0..1, and never NaN."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1e-7, 1.0, 1.0])
    p, q = (sizes[torch.randint(7, (500, places, VOCAB), generator=generator)] for places in (K + 1, K))
    p[..., 0] += (p.sum(-1) == 0).float()
    q[..., 0] += (q.sum(-1) == 0).float()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafts = torch.randint(VOCAB, (500, K), generator=generator)
    seen: list[Tensor] = []

    class Coins(PhiloxDraws):
        def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
            seen.append(probability)
            return super().accept(probability, positions)

    places = torch.arange(K + 1).expand(500, -1)
    accepted, block = RULES[rule](p, q, drafts, torch.full((500,), K), places, Coins(torch.arange(500)), TARGET)
    assert ((seen[0] >= 0) & (seen[0] <= 1)).all()
    last = block.gather(1, accepted[:, None])[:, 0]
    left = verify.residual(p, torch.cat((q, torch.zeros_like(p[:, :1])), dim=1))
    # what ends a block is possible for the target, and beyond the draft's law where that leaves anything
    assert (p[torch.arange(500), accepted, last] > 0).all()
    if rule == "rejection":
        assert (left[torch.arange(500), accepted, last] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_laws_keep_the_precision_of_logits(dtype: torch.dtype) -> None:
    """Softmax, filters, ratio and residual in the dtype of the logits, which are fp32 in every model."""
    logits = torch.randn(2, 3, VOCAB, dtype=dtype)
    rows = SamplerRows(torch.ones(2), torch.tensor([0, 2]), torch.tensor([1.0, 0.9]), torch.zeros(2))
    law = distribution.compute_probs(logits, rows)
    assert law.dtype == dtype
    assert verify.residual(law, law.roll(1, 0)).dtype == dtype
    assert verify.accept_probability(law, law.roll(1, 0)).dtype == dtype
    assert processors.drawable(law[:, 0]).dtype == dtype


def test_the_shares_see_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    state = one_step(PLAIN, PLAIN.flip(0), BLOCK, "cpu")
    with pytest.raises(AssertionError):
        assert_law(state, PLAIN.softmax(-1))
