"""The result ring: what an entry holds, that rows beyond the view stay, and a host that polls while graphs replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.layouts import spread
from tests.helpers.states import random_state

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import publish as kernel
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.publish import publish
from tests.kernels.sampling.test_greedy_commit import graph_of

SLOTS = 5


def ring_of(batch: int, k: int, device: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    """(entries, counter): pinned where a GPU writes to them."""
    entries = torch.full((SLOTS, 1 + batch * (5 + k)), fill)
    return entries.pin_memory() if device == "cuda" else entries, torch.zeros(1, dtype=torch.int64, device=device)


def entry_of(rows: DecodeState, sequence: int, drafting: bool) -> list[int]:
    """The entry, word by word."""
    words = [sequence]
    for row in range(rows.batch):
        drafted = int(rows.draft_counts[row]) if drafting else 0
        words += [int(rows.emitted[row]), int(rows.accepted[row]), drafted, int(rows.finish[row])]
        words += rows.block[row].tolist()
    return words


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize(("batch", "k"), [(1, 0), (3, 5), (kernel.WORDS.value // 21 + 1, 16), (64, 2)])
def test_an_entry_of_the_ring_holds_what_each_row_emitted(batch: int, k: int, drafting: bool, device: str) -> None:
    for op in (publish, reference.publish):
        if op is reference.publish and device == "cuda":
            continue  # torch cannot write to host memory from the device
        entries, counter = ring_of(batch + 2, k, device, fill=-9)
        expected = entries.clone()
        for sequence in range(1, 2 * SLOTS):
            _, rows = random_state(sequence, batch=batch, k=k, vocab=50, device=device, before=sequence % 2, after=1)
            # a block whose rows are views of longer ones
            rows = replace(rows, block=torch.randint(2**62, (batch, k + 2), device=device)[:, : k + 1])
            op(entries, counter, rows, drafting=drafting)
            if device == "cuda":
                torch.cuda.synchronize()
            words = entry_of(rows, sequence, drafting)
            expected[sequence % SLOTS, : len(words)] = torch.tensor(words)
            assert torch.equal(entries, expected)
            assert counter.tolist() == [sequence]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("batch", "k"), [(1, 0), (3, 2), (16, 16)])
def test_published_log_probabilities_are_those_of_the_state(batch: int, k: int, device: str) -> None:
    _, rows = random_state(1, batch=batch, k=k, vocab=50, device=device, after=2)
    rows.logprobs[0, 0], rows.top_logprobs[0, 0, 0] = float("-inf"), float("nan")
    rows.top_ids[0, 0, 0] = 2**31 - 1
    top = rows.top_ids.shape[2]
    for op in (publish, reference.publish):
        if op is reference.publish and device == "cuda":
            continue
        entries, counter = ring_of(batch + 2, k, device)
        details = torch.full((SLOTS, batch + 2, k + 1, 1 + 2 * top), -9, dtype=torch.int32)
        details = details.pin_memory() if device == "cuda" else details
        counter.fill_(SLOTS * 7)
        for _ in range(SLOTS - 1):
            op(entries, counter, rows, drafting=True, details=details)
        if device == "cuda":
            torch.cuda.synchronize()
        assert entries[1:, 0].tolist() == list(range(SLOTS * 7 + 1, SLOTS * 8))
        for slot in range(1, SLOTS):
            own, ids, others = details[slot, :batch].split((1, top, top), dim=-1)
            assert torch.equal(own[..., 0], rows.logprobs.cpu().view(torch.int32))
            assert torch.equal(ids, rows.top_ids.cpu().int())
            assert torch.equal(others, rows.top_logprobs.cpu().view(torch.int32))
            assert (details[slot, batch:] == -9).all()
        assert (details[0] == -9).all()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("path", ["greedy", "sampled", "alone"])
def test_the_host_sees_every_entry_whole_and_in_order(path: str, batch: int) -> None:
    """The host polls the pinned ring while graphs replay ahead of it; no synchronization anywhere."""
    k, vocab, steps, ahead = 3, 32000, 3000, SLOTS - 1
    _, rows = random_state(0, batch=batch, k=k, vocab=vocab, device="cuda")
    rows.finish.zero_()
    rows.lengths.fill_(1)
    rows.limits.fill_(2**40)
    rows.draft_counts.fill_(k)
    rows.draft_tokens.fill_(vocab - 1)  # never picked
    entries, counter = ring_of(batch, k, "cuda")
    scratch = scratch_of(batch, k, rows.tokens.device)
    logits = torch.zeros(batch, k + 1, vocab, device="cuda")
    accepted = torch.zeros(batch, dtype=torch.int64, device="cuda")
    block = torch.zeros(batch, k + 1, dtype=torch.int64, device="cuda")

    def body() -> None:
        # step n picks id n everywhere
        block.add_(1)
        rows.lengths.fill_(1)
        if path == "greedy":
            logits.zero_().scatter_(2, block[:, :, None], 1.0)
            verify_commit(logits, rows, scratch, (entries, counter))
        elif path == "sampled":
            commit(accepted, block, rows, scratch, (entries, counter))
        else:
            rows.block.copy_(block)
            rows.emitted.copy_(block[:, 0])
            rows.accepted.copy_(block[:, 0])
            publish(entries, counter, rows, drafting=True)

    graph = graph_of(body)
    torch.cuda.synchronize()
    first = int(counter)
    assert first == 2  # the warm-ups; a capture runs nothing
    words = entries.numpy()
    launched = first
    for step in range(first + 1, first + 1 + steps):
        while launched < min(step + ahead - 1, first + steps):
            graph.replay()
            launched += 1
        entry = words[step % SLOTS]
        while entry[0] != step:
            pass
        entry = entry.copy()  # at once: what was not there in time is not to come in later
        found = torch.from_numpy(entry[1:]).view(batch, 5 + k)
        emitted = step if path == "alone" else 1
        accepts = step if path == "alone" else 0
        assert (found[:, :4] == torch.tensor([emitted, accepts, k, 0])).all(), step
        assert (found[:, 4:] == step).all(), step


def test_wrong_layouts_are_refused_by_name() -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    entries, counter = ring_of(2, 2, "cpu")
    with pytest.raises(ValueError, match=r"entries is int64 \[5, 14\]; wanted contiguous \[slots, 1 \+ B \* 7\]"):
        publish(entries[:, :-1].contiguous(), counter, rows, drafting=True)
    with pytest.raises(ValueError, match="B >= 2"):
        publish(entries[:, :8].contiguous(), counter, rows, drafting=True)
    with pytest.raises(ValueError, match=r"details is int32 \[5, 2, 3, 5\]; wanted"):
        publish(entries, counter, rows, drafting=True, details=torch.zeros(SLOTS, 2, 3, 5, dtype=torch.int32))


@pytest.mark.parametrize("name", ["logprobs", "top_ids", "top_logprobs"])
def test_what_would_be_misread_of_log_probabilities_is_refused(name: str) -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cpu")
    entries, counter = ring_of(2, 2, "cpu")
    details = torch.zeros(SLOTS, 2, 3, 1 + 2 * rows.top_ids.shape[2], dtype=torch.int32)
    rows = replace(rows, **{name: spread(getattr(rows, name))})
    with pytest.raises(ValueError, match=f"{name} is .*strides.*pass {name}.contiguous"):
        publish(entries, counter, rows, drafting=True, details=details)


@pytest.mark.gpu
def test_a_ring_that_the_device_cannot_write_to_is_refused() -> None:
    _, rows = random_state(0, batch=2, k=2, vocab=12, device="cuda")
    entries, counter = ring_of(2, 2, "cpu")
    with pytest.raises(ValueError, match="pinned"):
        publish(entries, counter.cuda(), rows, drafting=True)
