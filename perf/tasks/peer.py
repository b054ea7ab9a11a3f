"""transformers' prompt lookup on the same prompts: tokens per pass of the target, one prompt at a time, greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from perf.experiment import Call

NAME = "transformers' prompt lookup"


def peer_calls(
    target: Path,
    prompts: Sequence[list[list[int]]],
    k: int,
    new: int,
    *,
    dtype: str | None,
    device: str,
    eos_token_id: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Call]:
    """Decodes each prompt with up to k drafts a step, and counts passes.

    The pass over a prompt is counted, because it gives a token, and drafts are verified in it.

    Args:
        target: a checkpoint.
        prompts: ids of the one row of each call.
        k: drafts of a step at most.
        new: new tokens at most.
        dtype, device: of the model; dtype None: the checkpoint's.
        eos_token_id: ends a text.
        clock: gives seconds.
    """
    kind: Any = "auto" if dtype is None else getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=kind).eval().to(device)
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    model.register_forward_pre_hook(count)
    found = []
    for (row,) in prompts:
        ids, passes[0], start = torch.tensor([row], device=device), 0, clock()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            prompt_lookup_num_tokens=k, eos_token_id=eos_token_id, pad_token_id=eos_token_id,
        )  # fmt: skip
        text = out[0, len(row) :].tolist()
        found.append(Call(len(text), passes[0], passes[0], clock() - start, None, [text]))
    return found
