"""Log-probabilities that the kernels which end a step record: against the definition in fp64, and to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.reference.step import Record
from fastspec.sampling.rules import BLOCK, COUPLED, MODES
from fastspec.state import RUNNING, DecodeState
from tests.helpers.devices import devices
from tests.helpers.layouts import spread
from tests.helpers.sampled import plain_state
from tests.helpers.states import copy_of, random_state

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import (  # noqa: E402
    distribution as sampled_laws,
)
from fastspec.kernels.sampling import (  # noqa: E402
    greedy_commit,
    logprobs,
)
from fastspec.kernels.sampling import (  # noqa: E402
    logits as sampled_parts,
)
from fastspec.kernels.sampling.commit import scratch_of  # noqa: E402
from fastspec.kernels.sampling.logits import sampled_work  # noqa: E402
from fastspec.kernels.sampling.logprobs import RecordWork, record_work  # noqa: E402
from fastspec.kernels.sampling.sampled_commit import sampled_commit  # noqa: E402
from tests.kernels.sampling.test_greedy_commit import graph_of, likely  # noqa: E402

INF, NAN = float("inf"), float("nan")
INTERPRETED = not torch.cuda.is_available()
SLOTS = 3
GREEDY = "greedy"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a line, however few ids; and groups that are weighed in several turns."""
    if INTERPRETED:
        chunks_of(monkeypatch, 64)
        monkeypatch.setattr(logprobs, "PIECE", triton.language.constexpr(16))


def chunks_of(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(greedy_commit, "LAUNCH", ((0, chunk, 4),))
    monkeypatch.setattr(sampled_laws, "CHUNK", chunk)
    monkeypatch.setattr(sampled_parts, "CHUNK", max(64, chunk))


def poisoned(work: RecordWork) -> RecordWork:
    work.groups.fill_(NAN)
    work.levels.fill_(NAN)
    return work


def rings_of(rows: DecodeState) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((entries, counter), details) of a few slots, for these rows and one more."""
    places, top, device = rows.block.shape[1], rows.top_ids.shape[2], rows.block.device
    entries = torch.full((SLOTS, 1 + (rows.batch + 1) * (4 + places)), -9, device=device)
    details = torch.full((SLOTS, rows.batch + 1, places, 1 + 2 * top), -9, dtype=torch.int32, device=device)
    return (entries, torch.full((1,), 40, device=device)), details


def end(rows: DecodeState, logits: Tensor, top: int, rule: str = GREEDY, deterministic: bool = True) -> tuple[Any, ...]:
    """Ends a step of `rows` by kernels: (entries, counter, details, work), all counters left at zero."""
    batch, k, vocab = rows.batch, logits.shape[1] - 1, logits.shape[2]
    ring, details = rings_of(rows)
    scratch, work = scratch_of(batch, k, logits.device), poisoned(record_work(batch, k, vocab, logits.device))
    record = Record(top, work, details)
    if rule == GREEDY:
        greedy_commit.verify_commit(logits, rows, scratch, ring, record)
    else:
        sampling = sampled_work(batch, k, vocab, logits.device)
        sampled_commit(
            logits, rows, scratch, sampling, ring, rule=rule, deterministic=deterministic, record=record, draws=None
        )
    assert not work.arrivals.any()
    assert not scratch.any()
    return *ring, details, work


def emitted_of(rows: DecodeState) -> Tensor:
    """bool [B, K+1]: places that are emitted."""
    return torch.arange(rows.block.shape[1], device=rows.block.device) < rows.emitted[:, None]


def check(rows: DecodeState, logits: Tensor, top: int) -> None:
    """Ids of `rows` are those of the definition; values no further from fp64 than twice what torch's fp32 is."""
    places = logits.shape[1]
    emitted = emitted_of(rows)[:, :places]
    exact = logits.double().log_softmax(dim=-1)
    finite = exact.isfinite()
    error = (logits.log_softmax(dim=-1).double() - exact)[finite].abs().max()
    own = exact.gather(2, rows.block[:, :places, None])[:, :, 0]
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :, :top]
    assert torch.equal(rows.top_ids[:, :places, :top][emitted], ids[emitted])
    for ours, theirs in ((rows.logprobs[:, :places], own), (rows.top_logprobs[:, :places, :top], exact.gather(2, ids))):
        torch.testing.assert_close(ours[emitted].double(), theirs[emitted], rtol=0, atol=2 * float(error))


