"""Writes requests into batch slots on the device, and sends draft tokens and token masks to slots with a grammar.

A row is a batch slot: one index of the tensors of `DecodeState`. No function here makes the host wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastspec.grammar.row import ALL, GrammarStep
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.table import NUMBERS
from fastspec.shapes import FULL
from fastspec.state import BUFFERS, IDLE, MAX_STOP_IDS, RUNNING, DecodeState, send, sent

# fields with what a row has learnt about its drafts. They are reset for a new request, because its text must not depend
# on the previous request of this row
_LEARNED = ("proposed_at", "lookup_mean", "model_mean")


def fill_prompt(
    state: DecodeState,
    row: int,
    prompt: list[int],
    pages: tuple[int, ...],
    stop_ids: tuple[int, ...],
    draft_length: int = 0,
) -> None:
    """Writes the prompt, KV cache pages and stop ids of a request into a batch slot, before its prefill.

    Decode steps skip the slot until its prompt is prefilled.

    Args:
        state: decode state to write to.
        row: index of the batch slot.
        prompt: token ids of the prompt.
        pages: indices of the request's KV cache pages.
        stop_ids: token ids that end the request.
        draft_length: number of first prompt positions whose K/V of the draft model are already in these pages.
    """
    padded = [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]
    filled = send([*padded, *pages, *prompt], torch.int64, state.lengths.device)
    ids = filled[MAX_STOP_IDS + len(pages) :]
    state.stop_ids[row] = filled[:MAX_STOP_IDS]
    state.block_table[row].zero_()
    state.block_table[row, : len(pages)] = filled[MAX_STOP_IDS : MAX_STOP_IDS + len(pages)]
    state.tokens[row, : len(prompt)] = ids
    numbers = {"lengths": len(prompt), "draft_lengths": draft_length, "emitted": min(1, len(prompt) - 1)}
    _fill(state, row, {**numbers, "finish": IDLE})


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that has just got a batch slot.

    Attributes:
        row: index of the batch slot.
        prompt_length: number of prompt tokens.
        limit: largest number of tokens of prompt and output together.
        options: sampling options of the request.
    """

    row: int
    prompt_length: int
    limit: int
    options: RowOptions


def fill_options(state: DecodeState, rows: Sequence[NewRow], sampler: str) -> None:
    """Writes the sampling options and limits of new requests into their batch slots, where decode steps read them.

    Each field is written for all the requests with one copy on the device.

    Args:
        state: decode state to write to.
        rows: the new requests, at least one.
        sampler: sampler of the decode steps, FULL or GREEDY. Logit biases and token counts are written only for FULL,
            because GREEDY does not read them.
    """
    numbers = [_numbers(each, state.draft_tokens.shape[1]) for each in rows]
    places = send([each.row for each in rows], torch.int64, state.lengths.device)
    for dtype in (torch.int64, torch.float32):
        names = [name for name in numbers[0] if getattr(state, name).is_floating_point() == dtype.is_floating_point]
        values = send([line[name] for name in names for line in numbers], dtype, state.lengths.device)
        for name, column in zip(names, values.split(len(rows)), strict=True):
            getattr(state, name).index_copy_(0, places, column.to(getattr(state, name).dtype))
    state.masks.index_fill_(0, places, ALL)
    for each in rows if sampler == FULL else ():
        fill_tables(state, each.row, each.prompt_length, each.options)


def _numbers(new: NewRow, max_drafts: int) -> dict[str, float]:
    """Returns {name of a `DecodeState` field: value to write} for the batch slot of a new request."""
    options = new.options
    return {
        "limits": new.limit,
        **{each.fills: getattr(options, name) for name, each in NUMBERS.items()},
        "seeds": options.seed,
        "min_lengths": new.prompt_length + options.min_new_tokens,
        "prompt_lengths": new.prompt_length,
        "draft_limits": draft_limit(options, max_drafts),
        "constrained": options.guided,
        "processed": options.processed_logprobs,
        **{name: BUFFERS[name].fill_value({}) for name in _LEARNED},
    }


def fill_texts(state: DecodeState, row: int, prediction: tuple[int, ...], owner: int) -> None:
    """Writes the user's prediction, and the group of earlier answers, in which a request's draft tokens are looked up.

    Args:
        state: decode state to write to.
        row: index of the request's batch slot.
        prediction: token ids of the text that the user predicts. Empty: there is no prediction.
        owner: number of the group of earlier answers that the request may use, see `Suffix.owner_of`.
    """
    if prediction:
        state.prediction[row, : len(prediction)] = send(list(prediction), torch.int64, state.lengths.device)
    _fill(state, row, {"prediction_lengths": len(prediction), "owners": owner})


def _fill(state: DecodeState, row: int, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        getattr(state, name)[row].fill_(value)  # assignment to the element would wait for the device


def allow(state: DecodeState, steps: Mapping[int, GrammarStep], k: int, ready: int = RUNNING) -> None:
    """Queues a copy of grammar draft tokens and token masks to the device, and makes their batch slots run again.

    Args:
        state: decode state to write to.
        steps: index of a batch slot -> its draft tokens and masks for the next decode step.
        k: number of draft tokens of that step. Further draft tokens of a slot are dropped.
        ready: value written to `DecodeState.finish` of these slots. RUNNING for a decode step. PREFILLED if the next
            step is a `first_token_step`.
    """
    places, words = k + 1, state.masks.shape[2]
    packed = np.full((len(steps), 2 + k + places * words), ALL, dtype=np.int32)
    for line, (row, step) in zip(packed, steps.items(), strict=True):
        cut = step.cut(k)
        line[0], line[1] = row, len(cut.drafts)
        line[2 : 2 + k] = cut.drafts + [0] * (k - len(cut.drafts))
        line[2 + k : 2 + k + cut.masks.size] = cut.masks.ravel()
    there = sent(torch.from_numpy(packed), state.masks.device)
    rows = there[:, 0].long()
    state.grammar_counts.index_copy_(0, rows, there[:, 1].long())
    if k:
        state.grammar_drafts[:, :k].index_copy_(0, rows, there[:, 2 : 2 + k].long())
    state.masks[:, :places].index_copy_(0, rows, there[:, 2 + k :].reshape(len(steps), places, words))
    state.finish.index_fill_(0, rows, ready)


def draft_limit(options: RowOptions, max_drafts: int) -> int:
    """Returns the largest number of draft tokens per step for a request with these options, at most `max_drafts`."""
    return max_drafts if options.draft_limit is None else min(options.draft_limit, max_drafts)


def fill_tables(state: DecodeState, row: int, prompt_length: int, options: RowOptions) -> None:
    """Writes the logit biases, zero output-token counts and the set of prompt tokens of a request into its batch slot.

    The request must have no output tokens yet, or its options must not use the counts.

    Args:
        state: decode state to write to.
        row: index of the batch slot.
        prompt_length: number of prompt tokens.
        options: sampling options of the request.
    """
    prompt = state.tokens[row, :prompt_length]
    state.output_counts[row].zero_()
    state.in_prompt[row].zero_().index_fill_(0, prompt, True)
    state.unbiased[row].fill_(options.allowed is None and not options.bias)
    bias = state.bias[row].fill_(0.0 if options.allowed is None else -math.inf)
    if options.allowed is not None:
        bias.index_fill_(0, send(options.allowed, torch.int64, bias.device), 0.0)
    if options.bias:
        ids, values = zip(*options.bias, strict=True)
        # added, so that a bias cannot allow an id that is not allowed
        bias.index_add_(0, send(ids, torch.int64, bias.device), send(values, torch.float32, bias.device))
