"""Peers on the same prompts, one prompt at a time, greedy: tokens per pass of the target, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from perf.experiment import Call, wait
from perf.tasks.compiled import StaticDecoder
from perf.tasks.llama_cpp import LlamaCpp

LOOKUP, ASSISTANT, PLAIN, COMPILED, LLAMA_CPP = "lookup", "assistant", "plain", "compiled", "llama.cpp"
NAMES: Final = {
    LOOKUP: "transformers' prompt lookup",
    ASSISTANT: "transformers' assistant",
    PLAIN: "transformers",
    COMPILED: "torch.compile, static K/V",
    LLAMA_CPP: "llama.cpp",
}
"""Names of peers in rows, by their value of --peers."""
DRAFTING: Final = (LOOKUP, ASSISTANT)
Decode = Callable[[list[int]], tuple[list[int], int]]


def peer_calls(
    peer: str,
    target: Path,
    prompts: Sequence[list[list[int]]],
    k: int,
    new: int,
    *,
    dtype: str | None,
    device: str,
    eos_token_id: int | None,
    length: int,
    assistant: Path | None = None,
    gguf: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Call]:
    """Decodes each prompt and counts passes.

    The pass over a prompt is counted, because it gives a token; with drafts it verifies some.

    Args:
        peer: key of `NAMES`.
        target: a checkpoint.
        prompts: ids of the one row of each call.
        k: drafts of a step at most, of the peers in `DRAFTING`.
        new: new tokens at most.
        dtype, device: of the model; dtype None: the checkpoint's.
        eos_token_id: ends a text.
        length: positions of a static cache.
        assistant: checkpoint of the assistant. None: the target, a second time.
        gguf: file that llama.cpp reads; its weights stay in their codes.
        clock: gives seconds.
    """
    if peer == LLAMA_CPP:
        assert gguf is not None, "the command line asks for it"
        decode = _llama_cpp(gguf, new, eos_token_id, length)
    else:
        model = _loaded(target, dtype, device)
        drafts: dict[str, Any] = {}
        if peer == LOOKUP:
            drafts = {"prompt_lookup_num_tokens": k}
        elif peer == ASSISTANT:
            drafts = {"assistant_model": _assistant(assistant or target, dtype, device, k)}
        compiled = peer == COMPILED
        decode = (
            _compiled(model, new, eos_token_id, length) if compiled else _transformers(model, new, eos_token_id, drafts)
        )
    found = []
    with torch.inference_mode():
        decode(prompts[0][0])  # warm
        for (row,) in prompts:
            wait(device)
            start = clock()
            text, passes = decode(row)
            wait(device)
            found.append(Call(len(text), passes, passes, clock() - start, None, [text]))
    return found


def _loaded(source: Path, dtype: str | None, device: str) -> Any:
    kind: Any = "auto" if dtype is None else getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
    return model.eval().to(device)


def _assistant(source: Path, dtype: str | None, device: str, k: int) -> Any:
    """A draft model that drafts k tokens in each step: a number that changes is not that of the other rows."""
    model = _loaded(source, dtype, device)
    model.generation_config.num_assistant_tokens = k
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def _transformers(model: Any, new: int, end: int | None, drafts: dict[str, Any]) -> Decode:
    """Decoding by `generate` of transformers, which gives a text and the number of passes."""
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    model.register_forward_pre_hook(count)

    def decode(row: list[int]) -> tuple[list[int], int]:
        ids, passes[0] = torch.tensor([row], device=model.device), 0
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=end,
            pad_token_id=end, **drafts,
        )  # fmt: skip
        return out[0, len(row) :].tolist(), passes[0]

    return decode


def _compiled(model: Any, new: int, end: int | None, length: int) -> Decode:
    """Decoding by `StaticDecoder`, which gives a text and the number of passes."""
    with torch.inference_mode():
        decoder = StaticDecoder(model, length)

    def decode(row: list[int]) -> tuple[list[int], int]:
        text = decoder.generate(row, new, end)
        return text, len(text)

    return decode


def _llama_cpp(file: Path, new: int, end: int | None, length: int) -> Decode:
    """Decoding by llama.cpp, which gives a text and the number of passes."""
    engine = LlamaCpp(file, length)

    def decode(row: list[int]) -> tuple[list[int], int]:
        text = engine.generate(row, new, end)
        return text, len(text)

    return decode