def check_published(rows: DecodeState, k: int, ring: tuple[Any, ...]) -> None:
    """The ring has what `reference.publish` makes of the same rows, and nothing else of it has changed."""
    entries, counter, details, _ = ring
    (their_entries, their_counter), their_details = rings_of(rows)
    reference.publish(their_entries, their_counter, rows, drafting=k > 0, details=their_details)
    assert torch.equal(counter, their_counter)
    assert torch.equal(entries, their_entries)
    assert torch.equal(details, their_details)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize(("k", "vocab", "batch"), [(0, 20, 1), (0, 111, 3), (3, 989, 1), (2, 130, 2)])
def test_log_probabilities_of_a_greedy_step_equal_the_definition(
    k: int, vocab: int, batch: int, top: int, device: str
) -> None:
    whole, rows = random_state(k, batch=batch, k=k + 1, vocab=vocab, device=device, before=1, after=1)
    rows.limits.copy_(rows.lengths + 40)
    before = copy_of(whole)
    logits = likely(rows, k, vocab, 1, device) * 3
    check_published(rows, k, end(rows, logits, top))
    check(rows, logits, top)
    plain = copy_of(before)
    greedy_commit.verify_commit(logits, plain.rows(1, 1 + batch), scratch_of(batch, k, logits.device))
    recorded = {"logprobs": plain.logprobs, "top_ids": plain.top_ids, "top_logprobs": plain.top_logprobs}
    for name in DecodeState.__dataclass_fields__:  # all else is what it is without a record
        if name not in recorded:
            assert torch.equal(getattr(whole, name), getattr(plain, name)), name
    for name, untouched in recorded.items():  # rows beside, and what was not asked for
        assert torch.equal(getattr(whole, name)[[0, -1]], untouched[[0, -1]]), name
    assert torch.equal(whole.top_ids[:, :, top:], before.top_ids[:, :, top:])
    assert torch.equal(whole.logprobs[1 : 1 + batch][~emitted_of(rows)], before.logprobs[1:][:batch][~emitted_of(rows)])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_p": 0.9, "repetition": 1.3}, {"temperature": 0.0}])
def test_a_step_that_samples(options: dict[str, float], rule: str, device: str) -> None:
    """Whatever is done to logits before they are sampled from, what is recorded is of the raw ones."""
    batch, k, vocab, top = 2, 2, 150, 3
    rows = plain_state(batch, k + 1, vocab, device)  # of more places than the step has
    rows.draft_counts.fill_(k)
    for name, option in options.items():
        getattr(rows, name).fill_(option)
    logits = likely(rows, k, vocab, 1, device)
    check_published(rows, k, end(rows, logits, top, rule))
    assert rows.emitted.min() > 0
    check(rows, logits, top)


