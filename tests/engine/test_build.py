"""Which sizes of prefill passes an engine may choose from, by the formats of its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec.engine import build
from fastspec.kernels import gpu
from fastspec.models.decoder import Decoder

CHUNKS = (64, 128, 256, 512)


@pytest.mark.parametrize(
    ("target", "draft", "same_bits", "draft_chunks"),
    [
        ("packed", "packed", (64, 128, 256, 512), None),
        ("packed", None, (64, 128, 256, 512), None),
        ("packed", "codes", (64, 128, 256, 512), (128, 256, 512)),
        ("codes", "packed", (128, 256, 512), None),
        ("codes", "codes", (128, 256, 512), None),
        ("packed", "rows", None, None),
        ("rows", "codes", None, None),
    ],
)
def test_only_a_draft_with_larger_passes_has_sizes_of_its_own(
    target: str,
    draft: str | None,
    same_bits: tuple[int, ...] | None,
    draft_chunks: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "SAME_BITS_FROM", {(0, 0): 64})
    made: Any = SimpleNamespace(
        models=[object.__new__(Decoder)],
        matrices=[SimpleNamespace(format=target)],
        of_draft_model=[SimpleNamespace(format=draft)] if draft else [],
    )
    assert build._same_bits_of_both(CHUNKS, made, torch.device("cpu")) == (same_bits, draft_chunks)
