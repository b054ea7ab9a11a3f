"""Messages from rank 0 to the other ranks before each step, as JSON: which requests join or leave the batch.

All ranks have the same requests and schedule them equally. Only rank 0 has callers that wait for tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastspec.distributed.ranks import Ranks
from fastspec.distributed.turns import Turns
from fastspec.distributed.world import World
from fastspec.errors import UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.grammar.spec import GrammarSpec
from fastspec.inputs.options import Options, RowOptions
from fastspec.inputs.prompts import RawPrompts
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.scheduling.handle import Delivery
from fastspec.scheduling.loop import Joining, Leaving, Loop, Message
from fastspec.scheduling.requests import PreparedCall, Request, requests_of


class RequestNumbers:
    """Assigns numbers to requests. Messages between ranks name requests by these numbers.

    All ranks assign the same number to a request, because requests join the batch in the same order on each rank.
    """

    def __init__(self) -> None:
        self._next = 0
        self._of: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Assigns the next number to a request that joins the batch."""
        self._of[request], self._requests[self._next] = self._next, request
        self._next += 1

    def forget(self, request: Request) -> None:
        """Drops the number of a request that has ended."""
        number = self._of.pop(request, None)
        if number is not None:
            del self._requests[number]

    def of(self, requests: list[Request]) -> list[int]:
        """Returns the numbers of those of `requests` that have not ended, in the same order."""
        return [self._of[request] for request in requests if request in self._of]

    def requests(self, numbers: list[int]) -> list[Request]:
        """Returns the requests with these numbers."""
        return [self._requests[number] for number in numbers]


class Leader:
    """Sends the messages of rank 0's loop to the other ranks, before each step.

    Args:
        world: all ranks.
        numbers: numbers of requests. Requests that join the batch get their numbers here.
    """

    def __init__(self, world: World, numbers: RequestNumbers) -> None:
        self._world, self._numbers = world, numbers
        self._turns: Turns | None = None
        self._ended = False

    def tell(self, messages: list[Message]) -> None:
        """Sends the messages that precede one step to the other ranks.

        Raises:
            RankFailed: a rank has failed.
        """
        self._turns = self._turns or Turns(self._world)
        self._turns.tell(written(messages, self._numbers))
        self._ended = None in messages

    def end(self) -> None:
        """Tells the other ranks to return from `follow`, and waits until they have read this message."""
        with suppress(RuntimeError):  # the group has already failed
            if not self._ended:
                self.tell([None])
            assert self._turns is not None, "it has told something"
            self._turns.wait_for_end()


def check_submits(ranks: Ranks, loop: Loop) -> None:
    """Raises if `submit` may not be called on this rank now.

    Raises:
        UnsupportedOption: this is a rank other than 0.
        RankFailed: a rank has failed.
        RuntimeError: a call that all ranks make is running.
    """
    if ranks.size == 1:
        return
    ranks.world.check()
    if not ranks.first:
        raise UnsupportedOption(
            f"submit() is for rank 0, and this is rank {ranks.world.rank}: call follow() here, which makes "
            "the steps of what rank 0 submits"
        )
    if loop.called and not loop.running:
        raise RuntimeError("a call of all ranks is running; submit when it has ended")


def check_tokenizer_is_stored(tokenizer: object, stored: object) -> None:
    """Raises UnsupportedOption if a call passes its own tokenizer. The other ranks have only the stored one."""
    if tokenizer not in (None, stored):
        raise UnsupportedOption(
            "the option tokenizer is not supported in submit() with tensor_parallel, because the other ranks have only "
            "the checkpoint's tokenizer; leave it out, or call generate() on all ranks"
        )


def follow(ranks: Ranks, loop: Loop, reader: Reader, numbers: RequestNumbers) -> None:
    """Repeats the steps of rank 0 on this rank, until rank 0 closes its generator.

    Args:
        ranks: ranks of the generator.
        loop: loop of this rank, which makes the steps.
        reader: parses rank 0's messages.
        numbers: numbers of the requests that have not ended.

    Raises:
        UnsupportedOption: there are no other ranks, or this is rank 0.
        RankFailed: a rank has failed.
        RuntimeError: a call is running on this rank.
    """
    if ranks.size == 1 or ranks.first:
        raise UnsupportedOption("follow() is for ranks other than 0; on rank 0 call submit()")
    ranks.world.check()
    with loop.following():
        turns = Turns(ranks.world)
    with closing(turns), ranks.guarded("following rank 0"):
        turns.begin()
        messages: list[Message] = []
        while None not in messages:
            messages = reader.read(turns.next(), numbers)
            loop.make_turn(messages)
            ranks.world.check()
        turns.end()


def written(messages: list[Message], numbers: RequestNumbers) -> str:
    """Returns messages as the JSON text that `Reader.read` parses. Gives numbers to requests that join the batch."""
    return json.dumps([_written(each, numbers) for each in messages])


def _written(message: Message, numbers: RequestNumbers) -> Any:
    if message is None:
        return None
    if isinstance(message, Leaving):
        return {"leave": numbers.of(message.requests or [])}
    call = message.call
    for request in call.requests:
        numbers.add(request)
    prompts = [request.prompt for request in call.requests[:: call.options.copies]]
    rows = [asdict(request.options) for request in call.requests]
    return {"join": prompts, "rows": rows, "options": asdict(replace(call.options, rows=()))}


class Reader:
    """Makes requests from the messages of rank 0.

    Args:
        max_length: largest number of tokens of prompt and output together.
        choose: returns the DraftChoice for the options of a call.
        tokenizer: loads the target's tokenizer.
        grammars: grammars over the target's vocabulary.
    """

    def __init__(
        self,
        max_length: int,
        choose: Callable[[Options], DraftChoice],
        tokenizer: Callable[[], PreTrainedTokenizerBase | None],
        grammars: Grammars,
    ) -> None:
        self._max_length, self._choose, self._tokenizer, self._grammars = max_length, choose, tokenizer, grammars

    def read(self, text: str, numbers: RequestNumbers) -> list[Message]:
        """Parses the messages that rank 0 sent before a step. Assigns numbers to requests that join the batch."""
        return [self._message(each, numbers) for each in json.loads(text)]

    def _message(self, entry: Any, numbers: RequestNumbers) -> Message:
        if entry is None:
            return None
        if "leave" in entry:
            return Leaving(numbers.requests(entry["leave"]))
        given: dict[str, Any] = {
            **{name: tuple(each) if isinstance(each, list) else each for name, each in entry["options"].items()},
            "rows": tuple(_row(each) for each in entry["rows"]),
        }
        chosen = Options(**given)
        text = chosen.stop_strings or any(row.grammar for row in chosen.rows)
        tokenizer = self._tokenizer() if text else None
        requests = requests_of(entry["join"], chosen, tokenizer, self._max_length, self._grammars)
        for request in requests:
            numbers.add(request)
        prompts = RawPrompts(entry["join"], None, False, torch.device("cpu"))
        return Joining(PreparedCall(requests, chosen, prompts, self._choose(chosen)), Delivery(requests))


def _row(entry: dict[str, Any]) -> RowOptions:
    entry = {**entry, "bias": tuple((token, bias) for token, bias in entry["bias"])}
    entry["prediction"] = tuple(entry["prediction"])
    for name in ("allowed", "given"):
        if entry[name] is not None:
            entry[name] = tuple(entry[name])
    if entry["grammar"] is not None:
        entry["grammar"] = GrammarSpec(**entry["grammar"])
    return RowOptions(**entry)
