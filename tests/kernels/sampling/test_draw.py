"""A draft's token and law by kernels, against their definition in torch, and against chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.sampling.distribution import DRAFT, TARGET, PhiloxDraws, compute_probs
from fastspec.sampling.rules import REJECTION
from fastspec.state import IDLE, DecodeState
from tests.helpers.chance import chi_square_limit
from tests.helpers.devices import devices
from tests.helpers.sampled import INF, logits_for, mixed_state, plain_state
from tests.helpers.states import copy_of

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import distribution as sampled_laws  # noqa: E402
from fastspec.kernels.sampling import logits as sampled_parts  # noqa: E402
from fastspec.kernels.sampling.commit import scratch_of  # noqa: E402
from fastspec.kernels.sampling.draw import sampled_draw  # noqa: E402
from fastspec.kernels.sampling.logits import sampled_work  # noqa: E402
from fastspec.kernels.sampling.sampled_commit import sampled_commit  # noqa: E402

NAN = float("nan")
INTERPRETED = not torch.cuda.is_available()
# two fp32 softmaxes, summed in different orders over up to 151936 ids: some ulp (6e-8), and of exp's own
LAW = {"rtol": 4e-6, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (sampled_parts, sampled_laws):
        monkeypatch.setattr(part, "CHUNK", 64 if INTERPRETED else 256)


def draw(rows: DecodeState, logits: Tensor, j: int, purpose: int = DRAFT, keep_draft_probs: bool = True) -> None:
    work = sampled_work(rows.batch, rows.draft_tokens.shape[1], rows.bias.shape[1], logits.device)
    work.records.fill_(-1)
    work.groups.fill_(NAN)
    work.found.fill_(-1)
    sampled_draw(logits, rows, j, work, purpose=purpose, keep_draft_probs=keep_draft_probs, draws=None)
    assert not work.counters.any()


def compare(rows: DecodeState, logits: Tensor, j: int, purpose: int, keep_draft_probs: bool) -> None:
    """Tokens to the bit and laws to rounding, in running rows; other rows and other drafts are left alone."""
    theirs = copy_of(rows)
    before = copy_of(rows)
    draw(rows, logits, j, purpose, keep_draft_probs)
    draws = PhiloxDraws(theirs.seeds)
    reference.sampled_draw(logits, theirs, j, None, purpose=purpose, keep_draft_probs=keep_draft_probs, draws=draws)
    running = rows.running
    assert torch.equal(rows.draft_tokens[running], theirs.draft_tokens[running])
    torch.testing.assert_close(rows.draft_probs[running], theirs.draft_probs[running], **LAW)
    assert torch.equal(rows.draft_probs[running] > 0, theirs.draft_probs[running] > 0)
    assert torch.equal(rows.draft_tokens[~running], before.draft_tokens[~running])
    assert torch.equal(rows.draft_probs[~running], before.draft_probs[~running])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("vocab", "shared", "batch"), [(8, 8, 6), (111, 111, 6), (111, 70, 4)])
def test_random_mixes_of_options(vocab: int, shared: int, batch: int, device: str) -> None:
    """A vocabulary smaller than the target's too: the law is zero above it."""
    for seed in range(1 if INTERPRETED else 30):
        _, rows = mixed_state(seed, batch=batch, k=2, vocab=vocab, device=device, before=1)
        rows.draft_probs.fill_(0.25)
        _, logits = logits_for(seed, batch, 2, vocab, device)
        for j in range(2):
            compare(rows, logits[:, j : j + 1, :shared], j, TARGET if seed % 2 else DRAFT, j == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "batch"), [(989, 8), (32000, 4), (128256, 5), (151936, 2)])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(
    vocab: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for seed in range(4):
        _, rows = mixed_state(seed, batch=batch, k=1, vocab=vocab, device="cuda")
        _, logits = logits_for(seed, batch, 1, vocab, "cuda")
        compare(rows, logits, 0, DRAFT, True)


@pytest.mark.parametrize("device", devices())
def test_a_row_without_a_law_drafts_the_first_id_for_certain(device: str) -> None:
    rows = plain_state(6, 1, 30, device)
    _, logits = logits_for(1, 6, 1, 30, device)
    logits[0, 0, 4] = NAN
    logits[1, 0, 4] = INF
    logits[2] = -INF
    rows.temperature[:2] = torch.tensor([0.0, 1.0])
    rows.finish[4] = IDLE
    compare(rows, logits, 0, DRAFT, True)
    assert rows.draft_tokens[:3, 0].tolist() == [0, 0, 0]
    assert rows.draft_probs[:3, 0, 0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 9, "min_p": 0.01}], ids=str)
def test_drafts_of_the_targets_own_law_are_all_accepted(options: dict[str, float], device: str) -> None:
    """Equal logits give equal laws, to the bit: nothing is left of p - q, whatever drafts it came from."""
    k, vocab, batch = 2, 150, 3
    rows = plain_state(batch, k, vocab, device)
    for name, value in options.items():
        getattr(rows, name).fill_(value)
    target, _ = logits_for(3, batch, k, vocab, device)
    for j in range(k):
        draw(rows, target[:, j : j + 1], j)
    work = sampled_work(batch, k, vocab, target.device)
    sampled_commit(
        target, rows, scratch_of(batch, k, target.device), work, rule=REJECTION, deterministic=False, draws=None
    )
    assert rows.accepted.tolist() == [k] * batch
    drawn = work.records.view(batch, k + 1, -1)[:, :k, 6:8]
    assert torch.equal(drawn[:, :, 0], drawn[:, :, 1])


@pytest.mark.parametrize("device", devices())
def test_tokens_follow_their_law(device: str) -> None:
    """Rows that differ in their seeds alone, as many draws of one law; a law that is off by 10% would show on CUDA."""
    draws, vocab = (100, 6) if INTERPRETED else (60_000, 6)  # no axis of a grid but the first has more than 65535
    rows = plain_state(draws, 1, vocab, device)
    rows.top_k.fill_(5)
    rows.temperature.fill_(0.8)
    logits = torch.tensor([0.3, -0.5, 1.1, -3.0, 0.9, 0.2], device=device).expand(draws, 1, vocab).contiguous()
    draw(rows, logits, 0, keep_draft_probs=False)
    counts = torch.bincount(rows.draft_tokens[:, 0].cpu(), minlength=vocab).double()
    expected = compute_probs(logits[:1].double(), rows.rows(0, 1).sampler)[0, 0].cpu() * draws
    assert counts[3] == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert statistic < chi_square_limit(int(possible.sum()) - 1)
