"""Messages to the thread that makes the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fastspec.scheduling.calls import PreparedCall
from fastspec.scheduling.delivery import Delivery
from fastspec.scheduling.draft_length import Choice
from fastspec.scheduling.requests import Request


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """A call that comes in.

    Attributes:
        call: checked.
        choice: drafts of its steps.
        delivery: where its tokens go.
    """

    call: PreparedCall
    choice: Choice
    delivery: Delivery


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """Requests whose consumer is gone."""

    requests: list[Request]


Message: TypeAlias = "Joining | Leaving | None"  # None: the end
