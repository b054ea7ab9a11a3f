"""Result ring: steps write their emitted tokens to host memory, and the host reads them without a call of CUDA.

An entry is int64 [1 + B*(5 + K)]: the number of the step, then the fields of `RowResult` for each of B batch slots. The
last field is a block of K+1 tokens. On CUDA the ring is pinned memory that the device writes to
(kernels/sampling/publish.py). The number of the step is stored last. So an entry with the expected number is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fastspec.graphs.failures import device_failed
from fastspec.state import Outbox

Pairs = list[tuple[int, float]]  # (token id, log-probability)

SLOTS = 64  # number of entries; far fewer steps are launched ahead
PATIENCE = 2.0  # seconds without a result after which the host checks the device for errors
_HEADER = 4  # emitted, accepted, drafted, finish


class Watch(Protocol):
    """Callbacks that check if other processes (ranks), on which a step depends, still run."""

    def launched(self) -> None:
        """Records the launch of a step. Called before each launch."""

    def waiting(self, seconds: float) -> None:
        """Raises if another process has failed. Called repeatedly while the host waits for a result.

        Args:
            seconds: time that the host has waited so far.
        """


class NoOthers:
    """Callbacks for a process that depends on no other process. They do nothing."""

    def launched(self) -> None:
        """Does nothing."""

    def waiting(self, seconds: float) -> None:
        """Does nothing."""


class RowResult(NamedTuple):
    """Result of one step for one batch slot.

    Attributes:
        emitted: number of new tokens.
        accepted: number of accepted draft tokens; negative values are explained at `DecodeState`.
        drafted: number of valid draft tokens of the step.
        finish: state of the batch slot after the step, such as RUNNING or STOPPED, see `fastspec.state`.
        block: k + 1 tokens, of which the first `emitted` are the new ones.
    """

    emitted: int
    accepted: int
    drafted: int
    finish: int
    block: list[int]


class ResultRing:
    """Ring buffer of step results, from which the host reads them.

    Args:
        batch: number of batch slots.
        max_drafts: largest number of draft tokens of a step.
        num_top: largest number of most probable ids whose log-probabilities an entry can have.
        device: device of the steps.
        pinned: True if the device writes to host memory, which Triton kernels can. Else the ring is on the device, and
            reading it waits for the device.
        watch: called at launches and during long waits. It raises if another rank has failed. None: no other ranks.

    Attributes:
        outbox: buffers to which steps write.
        launched: number of steps launched so far, which is the number of the last one.
    """

    def __init__(
        self,
        batch: int,
        max_drafts: int,
        num_top: int,
        device: torch.device,
        *,
        pinned: bool,
        watch: Watch | None = None,
    ) -> None:
        self._row_width = _HEADER + max_drafts + 1
        self._device = device
        self._num_top = num_top
        on = torch.device("cpu") if pinned else device
        entries = torch.zeros(SLOTS, 1 + batch * self._row_width, dtype=torch.int64, device=on, pin_memory=pinned)
        words = (SLOTS, batch, max_drafts + 1, 1 + 2 * num_top)
        details = torch.zeros(words, dtype=torch.int32, device=on, pin_memory=pinned)
        self.outbox = Outbox(entries, details, torch.zeros(1, dtype=torch.int64, device=device))
        self._words: NDArray[np.int64] | None = None
        self.launched = 0
        self._watch: Watch = watch or NoOthers()
        self._unsettled = False

    def count(self, launch: Callable[[], None]) -> int:
        """Calls `launch`, which queues one step, and counts the step. Returns the number of the step."""
        self._unsettled = True
        self._watch.launched()
        launch()
        self.launched += 1
        self._unsettled = False
        return self.launched

    def correct_count(self) -> None:
        """Sets `launched` to the device's count if an error has interrupted a launch."""
        if self._unsettled:
            self.resync()

    def resync(self) -> None:
        """Waits for the device, and sets `launched` to the device's count of steps.

        It is called after steps that were launched without `count`.
        """
        self.launched = int(self.outbox.counter)
        self._unsettled = False

    def ready(self, sequence: int) -> bool:
        """True if the results of the step with number `sequence` have arrived."""
        return bool(self._entry(sequence)[0] == sequence)

    def read(self, sequence: int, rows: int) -> list[RowResult]:
        """Waits for the step with number `sequence`, and returns its results for the first `rows` batch slots.

        Raises:
            RuntimeError: the device failed, or the step ended without a result.
        """
        start = time.monotonic()
        deadline = start + PATIENCE
        while not self.ready(sequence):
            time.sleep(0)  # lets other threads run
            if time.monotonic() > deadline:
                self._watch.waiting(time.monotonic() - start)
                self._check_alive(sequence)
                deadline = time.monotonic() + PATIENCE
        words = self._entry(sequence)[1 : 1 + rows * self._row_width].reshape(rows, -1).tolist()
        return [RowResult(row[0], row[1], row[2], row[3], row[_HEADER:]) for row in words]

    def _entry(self, sequence: int) -> NDArray[np.int64]:
        words = self._words
        if words is None:
            words = self.outbox.entries.cpu().numpy()
            if self.outbox.entries.device.type == "cpu":
                self._words = words  # cached, because the host polls for a result many times
        entry: NDArray[np.int64] = words[sequence % SLOTS]
        return entry

    def logprobs(self, sequence: int, row: int, count: int, top: int) -> tuple[list[float], list[Pairs]]:
        """Reads the log-probabilities that a step recorded. `read` must have been called for the step.

        Args:
            sequence: number of the step.
            row: index of the batch slot.
            count: number of tokens that the step emitted in this batch slot.
            top: number of most probable ids to return for each token.

        Returns:
            Log-probabilities of the `count` tokens; and for each of them the `top` most probable (id, log-probability)
            pairs.
        """
        words = self.outbox.details[sequence % SLOTS, row, :count].cpu().numpy()
        ids = words[:, 1 : 1 + top].tolist()
        values = words[:, 1 + self._num_top : 1 + self._num_top + top].view(np.float32).tolist()
        pairs = [list(zip(*place, strict=True)) for place in zip(ids, values, strict=True)]
        return words[:, 0].view(np.float32).tolist(), pairs

    def _check_alive(self, sequence: int) -> None:
        """Raises RuntimeError if the device has failed, or if it is idle and has not written the result."""
        try:
            if self._device.type == "cuda" and not torch.cuda.current_stream(self._device).query():
                return  # the device is still working
        except RuntimeError as error:
            raise device_failed(error) from error
        if not self.ready(sequence):
            raise RuntimeError(
                f"the device finished its work, but step {sequence} left no result (the last one there is "
                f"{int(self.outbox.counter)}); this generator cannot go on: close it and make a new one"
            )
