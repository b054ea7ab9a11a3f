"""The end of a sampled step in three launches, against its definition in torch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.sampling.distribution import DRAFT, PhiloxDraws
from fastspec.sampling.rules import BLOCK, COUPLED, MODES, REJECTION
from fastspec.state import IDLE, RUNNING, DecodeState
from tests.helpers.devices import devices
from tests.helpers.layouts import spread
from tests.helpers.sampled import INF, assert_same_step, drafted, logits_for, mixed_state, plain_state
from tests.helpers.states import copy_of

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")
import triton.language as tl  # noqa: E402

from fastspec.kernels.sampling import distribution  # noqa: E402
from fastspec.kernels.sampling import logits as sampled_parts  # noqa: E402
from fastspec.kernels.sampling import sampled_commit as module  # noqa: E402
from fastspec.kernels.sampling.commit import scratch_of  # noqa: E402
from fastspec.kernels.sampling.draw import sampled_draw  # noqa: E402
from fastspec.kernels.sampling.logits import SampledWork, sampled_work  # noqa: E402
from fastspec.kernels.sampling.sampled_commit import sampled_commit  # noqa: E402

NAN = float("nan")
INTERPRETED = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a line, however few ids."""
    for part in (sampled_parts, distribution):
        monkeypatch.setattr(part, "CHUNK", 64 if INTERPRETED else 256)


def junk(work: SampledWork) -> SampledWork:
    """What is not counters may hold anything."""
    work.records.fill_(-1)
    work.groups.fill_(NAN)
    work.found.fill_(2**31 - 1)
    return work


def run(
    rows: DecodeState, logits: Tensor, rule: str, deterministic: bool, entry: tuple[Tensor, Tensor] | None = None
) -> None:
    """The kernels, with poisoned work areas that must be left as they should be found."""
    batch, k = rows.batch, rows.draft_tokens.shape[1]
    scratch = scratch_of(batch, k, logits.device)
    work = junk(sampled_work(batch, k, logits.shape[2], logits.device))
    sampled_commit(logits, rows, scratch, work, entry, rule=rule, deterministic=deterministic, draws=None)
    assert not scratch.any()
    assert not work.counters.any()
    assert not work.arrivals.any()


def compare(whole: DecodeState, first: int, logits: Tensor, rule: str, deterministic: bool = False) -> None:
    """Kernels over rows first.. of `whole` against the definition; what is published too."""
    batch, k = len(logits), whole.draft_tokens.shape[1]
    theirs = copy_of(whole)
    rows, twins = whole.rows(first, first + batch), theirs.rows(first, first + batch)
    entries = torch.zeros(3, 1 + batch * (5 + k), dtype=torch.int64, device=logits.device)
    ring = entries, torch.full((1,), 40, device=logits.device)
    expected = entries.clone(), ring[1].clone()
    run(rows, logits, rule, deterministic, ring)
    draws = PhiloxDraws(twins.seeds)
    reference.sampled_commit(logits, twins, None, None, expected, rule=rule, deterministic=deterministic, draws=draws)
    assert_same_step(whole, theirs)
    assert torch.equal(ring[1], expected[1])
    ours, other = (table[:, 1:].view(3, batch, 5 + k) for table in (entries, expected[0]))
    assert torch.equal(ours[:, :, :4], other[:, :, :4])
    emitted = torch.arange(k + 1, device=logits.device) < other[:, :, :1]
    assert torch.equal(ours[:, :, 4:][emitted], other[:, :, 4:][emitted])


def mixed(seed: int, rule: str, *, batch: int, k: int, vocab: int, device: str, deterministic: bool = False) -> None:
    whole, rows = mixed_state(seed, batch=batch, k=k, vocab=vocab, device=device, before=1, after=1)
    target, draft = logits_for(seed, batch, k, vocab, device)
    if not deterministic:
        drafted(rows, draft, rule)
    compare(whole, 1, target, rule, deterministic)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize(("k", "vocab", "batch"), [(0, 111, 3), (1, 8, 6), (3, 150, 3)])
