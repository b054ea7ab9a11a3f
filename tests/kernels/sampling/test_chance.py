"""Steps that sample, by kernels, against the exact law of what they emit: ten million draws and more for each case.

Rows that differ in their seeds alone are draws of one law. What a step does not emit is drawn from the target's law
here, so that every row has three tokens, whose joint law must be the product of the target's.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.sampling import distribution, processors
from fastspec.sampling.rules import BLOCK, COUPLED, MODES, REJECTION
from fastspec.state import DecodeState
from tests.helpers.chance import chi_square_limit
from tests.helpers.sampled import logits_for, mixed_state, plain_state

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import distribution as sampled_laws  # noqa: E402
from fastspec.kernels.sampling import draw as sampled_draw_module  # noqa: E402
from fastspec.kernels.sampling import logits as sampled_parts  # noqa: E402
from fastspec.kernels.sampling import sampled_commit as sampled_commit_module  # noqa: E402
from fastspec.kernels.sampling.commit import scratch_of  # noqa: E402
from fastspec.kernels.sampling.draw import sampled_draw  # noqa: E402
from fastspec.kernels.sampling.logits import sampled_work  # noqa: E402
from fastspec.kernels.sampling.sampled_commit import sampled_commit  # noqa: E402

pytestmark = pytest.mark.gpu
VOCAB, K = 8, 2
DEVICE = "cuda"
DRAWS = 10_000_000
ROWS = 2**14  # times the places of a step: no axis of a grid but the first may have more than 65535 programs
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition": 1.4, "presence": 0.3, "frequency": 0.4},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "frequency": 0.5},
}


def spread_rows(kinds: DecodeState, rows: int) -> DecodeState:
    """Rows of `kinds` over and over."""
    repeats = rows // kinds.batch
    return DecodeState(
        **{
            name: getattr(kinds, name).repeat(repeats, *[1] * (getattr(kinds, name).dim() - 1))
            for name in DecodeState.__dataclass_fields__
        }
    )


def joint_law(kinds: DecodeState, target: Tensor) -> Tensor:
    """float64 [kinds, V^3] of the next three tokens, whatever was drafted."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)), device=target.device)
    law = torch.zeros(kinds.batch, VOCAB, VOCAB, VOCAB, dtype=torch.float64, device=target.device)
    for first, second in pairs.tolist():
        drafts = torch.tensor([first, second], device=target.device).expand(kinds.batch, 2)
        p = distribution.compute_probs(
            processors.process(target.double(), kinds.processors, kinds.lengths, drafts), kinds.sampler
        )
        law[:, first, second] = (p[:, 0, first] * p[:, 1, second])[:, None] * p[:, 2]
    return law.flatten(1)


def completed(rows: DecodeState, law: Tensor, start: Tensor) -> Tensor:
    """Cells int64 [B] of the three tokens, what was not emitted drawn by torch from the joint law given the others."""
    joint = law.view(-1, VOCAB, VOCAB, VOCAB)
    kind = torch.arange(rows.batch, device=law.device) % len(joint)
    width = rows.tokens.shape[1] - 1
    tokens = rows.tokens.gather(1, (start[:, None] + torch.arange(3, device=law.device)).clamp(max=width))
    first = tokens[:, 0]
    drawn = torch.multinomial(joint[kind, first].sum(-1), 1)[:, 0]
    second = torch.where(rows.emitted > 1, tokens[:, 1], drawn)
    drawn = torch.multinomial(joint[kind, first, second], 1)[:, 0]
    third = torch.where(rows.emitted > 2, tokens[:, 2], drawn)
    return (kind * VOCAB + first) * VOCAB**2 + second * VOCAB + third


def counted(kinds: DecodeState, rule: str, target: Tensor, draft: Tensor, law: Tensor) -> Tensor:
    """How often each cell came: int64 [kinds, V^3], DRAWS in all."""
    rows = spread_rows(kinds, ROWS)
    repeats = ROWS // kinds.batch
    target, draft = target.repeat(repeats, 1, 1), draft.repeat(repeats, 1, 1)
    fresh = {name: getattr(rows, name).clone() for name in ("lengths", "finish", "output_counts", "draft_lengths")}
    work = sampled_work(ROWS, K, VOCAB, target.device)
    scratch = scratch_of(ROWS, K, target.device)
    counts = torch.zeros(law.numel(), dtype=torch.int64, device=target.device)
    for start in range(0, DRAWS, ROWS):
        rows.seeds.copy_(torch.arange(start, start + ROWS))
        for name, values in fresh.items():
            getattr(rows, name).copy_(values)
        for j in range(K):
            logits = draft[:, j : j + 1]
            purpose = distribution.TARGET if rule == COUPLED else distribution.DRAFT
            sampled_draw(logits, rows, j, work, purpose=purpose, keep_draft_probs=rule != COUPLED, draws=None)
        sampled_commit(target, rows, scratch, work, rule=rule, deterministic=False, draws=None)
        counts += torch.bincount(completed(rows, law, fresh["lengths"]), minlength=law.numel())
    return counts.view_as(law)


def assert_follows(counts: Tensor, law: Tensor) -> None:
    """Chi-square over cells that expect ten or more, the rest taken together; total variation; nothing impossible."""
    for kind, expected in enumerate(law * (counts.sum(1) / law.sum(1))[:, None]):
        seen = counts[kind].double()
        assert seen[expected == 0].sum() == 0
        large = expected >= 10
        rest = expected[~large].sum()
        statistic = ((seen - expected)[large] ** 2 / expected[large]).sum()
        statistic += (seen[~large].sum() - rest) ** 2 / rest.clamp_min(1.0)
        degrees = int(large.sum())
        assert statistic < chi_square_limit(max(degrees, 1)), (kind, float(statistic), degrees)
        variation = 0.5 * (seen - expected).abs().sum() / expected.sum()
        # its mean is about sqrt(cells / (2 pi draws))
        assert variation < 2 * (degrees / 6.28 / expected.sum()).sqrt() + 1e-5, (kind, float(variation))


