"""How long steps take, by the host's clock alone: results arrive in order, so the time between two is a step's.

Nothing here asks the device anything. A `DraftLengthPolicy` is told the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fastspec.adaptive.controller import Observation, StepContext

_NOTICED = 0.25  # of an interval: a longer pause of the reader may be what made it long


class DraftLengthPolicy(Protocol):
    """Chooses k for a scheduler, and is told what every step did.

    Attributes:
        few: how many rows the next step drafts in, when it drafts: those that take the least to catch up. None: all.
    """

    @property
    def few(self) -> int | None:
        """Rows that draft in the next step; None: all."""

    def choose(self, context: StepContext) -> int:
        """Drafts for the next step; may be asked again before it is launched."""

    def observe(self, step: Observation) -> None:
        """Takes in what a step did, in the order of the steps."""


class StepTimer:
    """Intervals between results.

    Args:
        ahead: steps are launched ahead, so that the device works while the reader of the results does something else.
        clock: seconds.
    """

    def __init__(self, ahead: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ahead = ahead
        self._clock = clock
        self._last: float | None = None
        self._left = 0.0
        self._away = 0.0

    def leave(self) -> None:
        """The reader of the results takes over."""
        self._left = self._clock()

    def back(self) -> None:
        """The scheduler has control again."""
        self._away += self._clock() - self._left

    def arrived(self, waited: bool) -> float | None:
        """A result was read: seconds since the one before it, the reader's own time left out.

        None where there is none before it, or where the reader was away so long that the time of arrival is not known.

        Args:
            waited: it was not there yet when the scheduler came to read it.
        """
        now = self._clock()
        interval = None if self._last is None else now - self._last
        away, self._last, self._away = self._away, now, 0.0
        if interval is None or not self._ahead:
            return None if interval is None else interval - away  # without steps ahead the device rested meanwhile
        return interval if waited or away < _NOTICED * interval else None
