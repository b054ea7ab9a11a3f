"""Greedy verification with its bookkeeping in one launch, against its definition, field by field."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.reference.linear import PartKeys
from fastspec.state import IDLE, RUNNING, DecodeState
from tests.helpers.devices import devices
from tests.helpers.states import assert_same, copy_of, random_state

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import greedy_commit as kernel
from fastspec.kernels.sampling.commit import scratch_of
from fastspec.kernels.sampling.greedy_commit import verify_commit

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes 0.1 ms a logit: there, several programs a place even so."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel, "LAUNCH", ((0, 16, 4),))


def compare(whole: DecodeState, first: int, logits: Tensor, ring: bool = True, launches: int = 1) -> None:
    """Launches over rows first.. of `whole` against the definition; other rows must not change."""
    batch, k = len(logits), whole.draft_tokens.shape[1]
    theirs = copy_of(whole)
    scratch = scratch_of(batch, k, logits.device)
    entries = torch.zeros(3, 1 + batch * (5 + k), dtype=torch.int64, device=logits.device)
    counter = torch.full((1,), 40, device=logits.device)
    twins = entries.clone(), counter.clone()
    for _ in range(launches):
        verify_commit(logits, whole.rows(first, first + batch), scratch, (entries, counter) if ring else None)
        reference.verify_commit(logits, theirs.rows(first, first + batch), None, twins if ring else None)
        assert_same(whole, theirs)
        assert torch.equal(entries, twins[0])
        assert torch.equal(counter, twins[1])
        assert not scratch.any()


def keys_of(logits: Tensor, parts: int) -> PartKeys:
    """Of logits [B, k+1, V], as if each of so many ranks had its ids."""
    each = [reference.keys_of(part.flatten(0, 1), part.shape[-1]) for part in logits.chunk(parts, dim=-1)]
    return PartKeys(torch.stack(each, dim=-1).unflatten(0, logits.shape[:2]), logits.shape[-1] // parts)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_keys_of_parts_end_a_step_as_logits_do(parts: int, device: str) -> None:
    """Also ties between parts, NaN, infinities, and rows whose largest logit is the lowest that is finite."""
    k, vocab = 3, 64
    whole, rows = random_state(parts, batch=6, k=k, vocab=vocab, device=device)
    logits = likely(rows, k, vocab, parts, device)
    logits[0, 0, [5, 40]] = 20.0  # the lowest id of equal ones
    logits[1, 1, 50] = NAN
    logits[2, 0, 3], logits[3, 2] = INF, -INF
    logits[4, 0] = torch.finfo(torch.float32).min
    logits[5, 0, 63], logits[5, 1] = 0.0, -0.0
    keys, theirs, by_keys = keys_of(logits, parts), copy_of(whole), copy_of(whole)
    reference.verify_commit(logits, theirs.rows(0, 6), None, None)
    reference.verify_commit(keys, by_keys.rows(0, 6), None, None)
    assert_same(by_keys, theirs)
    scratch = scratch_of(6, k, logits.device)
    verify_commit(keys, whole.rows(0, 6), scratch, None)
    assert_same(whole, theirs)
    assert not scratch.any()


def likely(rows: DecodeState, k: int, vocab: int, seed: int, device: str) -> Tensor:
    """Logits [B, k+1, V] in which most drafts are the pick, so that runs of every length are accepted."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows.batch, k + 1, vocab, generator=generator, device=device)
    agree = torch.rand(rows.batch, k, generator=generator, device=device) < 0.8
    best = torch.where(agree, 9.0, -9.0)[:, :, None]
    logits[:, :k].scatter_(2, rows.draft_tokens[:, :k, None], best)
    return logits


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [0, 1, 2])
def test_all_combinations_of_small_cases_equal_the_definition(k: int, device: str) -> None:
    """Which drafts are the pick, how many count, where a stop id lies, room, running or not: all combinations."""
    matches = itertools.product((False, True), repeat=k)
    rooms = [(0, RUNNING), (1, RUNNING), (k + 1, RUNNING), (k + 2, RUNNING), (k + 2, IDLE)]
    cases = list(itertools.product(matches, range(k + 1), range(k + 2), rooms))
    whole, _ = random_state(k, batch=len(cases), k=k, vocab=6, device="cpu")
    logits = torch.zeros(len(cases), k + 1, 7)
    for row, (match, counts, stop, (room, finish)) in enumerate(cases):
        for place in range(k + 1):
            pick = 6 if place == stop else place
            logits[row, place, pick] = 1.0
            if place < k:
                whole.draft_tokens[row, place] = pick if match[place] else pick - 1
        whole.stop_ids[row, 0] = 6
        whole.draft_counts[row] = counts
        whole.limits[row] = whole.lengths[row] + room
        whole.finish[row] = finish
    whole = DecodeState(**{name: getattr(whole, name).to(device) for name in DecodeState.__dataclass_fields__})
    compare(whole, 0, logits.to(device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("k", "vocab", "batch"), [(0, 111, 3), (1, 17, 64), (3, 111, 4), (16, 20, 3), (2, 500, 1)])
def test_random_states_in_slices_of_longer_tables(k: int, vocab: int, batch: int, device: str) -> None:
    for seed in range(2):
        whole, rows = random_state(seed, batch=batch, k=k, vocab=vocab, device=device, before=2, after=1)
        logits = likely(rows, k, vocab, seed, device)
        picks = logits.argmax(-1)
        rows.stop_ids[:, 3] = picks[:, k // 2]  # a stop in the middle of an accepted run
        rows.stop_ids[batch // 2 :, 3] = -1
        compare(whole, 2, logits, ring=seed == 0, launches=2 - seed)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [111, 32000, 50257, 128256, 151936])
@pytest.mark.parametrize("batch", [1, 7, 32, 64])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(batch: int, vocab: int) -> None:
    for k in (0, 1, 5, 16):
        whole, rows = random_state(k, batch=batch, k=16, vocab=vocab, device="cuda", before=1)
        logits = likely(rows, k, vocab, k, "cuda")
        rows.stop_ids[:, 3] = logits.argmax(-1)[:, k // 2]
        rows.stop_ids[batch // 2 :, 3] = -1
        for _ in range(3):
            rows.finish.fill_(RUNNING)
            compare(whole, 1, logits, launches=2)


@pytest.mark.parametrize("device", devices())
def test_picks_are_those_of_argmax(device: str) -> None:
    """Ties, signed zeros, infinities, denormals and NaN; at the seams between programs too."""
    lines = [
        [1.0, 3.0, 3.0, 2.0, 3.0],
        [-0.0, 0.0, -0.0, 0.0, -1.0],
        [0.0, -0.0, 1e-45, 0.0, 1e-45],
        [-1e-45, -1.0, -1e-45, -2e-45, -INF],
        [-INF] * 5,
        [INF, 1.0, INF, NAN, NAN],
        [-NAN, 1.0, NAN, INF, 0.0],
        [1.0, INF, -INF, INF, 0.0],
        [-3.0, -2.0, -2.5, -2.0, -7.0],
        [NAN] * 5,
    ]
    small = torch.tensor(lines, device=device)[:, None]
    chunk = kernel.LAUNCH[-1][1]
    vocab = 2 * chunk + 3
    wide = torch.full((len(lines), 1, vocab), -INF, device=device)
    at = [chunk - 1, chunk, chunk + 1, 2 * chunk, vocab - 1]
    wide[:, :, at] = small
    for logits in (small, wide):
        whole, _ = random_state(0, batch=len(lines), k=0, vocab=9, device=device)
        compare(whole, 0, logits)
        assert torch.equal(whole.block[:, 0], logits[:, 0].argmax(-1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_place_where_nothing_can_be_chosen(value: float, device: str) -> None:
    """At each place, behind each number of accepted drafts: a row emits what is before, and nothing at the first."""
    k = 3
    cases = list(itertools.product(range(k + 1), range(k + 1)))
    for spread in (True, False):  # one bad logit, or all of a place; one -inf alone is no harm
        whole, _ = random_state(5, batch=len(cases), k=k, vocab=9, device=device)
        whole.finish.fill_(RUNNING)
        whole.draft_counts.fill_(k)
        whole.limits.copy_(whole.lengths + k + 3)
        logits = likely(whole, k, 9, 1, device)
        for row, (right, place) in enumerate(cases):
            picks = logits[row].argmax(-1)
            whole.draft_tokens[row] = torch.where(torch.arange(k, device=device) < right, picks[:k], picks[:k] + 1)
            logits[row, place, slice(None) if spread else 8] = value
        compare(whole, 0, logits)
        if spread:
            cut = torch.tensor([place <= right for right, place in cases])
            # a NaN place's pick may equal the draft by chance: what is emitted ends before it all the same
            needed = torch.tensor([place for _, place in cases])
            assert torch.equal(whole.emitted.cpu()[cut], needed[cut])
            assert torch.equal(whole.accepted.cpu()[cut], needed[cut] - 1)
            assert (whole.finish.cpu()[cut] == RUNNING).all()


@pytest.mark.parametrize("device", devices())
def test_logits_of_a_wider_head_and_of_a_smaller_k(device: str) -> None:
    whole, rows = random_state(1, batch=3, k=4, vocab=30, device=device)
    logits = likely(rows, 2, 30, 1, device)
    wide = torch.full((3, 3, 41), INF, device=device)
    wide[..., :30] = logits
    compare(whole, 0, wide[..., :30])


def graph_of(body: object, warm_ups: int = 2) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            body()  # type: ignore[operator]
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()  # type: ignore[operator]
    return graph


@pytest.mark.gpu
def test_a_chain_of_steps_in_one_graph() -> None:
    """Many launches back to back in replays, each reading what the one before wrote, against the definition."""
    k, batch, vocab, launches = 3, 9, 32000, 4
    whole, rows = random_state(0, batch=batch, k=k, vocab=vocab, device="cuda", before=1)
    rows.finish.fill_(RUNNING)
    rows.lengths.fill_(1)
    rows.limits.fill_(20)
    theirs = copy_of(whole)
    saved = copy_of(whole)
    parts = [likely(rows, k, vocab, seed, "cuda") for seed in range(launches)]
    scratch = scratch_of(batch, k, rows.tokens.device)

    def body() -> None:
        for logits in parts:
            verify_commit(logits, rows, scratch)

    graph = graph_of(body)
    for name in DecodeState.__dataclass_fields__:
        getattr(whole, name).copy_(getattr(saved, name))
    for _ in range(6):
        graph.replay()
        for logits in parts:
            reference.verify_commit(logits, theirs.rows(1, 1 + batch), None)
        torch.cuda.synchronize()
        assert_same(whole, theirs)
        assert not scratch.any()
    assert (rows.finish != RUNNING).all()  # the caps were reached on the way


def test_wrong_layouts_are_refused_by_name() -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    logits = torch.zeros(2, 3, 12)
    with pytest.raises(ValueError, match=r"scratch is int64 \[5\]; wanted .*make it with scratch_of"):
        verify_commit(logits, rows, scratch_of(1, 2, logits.device))
    with pytest.raises(ValueError, match=r"logits is float64 \[2, 3, 12\]; wanted float32 .*pass logits.float"):
        verify_commit(logits.double(), rows, scratch_of(2, 2, logits.device))
    with pytest.raises(ValueError, match=r"logits is .*strides.*contiguous over the vocabulary"):
        verify_commit(torch.zeros(2, 3, 24)[..., ::2], rows, scratch_of(2, 2, logits.device))