@pytest.mark.parametrize("device", devices())
def test_a_line_has_the_same_bits_in_every_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy or sampled, alone or beside others, with more or fewer drafts, in chunks of any size."""
    batch, k, vocab, top = (3, 2, 200, 4) if INTERPRETED else (9, 5, 32003, 20)
    state = plain_state(batch, k, vocab, device)
    logits = torch.randn(batch, k + 1, vocab, device=device) * 4
    rows = copy_of(state)
    work = end(rows, logits, top)[3]
    levels, ids = work.levels.view(batch, k + 1, 2), rows.top_ids.clone()
    values = rows.top_logprobs.clone()

    def same(rows: DecodeState, work: RecordWork, row: int, places: int, at: int) -> None:
        assert torch.equal(work.levels.view(-1, places, 2)[at], levels[row, :places])
        assert torch.equal(rows.top_ids[at, :places, :top], ids[row, :places, :top])
        assert torch.equal(rows.top_logprobs[at, :places, :top], values[row, :places, :top])

    for row in range(batch):
        for places in (1, k + 1):
            alone = copy_of(state).rows(row, row + 1)
            ended = end(alone, logits[row : row + 1, :places].contiguous(), top)
            same(alone, ended[3], row, places, 0)
            assert torch.equal(alone.logprobs[0, :1], rows.logprobs[row, :1])
    sampled = copy_of(state)
    ended = end(sampled, logits, top, COUPLED)
    for row in range(batch):
        same(sampled, ended[3], row, k + 1, row)
    chunks_of(monkeypatch, 128 if INTERPRETED else 1024)
    for rule in (GREEDY, BLOCK):
        again = copy_of(state)
        ended = end(again, logits, top, rule)
        for row in range(batch):
            same(again, ended[3], row, k + 1, row)


@pytest.mark.parametrize("device", devices())
def test_equal_logits_come_by_id(device: str) -> None:
    """Within a group, across groups and chunks; signed zeros are equal; ids that are banned come last, by id too."""
    vocab, top = 3 * 64 + 5, 20
    lines = torch.zeros(5, vocab)
    lines[1] = -INF
    lines[1, [3, 70, 71, 196]] = 2.0
    lines[2, [10, 64, 127, 128, 196]] = -0.0
    lines[3] = torch.arange(vocab) % 3
    lines[4] = -1e-45
    lines[4, 100:] = -2e-45
    logits = lines[:, None].to(device)
    rows = plain_state(len(lines), 0, vocab, device)
    end(rows, logits, top)
    check(rows, logits, top)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_line_without_a_law_leaves_the_others_alone(value: float, device: str) -> None:
    batch, k, vocab, top = 3, 1, 130, 20
    rows = plain_state(batch, k, vocab, device)
    logits = likely(rows, k, vocab, 1, device)
    whole = copy_of(rows)
    end(whole, logits, top)
    invalid = logits.clone()
    invalid[1] = value
    for rule in (GREEDY, COUPLED):
        again = copy_of(rows)
        end(again, invalid, top, rule)
        assert again.emitted[1] == 0
        assert ((again.top_ids[1, : k + 1] >= 0) & (again.top_ids[1, : k + 1] < vocab)).all()
        for name in ("top_ids", "top_logprobs") + (("logprobs",) if rule == GREEDY else ()):
            assert torch.equal(getattr(again, name)[::2], getattr(whole, name)[::2]), name


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50257, 128256, 262145])
@pytest.mark.parametrize("batch", [1, 33])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(batch: int, vocab: int) -> None:
    for k, top in ((0, 20), (5, 5), (16, 0)):
        rows = plain_state(batch, k, vocab, "cuda")
        logits = likely(rows, k, vocab, k, "cuda") * 3
        for rule in (GREEDY, COUPLED):
            ended = copy_of(rows)
            ring = end(ended, logits, top, rule)
            torch.cuda.synchronize()
            check(ended, logits, top)
            check_published(ended, k, ring)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [GREEDY, BLOCK])
def test_ten_thousand_replays(rule: str) -> None:
    """From a graph, launch upon launch: always the same to the bit, whoever comes last."""
    batch, k, vocab, top = 8, 5, 128256, 5
    state = plain_state(batch, k, vocab, "cuda")
    logits = likely(state, k, vocab, 1, "cuda")
    ring, details = rings_of(state)
    scratch, work = scratch_of(batch, k, logits.device), record_work(batch, k, vocab, logits.device)
    sampling = sampled_work(batch, k, vocab, logits.device)
    rows = copy_of(state)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    expected: list[Tensor] = []

    def body() -> None:
        for name in ("lengths", "finish", "logprobs", "top_logprobs", "top_ids", "output_counts"):
            getattr(rows, name).copy_(getattr(state, name))
        record = Record(top, work, details)
        if rule == GREEDY:
            greedy_commit.verify_commit(logits, rows, scratch, ring, record)
        else:
            sampled_commit(
                logits, rows, scratch, sampling, ring, rule=rule, deterministic=True, record=record, draws=None
            )
        found = [rows.logprobs, rows.top_logprobs, rows.top_ids, rows.block]
        if not expected:
            expected.extend(tensor.clone() for tensor in found)
        for ours, first in zip(found, expected, strict=True):
            wrong.add_((ours != first).sum())

    graph = graph_of(body)
    for _ in range(10_000):
        graph.replay()
    assert wrong.item() == 0
    check(rows, logits, top)


def refused(match: str, *, top: int = 2, work: Any = None, rows: DecodeState | None = None, vocab: int = 40) -> None:
    rows = rows or plain_state(2, 1, vocab, "cpu")
    logits = torch.randn(2, 2, vocab)
    work = record_work(2, 1, vocab, logits.device) if work is None else work
    with pytest.raises(ValueError, match=match):
        greedy_commit.verify_commit(logits, rows, scratch_of(2, 1, logits.device), None, Record(top, work))
    sampling = sampled_work(2, 1, vocab, logits.device)
    with pytest.raises(ValueError, match=match):
        sampled_commit(
            *(logits, rows, scratch_of(2, 1, logits.device), sampling),
            rule=BLOCK, deterministic=True, record=Record(top, work), draws=None)  # fmt: skip


def test_what_would_be_misread_is_refused() -> None:
    cpu = torch.device("cpu")
    refused(r"record.top is 21; wanted 0 to 20", top=21)
    refused(r"record.top is -1; wanted 0 to 20", top=-1)
    refused(r"record.top is 9; wanted 0 to 8", top=9, vocab=8)
    refused(
        r"room for \(lines, ids\) \(2, 64\); wanted \(4, 40\).*record_work\(2, 1, 40", work=record_work(2, 0, 40, cpu)
    )
    refused(r"room for \(lines, ids\) \(4, 64\); wanted \(4, 70\)", work=record_work(2, 1, 40, cpu), vocab=70)
    refused(r"record.work is 'nothing'; wanted one of record_work\(2, 1, 40", work="nothing")
    state = plain_state(2, 1, 40, "cpu")
    for name in ("logprobs", "top_ids", "top_logprobs"):
        refused(f"{name} is .*strides", rows=replace(state, **{name: spread(getattr(state, name))}))


def test_a_vocabulary_beyond_fixed_point_is_refused() -> None:
    rows = plain_state(1, 0, 40, "cpu")
    logits = torch.zeros(1, 1, 1).expand(1, 1, sampled_parts.MAX_IDS + 1)
    with pytest.raises(ValueError, match="too many to record"):
        logprobs.check_record(Record(0, record_work(1, 0, 40, logits.device)), rows, logits.shape[2], 1)


def test_bytes_of_the_work_area() -> None:
    for batch, k, vocab in ((1, 0, 1), (3, 4, 129)):
        work = record_work(batch, k, vocab, torch.device("cpu"))
        whole = sum(getattr(work, name).nbytes for name in RecordWork.__dataclass_fields__)
        assert whole == logprobs.record_work_bytes(batch, k, vocab)


def test_rows_that_do_not_run_are_left_alone() -> None:
    rows = plain_state(2, 1, 70, "cpu")
    rows.finish[1] = RUNNING + 1
    before = copy_of(rows)
    end(rows, torch.randn(2, 2, 70), 3, BLOCK)
    assert torch.equal(rows.top_ids[1], before.top_ids[1])
    assert torch.equal(rows.logprobs[1], before.logprobs[1])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("k", "vocab", "top"), [(0, 111, 0), (3, 130, 5)])
def test_logits_that_are_recorded_apart_have_the_bits_of_a_step(k: int, vocab: int, top: int, device: str) -> None:
    """Of any tokens, in rows that run or not; nothing else changes."""
    _, rows = random_state(5, batch=3, k=k, vocab=vocab, device=device)
    rows.finish.fill_(RUNNING)
    rows.limits.copy_(rows.lengths + 40)
    logits = likely(rows, k, vocab, 1, device) * 3
    stepped, apart = copy_of(rows), copy_of(rows)
    end(stepped, logits, top)
    apart.block.copy_(stepped.block)
    apart.finish[1] = RUNNING + 1
    before = copy_of(apart)
    scratch, work = scratch_of(3, k, logits.device), poisoned(record_work(3, k, vocab, logits.device))
    greedy_commit.record_logprobs(logits, apart, scratch, Record(top, work))
    emitted = emitted_of(stepped)
    assert emitted.any()
    assert torch.equal(apart.logprobs[emitted], stepped.logprobs[emitted])
    assert torch.equal(apart.top_logprobs[:, :, :top][emitted], stepped.top_logprobs[:, :, :top][emitted])
    assert torch.equal(apart.top_ids[:, :, :top][emitted], stepped.top_ids[:, :, :top][emitted])
    for name in set(apart.__dataclass_fields__) - {"logprobs", "top_ids", "top_logprobs"}:
        assert torch.equal(getattr(apart, name), getattr(before, name)), name
    assert not scratch.any()
    assert not work.arrivals.any()