def test_random_mixes_of_options(k: int, vocab: int, batch: int, rule: str, device: str) -> None:
    for seed in range(1 if INTERPRETED else 25):
        mixed(seed, rule, batch=batch, k=k, vocab=vocab, device=device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
def test_drafts_that_were_certain(rule: str, device: str) -> None:
    for seed in range(1 if INTERPRETED else 10):
        mixed(seed, rule, batch=6, k=2, vocab=40, device=device, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize(("vocab", "batch", "k"), [(989, 9, 3), (32000, 7, 5), (128256, 4, 7), (151936, 33, 2)])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(
    vocab: int, batch: int, k: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # chunks as they are
    for seed in range(3):
        mixed(seed, rule, batch=batch, k=k, vocab=vocab, device="cuda")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_place_where_nothing_can_be_chosen(value: float, rule: str, device: str) -> None:
    """At each place, in greedy rows and in others: the row is marked, or whole, as the definition has it."""
    k, vocab = 2, 20
    cases = list(itertools.product(range(k + 1), (0.0, 1.0)))
    state = plain_state(len(cases), k, vocab, device)
    target, draft = logits_for(3, len(cases), k, vocab, device)
    drafted(state, draft, rule)
    for row, (place, temperature) in enumerate(cases):
        state.temperature[row] = temperature
        target[row, place, slice(None) if value == -INF else 5] = value
    compare(state, 0, target, rule)
    assert (state.accepted < 0).any()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_laws_that_meet_nowhere_are_one_or_leave_one_id(rule: str, device: str) -> None:
    """p = q, disjoint supports, a zero of q, all but one id filtered, ids banned by -inf."""
    k, vocab = 2, 12
    state = plain_state(6, k, vocab, device)
    target, _ = logits_for(1, 6, k, vocab, device)
    laws = target[:, :k].clone()
    laws[1, :, ::2] = -INF
    target[1, :, 1::2] = -INF
    laws[2, :, 3] = -INF
    state.top_p[3] = 1e-4
    target[4, :, 1:] = -INF
    state.top_k[5] = 1
    drafted(state, laws, rule)
    compare(state, 0, target, rule)
    assert state.accepted[0] == k, "drafts of the target's own law are all accepted"
    assert state.accepted[1] == 0, "what the target cannot emit is not accepted"


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
def test_greedy_rows_emit_what_greedy_verification_does(rule: str, device: str) -> None:
    k, vocab = 3, 90
    state = plain_state(5, k, vocab, device)
    state.temperature.zero_()
    target, _ = logits_for(7, 5, k, vocab, device)
    target[:, :, 50] = target.amax(-1)  # ties: the lowest id
    picks = target.argmax(-1)
    state.draft_tokens.copy_(picks[:, :k])
    state.draft_tokens[1, 0] += 1
    state.draft_tokens[2, 2] += 1
    state.draft_counts[3] = 1
    state.draft_probs.zero_().scatter_(2, state.draft_tokens[:, :, None], 1.0)
    theirs = copy_of(state)
    reference.verify_commit(target, theirs, None)
    run(state, target, rule, deterministic=False)
    assert torch.equal(state.tokens[:, :-1], theirs.tokens[:, :-1])
    for name in ("lengths", "emitted", "accepted", "finish"):
        assert torch.equal(getattr(state, name), getattr(theirs, name)), name


@pytest.mark.parametrize("device", devices())
def test_rows_do_not_depend_on_each_other_nor_on_where_they_are(device: str) -> None:
    """A row alone, in another place beside others, and again: the same record to the bit, and the same tokens."""
    compare_alone(3, 2, 80, device, range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k", "vocab"), [(33, 5, 32000), (33, 2, 128256), (8, 7, 151936)])
def test_so_at_real_sizes(batch: int, k: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # chunks as they are
    compare_alone(batch, k, vocab, "cuda", range(0, batch, 3))


def compare_alone(batch: int, k: int, vocab: int, device: str, alone_too: range) -> None:
    state, _ = mixed_state(5, batch=batch, k=k, vocab=vocab, device=device)
    state.finish.fill_(RUNNING)
    state.draft_counts.fill_(k)
    target, draft = logits_for(5, batch, k, vocab, device)
    drafted(state, draft, BLOCK)
    together, again = copy_of(state), copy_of(state)
    works = [sampled_work(batch, k, vocab, target.device) for _ in range(2)]
    for rows, work in zip((together, again), works, strict=True):
        sampled_commit(
            target, rows, scratch_of(batch, k, target.device), work, rule=BLOCK, deterministic=False, draws=None
        )
    assert torch.equal(works[0].records, works[1].records)
    assert torch.equal(together.block, again.block)
    for row in alone_too:
        alone = copy_of(state).rows(row, row + 1)
        work = sampled_work(1, k, vocab, target.device)
        sampled_commit(
            target[row : row + 1].clone(),
            alone,
            scratch_of(1, k, target.device),
            work,
            rule=BLOCK,
            deterministic=False,
            draws=None,
        )
        assert torch.equal(work.records.view(k + 1, -1), works[0].records.view(batch, k + 1, -1)[row])
        assert torch.equal(alone.block, together.block[row : row + 1])


@pytest.mark.parametrize("device", devices())
def test_programs_that_take_turns_at_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many lines a program takes several chunks: the same records to the bit, and the same tokens."""
    k, vocab = 2, 150 if INTERPRETED else 3000
    state, _ = mixed_state(5, batch=3, k=k, vocab=vocab, device=device)
    target, draft = logits_for(5, 3, k, vocab, device)
    drafted(state, draft, BLOCK)
    left = []
    for programs in (1, 18, 768):
        for part in (sampled_parts, distribution, module):
            monkeypatch.setattr(part, "PROGRAMS", programs)
        rows, work = copy_of(state), sampled_work(3, k, vocab, target.device)
        sampled_commit(target, rows, scratch_of(3, k, target.device), work, rule=BLOCK, deterministic=False, draws=None)
        assert not work.counters.any()
        left.append((work.records, rows.block, rows.accepted))
    for name in range(3):
        assert all(torch.equal(left[0][name], other[name]) for other in left[1:])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
def test_races_of_listed_ids_and_of_chunks(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program lets few ids race, as all programs would; tokens and counts of them are those of the definition."""
    k, vocab = 1 if INTERPRETED else 2, 150
    for raced, piece, listed in ((1024, 256, 1024), (1024, 16, 1024), (16, 16, 1024), (1024, 256, 0)):
        monkeypatch.setattr(module, "MAX_LISTED", raced)
        monkeypatch.setattr(module, "LISTED", piece)
        monkeypatch.setattr(sampled_parts, "LISTED", listed)
        for seed in range(1 if INTERPRETED else 10):
            state = plain_state(3, k, vocab, device)
            state.top_k.copy_(torch.tensor([12, 30, 50]))
            state.top_p.fill_(0.9)
            state.seeds.add_(1000 * seed)
            target, draft = logits_for(seed, 3, k, vocab, device)
            drafted(state, draft, rule)
            compare(state, 0, target, rule)


@pytest.mark.parametrize("device", devices())
def test_coupled_text_does_not_depend_on_k(device: str) -> None:
    """The first token of a step is one and the same with drafts, with others, and without."""
    vocab = 80
    first = []
    for k in (0, 2):
        state = plain_state(4, k, vocab, device)
        target, draft = logits_for(2, 4, 2, vocab, device)
        drafted(state, draft[:, :k], COUPLED)
        run(state, target[:, : k + 1].contiguous(), COUPLED, deterministic=False)
        first.append(state.block[:, 0].clone())
    assert torch.equal(*first)


@pytest.mark.parametrize("device", devices())
def test_rows_that_do_not_run_are_left_alone_whatever_they_hold(device: str) -> None:
    k, vocab = 2, 70
    state, _ = mixed_state(4, batch=3, k=k, vocab=vocab, device=device)
    state.finish.fill_(IDLE)
    state.finish[1] = RUNNING
    target, draft = logits_for(4, 3, k, vocab, device)
    drafted(state, draft, BLOCK)
    for row in (0, 2):
        target[row] = NAN
        state.draft_probs[row] = NAN
        state.bias[row] = NAN
        state.temperature[row] = NAN
        state.draft_tokens[row] = 2**40
        state.top_k[row] = -3
    before = copy_of(state)
    run(state, target, BLOCK, deterministic=False)
    for name in ("tokens", "lengths", "finish", "output_counts", "draft_lengths"):
        for row in (0, 2):
            assert torch.equal(getattr(state, name)[row], getattr(before, name)[row]), name
    assert state.emitted[0] == state.emitted[2] == 0
    assert state.emitted[1] > 0


def test_wrong_layouts_are_refused_by_name() -> None:
    state = plain_state(2, 2, 12, "cpu")
    logits = torch.zeros(2, 3, 12)
    scratch, work = scratch_of(2, 2, logits.device), sampled_work(2, 2, 12, logits.device)
    with pytest.raises(ValueError, match=r"work area is too small.*sampled_work\(2, 2, 12, "):
        sampled_commit(
            logits, state, scratch, sampled_work(1, 2, 12, logits.device), rule=BLOCK, deterministic=False, draws=None
        )
    with pytest.raises(ValueError, match=r"logits is float64 .*wanted float32"):
        sampled_commit(logits.double(), state, scratch, work, rule=BLOCK, deterministic=False, draws=None)
    wide = sampled_work(2, 2, 13, logits.device)
    with pytest.raises(ValueError, match="the state has room for 12 ids, the logits have 13: allocate"):
        sampled_commit(torch.zeros(2, 3, 13), state, scratch, wide, rule=BLOCK, deterministic=False, draws=None)
    with pytest.raises(ValueError, match=r"logits is .*strides.*at one stride"):
        sampled_commit(torch.zeros(2, 4, 12)[:, :3], state, scratch, work, rule=BLOCK, deterministic=False, draws=None)


@pytest.mark.parametrize("name", [*sampled_parts.SOURCE, "draft_probs"])
def test_a_state_that_would_be_misread_is_refused(name: str) -> None:
    """As it is refused where drafts are drawn, too."""
    state = plain_state(2, 2, 12, "cpu")
    state = replace(state, **{name: spread(getattr(state, name))})
    logits, work = torch.zeros(2, 3, 12), sampled_work(2, 2, 12, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"^{name} is .*strides.*; wanted .*: "):
        sampled_commit(
            logits, state, scratch_of(2, 2, logits.device), work, rule=BLOCK, deterministic=False, draws=None
        )
    with pytest.raises(ValueError, match=f"^{name} is .*strides.*; wanted .*: "):
        sampled_draw(logits[:, :1], state, 0, work, purpose=DRAFT, keep_draft_probs=True, draws=None)


@triton.jit
def _all_counted(flags, place, counts, most: tl.constexpr):
    return tl.min(tl.where(flags, most, place), axis=0)


@triton.jit
def _no_noise(p, excess, time):
    return module_entry(p, excess, time * 0.0 + 1.0)


@triton.jit
def _under_p(p, q, c):
    return p * 0.0


@triton.jit
def _never_shared(num_listed, kinds, place, first, last, raced):
    return module_is_shared(num_listed, kinds, place, first, last, raced) & (first > last)


@triton.jit
def _wrong_place(seed, position, purpose: tl.constexpr, start, size: tl.constexpr):
    return module_times(seed, position + 1, purpose, start, size)


@triton.jit
def _wrong_uniform(seed, position, purpose: tl.constexpr):
    return module_uniform(seed, position + 1, purpose)


module_entry, module_times, module_uniform = module._entry, module.times, module.uniform
module_is_shared = module.is_shared


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels do not see what is planted")
@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("_leading", _all_counted),
        ("_entry", _no_noise),
        ("_excess", _under_p),
        ("is_shared", _never_shared),
        ("times", _wrong_place),
        ("uniform", _wrong_uniform),
    ],
)
def test_planted_bugs_are_seen(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        many_mixes()


def many_mixes() -> None:
    """What a bug should show in."""
    for seed in range(8):
        for rule in MODES:
            mixed(seed, rule, batch=6, k=2, vocab=40, device="cpu")