def made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs no larger than eight ids need."""
    for part in (sampled_parts, sampled_laws):
        monkeypatch.setattr(part, "CHUNK", 64)
    monkeypatch.setattr(sampled_parts, "CANDIDATES", 64)
    monkeypatch.setattr(sampled_laws, "GROUPS_LAUNCH", {"num_warps": 2})
    for part in (sampled_laws, sampled_draw_module, sampled_commit_module):
        monkeypatch.setattr(part, "LAUNCH", {"num_warps": 2})


def settings(kinds: DecodeState) -> None:
    """What every case here has: room, two drafts, and stop ids that do not come."""
    kinds.finish.zero_()
    kinds.limits.fill_(kinds.tokens.shape[1] - 1)
    kinds.draft_counts.fill_(K)
    kinds.stop_ids.fill_(-1)
    kinds.lengths.clamp_(max=30)


def check(kinds: DecodeState, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_small(monkeypatch)
    settings(kinds)
    target, draft = logits_for(11, kinds.batch, K, VOCAB, DEVICE, spread=1.5, apart=0.8)
    law = joint_law(kinds, target)
    assert_follows(counted(kinds, rule, target, draft, law), law)


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_of_each_option_have_the_exact_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = plain_state(1, K, VOCAB, DEVICE)
    for field, value in OPTIONS[name].items():
        getattr(kinds, field).fill_(value)
    kinds.in_prompt[:, ::3] = True
    check(kinds, BLOCK, monkeypatch)


@pytest.mark.parametrize("rule", MODES)
def test_rows_of_a_mixed_batch(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen kinds of rows in one batch, greedy ones among them, each against its own law."""
    kinds, _ = mixed_state(3, batch=16, k=K, vocab=VOCAB, device=DEVICE)
    kinds.draft_counts.fill_(K)
    check(kinds, rule, monkeypatch)


def test_the_test_sees_a_law_that_is_off_by_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    made_small(monkeypatch)
    kinds = plain_state(1, K, VOCAB, DEVICE)
    settings(kinds)
    target, draft = logits_for(11, 1, K, VOCAB, DEVICE, spread=1.5, apart=0.8)
    law = joint_law(kinds, target)
    counts = counted(kinds, REJECTION, target, draft, law)
    kinds.temperature.fill_(1.01)
    with pytest.raises(AssertionError):
        assert_follows(counts, joint_law(kinds, target))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.99, "temperature": 0.9}], ids=str)
def test_a_large_vocabulary_with_rare_ids(options: dict[str, float]) -> None:
    """Classes of 128256 ids: the likeliest one by one, a thousand of p below 1e-6 each by each, and the others."""
    vocab, batch = 128256, 1024
    rows = plain_state(batch, 0, vocab, DEVICE)
    for field, value in options.items():
        getattr(rows, field).fill_(value)
    generator = torch.Generator(DEVICE).manual_seed(2)
    line = torch.randn(vocab, generator=generator, device=DEVICE) * 0.5 - 14.5
    line[torch.randperm(vocab, generator=generator, device=DEVICE)[:20]] = torch.linspace(0, -6, 20, device=DEVICE)
    rare = torch.randperm(vocab, generator=generator, device=DEVICE)[:1000]
    rare = rare[line[rare] < -10]
    logits = line.expand(batch, 1, vocab).contiguous()
    law = distribution.compute_probs(line.double()[None, None], rows.rows(0, 1).sampler)[0, 0]
    assert law[rare].max() < 1e-6 or not options
    work, scratch = sampled_work(batch, 0, vocab, logits.device), scratch_of(batch, 0, logits.device)
    counts = torch.zeros(vocab, dtype=torch.int64, device=DEVICE)
    for start in range(0, DRAWS, batch):
        rows.seeds.copy_(torch.arange(start, start + batch))
        rows.lengths.fill_(5)
        rows.finish.zero_()
        sampled_commit(logits, rows, scratch, work, rule=REJECTION, deterministic=True, draws=None)
        counts += torch.bincount(rows.block[:, 0], minlength=vocab)
    ranked = law.argsort(descending=True)
    head, tail = ranked[:20], ranked[20:]
    tail = tail[law[tail] > 0]
    bins = torch.tensor_split(tail, 200)
    groups = [*head[:, None], *(part for part in bins if len(part)), rare[law[rare] > 0]]
    classes = [group for group in groups[:-1] if float(law[group].sum()) * DRAWS >= 10]
    expected = torch.stack([law[group].sum() for group in classes]) * counts.sum()
    seen = torch.stack([counts[group].sum() for group in classes]).double()
    assert counts[law == 0].sum() <= 2e-5 * DRAWS, "ids beyond the edge of top-p, but for rounding"
    assert ((seen - expected) ** 2 / expected).sum() < chi_square_limit(len(classes) - 1)
    if len(groups[-1]) > 100:
        # Poisson counts: the sum to five sigmas, and their scatter what it should be
        each = law[groups[-1]] * counts.sum()
        got = counts[groups[-1]].double()
        assert (got.sum() - each.sum()).abs() < 5 * each.sum().sqrt()
        assert ((got - each) ** 2 / each).sum() < 3 * len(each)
    assert counts.sum() >= DRAWS
