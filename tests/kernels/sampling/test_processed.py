"""Logits after options: the kernel has the bits of the definition, and a line does not depend on other lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.sampled import logits_for, mixed_state

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.sampling import distribution as sampled_laws  # noqa: E402
from fastspec.kernels.sampling import logits as sampled_parts  # noqa: E402
from fastspec.kernels.sampling import processed  # noqa: E402
from fastspec.kernels.sampling.logits import sampled_work  # noqa: E402

INF = float("inf")
VOCAB = 150


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs a line, however few ids."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(sampled_laws, "CHUNK", 64)
        monkeypatch.setattr(sampled_parts, "CHUNK", 64)


def state_of(seed: int, batch: int, k: int, device: str) -> DecodeState:
    _, rows = mixed_state(seed, batch=batch, k=k, vocab=VOCAB, device=device)
    rows.processed.copy_(torch.arange(batch) % 3 != 1)
    rows.finish.zero_()
    return rows


def by_kernel(logits: Tensor, rows: DecodeState) -> Tensor:
    batch, places, vocab = logits.shape
    return processed.processed_logits(logits, rows, sampled_work(batch, places - 1, vocab, logits.device))


def compare(seed: int, device: str) -> None:
    rows, logits = state_of(seed, 4, 1, device), logits_for(seed, 4, 1, VOCAB, device)[0]
    ours, theirs = by_kernel(logits, rows), reference.processed_logits(logits, rows, None)
    assert torch.equal(ours, theirs), (ours != theirs).nonzero()[:8].tolist()
    assert torch.equal(ours[1], logits[1])  # a row that keeps its raw logits
    assert (ours == -INF).any()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_the_definition(seed: int, device: str) -> None:
    compare(seed, device)


@pytest.mark.parametrize("device", devices())
def test_a_line_alone_has_the_same_bits(device: str) -> None:
    rows, logits = state_of(3, 3, 1, device), logits_for(3, 3, 1, VOCAB, device)[0]
    together, alone = by_kernel(logits, rows), rows.rows(2, 3)
    assert rows.processed[2]
    assert torch.equal(by_kernel(logits[2:, :1].contiguous(), alone), together[2:, :1])


@pytest.mark.parametrize("fault", ["filters", "temperature", "flag"])
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in the definition that the first test must find."""
    if fault == "filters":
        monkeypatch.setattr(reference.sampled.distribution, "_filter", lambda scaled, options: scaled)
    elif fault == "temperature":
        real = reference.sampled.distribution.sampled_logits
        neutral = torch.ones(4)
        monkeypatch.setattr(
            reference.sampled.distribution,
            "sampled_logits",
            lambda logits, options: real(logits, type(options)(neutral, options.top_k, options.top_p, options.min_p)),
        )
    else:
        real_state = state_of

        def all_raw(seed: int, batch: int, k: int, device: str) -> DecodeState:
            rows = real_state(seed, batch, k, device)
            rows.processed.fill_(False)
            return rows

        monkeypatch.setitem(compare.__globals__, "state_of", all_raw)
    with pytest.raises(AssertionError):
        compare(0, "cpu")
