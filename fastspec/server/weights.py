"""Routes of a trainer: new weights for target or draft, pauses, and sleep. A server has them only if it allows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from fastspec.generator import FastSpecGenerator
from fastspec.server.errors import Refusal, failed

Mode = Literal["abort", "wait"]
"""What becomes of running answers: they end at once, or a change waits for their ends."""


class UpdateWeights(BaseModel):
    """The body of POST /update_weights.

    Attributes:
        path: directory of the server's machine, or Hub id.
        target_model: False updates the draft model.
        version: name of the target's new weights. None: the number of its updates.
        running: "wait" for the ends of running answers, or "abort" them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    path: str = Field(min_length=1)
    target_model: bool = True
    version: int | str | None = None
    running: Mode = "wait"


class WeightVersion(BaseModel):
    """The answer of POST /update_weights and GET /weight_version."""

    weight_version: int | str


class Paused(BaseModel):
    """The answer of POST /pause, POST /resume and GET /is_paused."""

    is_paused: bool


class Sleeping(BaseModel):
    """The answer of POST /sleep, POST /wake_up and GET /is_sleeping."""

    is_sleeping: bool


class WeightControl:
    """Changes the weights of a generator that serves, pauses it, and lets it sleep; one change at a time.

    Args:
        generator: serves meanwhile. Requests that come during a change wait for its end.
    """

    def __init__(self, generator: FastSpecGenerator) -> None:
        self._generator, self._changing = generator, asyncio.Lock()
        self._was_paused = False  # before it fell asleep

    @property
    def version(self) -> WeightVersion:
        """Version of the target's weights."""
        return WeightVersion(weight_version=self._generator.weight_version)

    @property
    def paused(self) -> Paused:
        """Tells if requests wait for `resume`."""
        return Paused(is_paused=self._generator.paused)

    async def update(self, body: UpdateWeights) -> WeightVersion:
        """Replaces weights between two requests, and lets waiting requests go on.

        Raises:
            Refusal: the weights do not fit this model; nothing has changed. Or a copy failed midway: requests are
                refused until an update with all tensors.
        """
        await self._change(lambda: self._update(body))
        return self.version

    async def pause(self, mode: str) -> Paused:
        """Lets new requests wait; returns when running answers have ended.

        Args:
            mode: "wait" for their ends, or "abort" them, with the tokens that they have.

        Raises:
            Refusal: another mode.
        """
        _check_mode(mode)
        await self._change(lambda: self._generator.pause(abort=mode == "abort"))
        return self.paused

    async def resume(self) -> Paused:
        """Lets the waiting requests go on."""
        await self._change(self._generator.resume)
        return self.paused

    @property
    def sleeping(self) -> Sleeping:
        """Tells if the model sleeps."""
        return Sleeping(is_sleeping=self._generator.asleep is not None)

    async def sleep(self, level: str, mode: str) -> Sleeping:
        """Frees memory of the model when running answers have ended; requests are refused until `wake_up`.

        Args:
            level: "1" or "2", see `FastSpecGenerator.sleep`.
            mode: see `pause`.

        Raises:
            Refusal: another level or mode, or a model that cannot sleep so.
        """
        if level not in ("1", "2"):
            raise Refusal(f"level must be 1 or 2, got {level!r}", "level")
        _check_mode(mode)
        await self._change(lambda: self._sleep(int(level), abort=mode == "abort"))
        return self.sleeping

    async def wake_up(self, path: str | None, version: str | None) -> Sleeping:
        """Brings the memory of the model back. Does nothing if it does not sleep.

        Args:
            path: new weights of the target after level 2. None: those that it was served with.
            version: name of these weights.

        Raises:
            Refusal: weights that do not fit, or no room; the model still sleeps.
        """
        await self._change(lambda: self._wake(path, version))
        return self.sleeping

    def _sleep(self, level: int, *, abort: bool) -> None:
        generator = self._generator
        if generator.asleep == level:
            return
        self._was_paused = generator.paused
        generator.pause(abort=abort)
        try:
            generator.sleep(level)
        except ValueError as error:
            if not self._was_paused:
                generator.resume()
            raise Refusal(str(error), "level") from error

    def _wake(self, path: str | None, version: str | None) -> None:
        if self._generator.asleep is None:
            return
        try:
            self._generator.wake(path, version=version)
        except (ValueError, OSError) as error:
            raise Refusal(str(error), "path") from error
        except MemoryError as error:
            raise failed(error) from error
        if not self._was_paused:
            self._generator.resume()

    async def _change(self, work: Callable[[], None]) -> None:
        async with self._changing:
            try:
                await asyncio.to_thread(work)
            except RuntimeError as error:  # the generator is closed, or its weights are half changed
                raise failed(error) from error

    def _update(self, body: UpdateWeights) -> None:
        generator, was_paused = self._generator, self._generator.paused
        generator.pause(abort=body.running == "abort")
        try:
            generator.update_weights(body.path, model="target" if body.target_model else "draft", version=body.version)
        except (ValueError, OSError) as error:
            if not was_paused:
                generator.resume()  # raises RuntimeError if the weights are half changed
            raise Refusal(str(error), "path") from error
        if not was_paused:
            generator.resume()


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise Refusal(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}", "mode")
