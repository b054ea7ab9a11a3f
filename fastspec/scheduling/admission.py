"""Writes a request into a row of the state, and sends draft tokens and masks to rows with a grammar.

The host never waits for the device here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fastspec.grammar.row import ALL, GrammarStep
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.table import NUMBERS
from fastspec.shapes import FULL
from fastspec.state import IDLE, MAX_STOP_IDS, RUNNING, DecodeState


def fill_prompt(
    state: DecodeState,
    row: int,
    prompt: list[int],
    pages: tuple[int, ...],
    stop_ids: tuple[int, ...],
    draft_length: int = 0,
) -> None:
    """Writes the fields of a row that prefill passes read, and its stop ids.

    The row idles until its prompt is prefilled.

    Args:
        state, row: the row to write to.
        prompt: token ids.
        pages: its pages of the KV cache.
        stop_ids: token ids that end the row.
        draft_length: number of positions whose K/V of the draft are already in the row's pages.
    """
    padded = [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]
    sent = _send([*padded, *pages, *prompt], torch.int64, state.lengths.device)
    ids = sent[MAX_STOP_IDS + len(pages) :]
    state.stop_ids[row] = sent[:MAX_STOP_IDS]
    state.block_table[row].zero_()
    state.block_table[row, : len(pages)] = sent[MAX_STOP_IDS : MAX_STOP_IDS + len(pages)]
    state.tokens[row, : len(prompt)] = ids
    numbers = {"lengths": len(prompt), "draft_lengths": draft_length, "emitted": min(1, len(prompt) - 1)}
    _fill(state, row, {**numbers, "finish": IDLE})


def fill_options(
    state: DecodeState, row: int, prompt_length: int, limit: int, options: RowOptions, sampler: str
) -> None:
    """Writes the fields of a row that steps read.

    Args:
        state, row: the row to write to.
        prompt_length: tokens of the prompt.
        limit: largest length of the row, in tokens.
        options: options of the row.
        sampler: sampler kind of its steps. Biases and counts are written only for FULL, because GREEDY does not read
            them.
    """
    numbers = {
        "limits": limit,
        **{each.fills: getattr(options, name) for name, each in NUMBERS.items()},
        "seeds": options.seed,
        "min_lengths": prompt_length + options.min_new_tokens,
        "prompt_lengths": prompt_length,
        "draft_limits": draft_limit(options, state.draft_tokens.shape[1]),
        "constrained": options.guided,
        "processed": options.processed_logprobs,
        "masks": ALL,
    }
    _fill(state, row, numbers)
    if sampler == FULL:
        fill_tables(state, row, prompt_length, options)


def fill_texts(state: DecodeState, row: int, prediction: tuple[int, ...], owner: int) -> None:
    """Fills the prediction of a row, and the owner of the earlier answers that may draft for it."""
    if prediction:
        state.prediction[row, : len(prediction)] = _send(list(prediction), torch.int64, state.lengths.device)
    _fill(state, row, {"prediction_lengths": len(prediction), "owners": owner})


def _fill(state: DecodeState, row: int, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        getattr(state, name)[row].fill_(value)  # assignment to the element would wait for the device


def allow(state: DecodeState, steps: Mapping[int, GrammarStep], k: int, ready: int = RUNNING) -> None:
    """Queues the copy of draft tokens and masks to the device, and lets the rows run.

    Args:
        state: state of the rows.
        steps: row -> its draft tokens and masks.
        k: drafts of the step; further draft tokens of a row are dropped.
        ready: value for `finish`, with which the rows run: RUNNING, or PREFILLED in a step for first tokens.
    """
    places, words = k + 1, state.masks.shape[2]
    packed = np.full((len(steps), 2 + k + places * words), ALL, dtype=np.int32)
    for line, (row, step) in zip(packed, steps.items(), strict=True):
        cut = step.cut(k)
        line[0], line[1] = row, len(cut.drafts)
        line[2 : 2 + k] = cut.drafts + [0] * (k - len(cut.drafts))
        line[2 + k : 2 + k + cut.masks.size] = cut.masks.ravel()
    sent = _moved(torch.from_numpy(packed), state.masks.device)
    rows = sent[:, 0].long()
    state.grammar_counts.index_copy_(0, rows, sent[:, 1].long())
    if k:
        state.grammar_drafts[:, :k].index_copy_(0, rows, sent[:, 2 : 2 + k].long())
    state.masks[:, :places].index_copy_(0, rows, sent[:, 2 + k :].reshape(len(steps), places, words))
    state.finish.index_fill_(0, rows, ready)


def draft_limit(options: RowOptions, max_drafts: int) -> int:
    """Returns the largest number of drafts that a row may use in a step of at most `max_drafts` drafts."""
    return max_drafts if options.draft_limit is None else min(options.draft_limit, max_drafts)


def fill_tables(state: DecodeState, row: int, prompt_length: int, options: RowOptions) -> None:
    """Writes the biases and counts of a row that has emitted nothing, or whose options do not read counts."""
    prompt = state.tokens[row, :prompt_length]
    state.output_counts[row].zero_()
    state.in_prompt[row].zero_().index_fill_(0, prompt, True)
    state.unbiased[row].fill_(options.allowed is None and not options.bias)
    bias = state.bias[row].fill_(0.0 if options.allowed is None else -math.inf)
    if options.allowed is not None:
        bias.index_fill_(0, _send(options.allowed, torch.int64, bias.device), 0.0)
    if options.bias:
        ids, values = zip(*options.bias, strict=True)
        # added, so that a bias cannot allow an id that is not allowed
        bias.index_add_(0, _send(ids, torch.int64, bias.device), _send(values, torch.float32, bias.device))


def _send(values: list[int] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies values to the device. On CUDA through pinned memory, so that the host does not wait."""
    if dtype == torch.int64 and values:  # torch reads an array in a third of the time
        return _moved(torch.frombuffer(array("q", values), dtype=dtype), device)
    return _moved(torch.tensor(values, dtype=dtype, device="cpu"), device)


def _moved(here: Tensor, device: torch.device) -> Tensor:
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
