"""Rows that follow a grammar: when they step, and how what may come next gets to the device.

What may come next follows from a row's last token, which the host reads. So such a row is in one step at a time: it
is paused until the step is read, and goes on with the next one that is launched. Other rows step meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from fastspec.grammar.row import ALL, Turn
from fastspec.runtime import admission
from fastspec.runtime.request import Call, InFlightStep, Request
from fastspec.state import RUNNING, DecodeState


def due(rows: Mapping[int, Request], in_flight: Iterable[InFlightStep]) -> dict[int, Request]:
    """The rows that the next step may be for: all but those with a grammar whose last step was not read yet."""
    waiting = {request for step in in_flight for request in step.requests.values() if request.grammar is not None}
    return {row: request for row, request in rows.items() if request not in waiting}


def constrained(rows: Mapping[int, Request]) -> bool:
    """Whether one of these rows follows a grammar."""
    return any(request.grammar is not None for request in rows.values())


def turns_of(requests: Mapping[int, Request], calls: Mapping[Request, Call], k: int) -> tuple[int, dict[int, Turn]]:
    """What each row with a grammar needs for the next step, and how many drafts that has.

    Args:
        requests: by the row of each.
        calls: of the requests.
        k: drafts of the other rows; where those have none, as many as the calls of rows with a grammar ask for.
    """
    turns, most = {}, 0
    for row, request in requests.items():
        if request.grammar is not None:
            asked = k or calls[request].choose_k(calls[request].steps)
            turns[row] = request.grammar.turn(admission.draft_limit(request.options, asked))
            most = max(most, asked if turns[row].drafts else 0)
    return k or most, turns


def send(state: DecodeState, turns: Mapping[int, Turn], k: int) -> None:
    """Queues the copy of what rows may do next, and lets them run; waits for nothing.

    Args:
        state: of which rows `turns` go on.
        turns: by row.
        k: drafts of the step; further ones of a row are left out.
    """
    places, words = k + 1, state.masks.shape[2]
    packed = np.full((len(turns), 2 + k + places * words), ALL, dtype=np.int32)
    for line, (row, whole) in zip(packed, turns.items(), strict=True):
        turn = whole.cut(k)
        line[0], line[1] = row, len(turn.drafts)
        line[2 : 2 + k] = turn.drafts + [0] * (k - len(turn.drafts))
        line[2 + k : 2 + k + turn.masks.size] = turn.masks.ravel()
    here = torch.from_numpy(packed)
    device = state.masks.device
    sent = here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
    rows = sent[:, 0].long()
    state.given_counts.index_copy_(0, rows, sent[:, 1].long())
    if k:
        state.given_tokens[:, :k].index_copy_(0, rows, sent[:, 2 : 2 + k].long())
    state.masks[:, :places].index_copy_(0, rows, sent[:, 2 + k :].reshape(len(turns), places, words))
    state.finish.index_fill_(0, rows, RUNNING)
