"""What a call brings in and hands back: prompts and options become requests, requests become its result."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastspec.errors import InvalidLogits
from fastspec.inputs.options import Options
from fastspec.output import GenerateOutput, Stats
from fastspec.runtime.request import Request
from fastspec.text.stop_strings import StopWatch

_NAMED = 8  # rows that an error names


def padded_length(input_ids: Any, prompts: list[list[int]]) -> int:
    """Tokens of the longest prompt, the caller's padding included."""
    return input_ids.shape[-1] if isinstance(input_ids, Tensor) else max(len(prompt) for prompt in prompts)


def requests_of(
    prompts: list[list[int]], chosen: Options, tokenizer: PreTrainedTokenizerBase | None, max_length: int
) -> list[Request]:
    """A request for every row: a prompt's `chosen.copies` one after the other.

    Args:
        prompts: checked.
        chosen: options of the call.
        tokenizer: for stop strings.
        max_length: tokens of prompt and output that a row may have.

    Raises:
        ValueError: a row would be too long, or stop strings lack a tokenizer.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) + chosen.max_new_tokens > max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {chosen.max_new_tokens} new ones that is more than "
                f"max_length={max_length}. Shorten one of them, or make the generator with a larger max_length"
            )
    if chosen.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings need a tokenizer, and the target's checkpoint brings none; pass tokenizer=..., or stop at "
            "token ids with eos_token_id"
        )
    requests = []
    for index, row in enumerate(chosen.rows):
        prompt = prompts[index // chosen.copies]
        watch = StopWatch(tokenizer, chosen.stop_strings, prompt) if chosen.stop_strings and tokenizer else None
        requests.append(Request(prompt, chosen.max_new_tokens, row, watch))
    return requests


def check_whole(requests: list[Request], copies: int) -> None:
    """Raises InvalidLogits where a row has failed."""
    failed = [(index, request.invalid_at) for index, request in enumerate(requests) if request.invalid_at is not None]
    if not failed:
        return
    named = [_place(index, position, copies) for index, position in failed[:_NAMED]]
    more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    raise InvalidLogits(
        f"no token could be chosen for {'; '.join(named)}{more}: the target's logits there are NaN or infinite, or "
        "leave no token that the options allow. The other rows are whole (this error's `output`). Check the weights, "
        "take a wider dtype (float16 overflows early), or loosen allowed_token_ids and biases"
    )


def _place(index: int, position: int, copies: int) -> str:
    row = f"prompt {index // copies}" + (f", sequence {index % copies}" if copies > 1 else "")
    return f"{row}, position {position}"


def output_of(requests: list[Request], chosen: Options, stats: Stats, input_ids: Any) -> GenerateOutput:
    """Everything that a call has made; what the caller did not ask for is None."""
    recorded = chosen.top_logprobs is not None
    return GenerateOutput(
        _sequences(requests, chosen, input_ids),
        [request.new_tokens for request in requests],
        [cast("str", request.finish_reason) for request in requests],
        stats,
        [request.logprobs for request in requests] if recorded else None,
        [request.top_logprobs for request in requests] if recorded else None,
        [request.watch.text for request in requests if isinstance(request.watch, StopWatch)]
        if chosen.stop_strings
        else None,
    )


def _sequences(requests: list[Request], chosen: Options, input_ids: Any) -> Tensor:
    """Prompts, left-padded, and new tokens: LongTensor [B, T + new] where the caller's prompts are."""
    width = padded_length(input_ids, [request.prompt for request in requests])
    longest = max(len(request.new_tokens) for request in requests)
    rows = []
    for index, request in enumerate(requests):
        padding = [chosen.pad_token_id] * (width - len(request.prompt))
        if isinstance(input_ids, Tensor):  # the caller's own padding ids are kept
            given = input_ids if input_ids.dim() == 2 else input_ids[None]
            padding = given[index // chosen.copies].tolist()[: len(padding)]
        tail = [chosen.pad_token_id] * (longest - len(request.new_tokens))
        rows.append(padding + request.prompt + request.new_tokens + tail)
    device = input_ids.device if isinstance(input_ids, Tensor) else None
    return torch.tensor(rows, dtype=torch.int64, device=device)
