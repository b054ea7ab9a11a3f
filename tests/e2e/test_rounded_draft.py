"""Long texts of the shipped pair with its draft in 4 bits are those of the target alone, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, GenerateOutput, demo_pair
from perf.prompts import code_prompts
from tests.helpers.devices import devices

PROMPT = 16
SIZES = {"cpu": (8, 200), "cuda": (64, 1000)}  # prompts, and new tokens of each: a CPU has its time
LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"do_sample": True, "temperature": 1.0}}


def texts(device: str, law: str, k: int, form: str | None) -> tuple[Tensor, float]:
    """(token ids of all rows, tokens of a step and row)."""
    (rows, new), (target, draft) = SIZES[device], demo_pair()
    prompts = code_prompts(target, rows, PROMPT)
    sampled = {"seed": list(range(rows))} if LAWS[law] else {}
    drafts: list[Any] = [draft] if k else []
    with FastSpecGenerator(
        target,
        *drafts,
        draft_quantization=form,
        num_speculative_tokens=k,
        verification="coupled",
        max_batch_size=rows,
        max_length=PROMPT + new,
        device=device,
        progress=False,
    ) as generator:
        out = generator.generate(
            prompts, max_new_tokens=new, eos_token_id=[], return_dict_in_generate=True, **LAWS[law], **sampled
        )
    assert isinstance(out, GenerateOutput)
    return out.sequences, out.stats.tokens_per_step


@cache
def plain(device: str, law: str) -> Tensor:
    return texts(device, law, 0, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_a_draft_in_4_bits_changes_no_long_text(k: int, law: str, device: str) -> None:
    found, tokens = texts(device, law, k, "int4")
    rows, new = SIZES[device]
    assert found.shape == (rows, PROMPT + new)
    assert torch.equal(found, plain(device, law))
    assert tokens > 1.3, "drafts are accepted"
    assert len({tuple(row.tolist()) for row in found}) == rows, "texts of their own"
