"""Messages to the thread that makes the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fastspec.runtime.draft_plan import Choice
from fastspec.runtime.request import Request
from fastspec.session.calls import PreparedCall
from fastspec.session.delivery import Delivery


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
