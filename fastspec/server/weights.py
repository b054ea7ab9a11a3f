"""Operations of a trainer on a served model: new weights for target or draft, pauses, and sleep.

A server has routes for them only if `Access.weight_updates` is True.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from fastspec.generator import FastSpecGenerator
from fastspec.server.errors import Refusal, failed

Mode = Literal["abort", "wait"]
"""Treatment of running answers: "abort" ends them at once, "wait" lets them complete."""


class UpdateWeights(BaseModel):
    """The body of POST /update_weights.

    Attributes:
        path: checkpoint with the new weights: a directory on the server's machine, or a Hub id.
        target_model: True updates the target, False the draft model.
        version: name of the target's new weights. None: the number of the target's updates so far.
        running: "wait" lets running answers complete before the update, "abort" ends them at once.
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
    """Changes the weights of a served generator, pauses it, and puts it to sleep. Makes one change at a time.

    Args:
        generator: generator that serves requests.
    """

    def __init__(self, generator: FastSpecGenerator) -> None:
        self._generator, self._changing = generator, asyncio.Lock()
        self._was_paused = False  # True if the generator was paused before it fell asleep

    @property
    def version(self) -> WeightVersion:
        """Version of the target's weights."""
        return WeightVersion(weight_version=self._generator.weight_version)

    @property
    def paused(self) -> Paused:
        """Tells whether the generator is paused. While it is paused, new requests wait until `resume`."""
        return Paused(is_paused=self._generator.paused)

    async def update(self, body: UpdateWeights) -> WeightVersion:
        """Replaces the weights of target or draft while no answer runs. New requests wait until the update has ended.

        Raises:
            Refusal: the weights do not fit this model, or copying failed midway. In the first case nothing has changed.
                In the second case requests are refused until an update replaces all tensors.
        """
        await self._change(lambda: self._update(body))
        return self.version

    async def pause(self, mode: str) -> Paused:
        """Holds new requests until `resume`. Returns when the running answers have ended.

        Args:
            mode: "wait" lets running answers complete. "abort" ends them at once, with the tokens that they have.

        Raises:
            Refusal: `mode` has another value.
        """
        _check_mode(mode)
        await self._change(lambda: self._generator.pause(abort=mode == "abort"))
        return self.paused

    async def resume(self) -> Paused:
        """Ends a pause, so that the requests that wait are decoded."""
        await self._change(self._generator.resume)
        return self.paused

    @property
    def sleeping(self) -> Sleeping:
        """Tells whether the model sleeps, so that its memory is free."""
        return Sleeping(is_sleeping=self._generator.asleep is not None)

    async def sleep(self, level: str, mode: str) -> Sleeping:
        """Frees memory of the model after the running answers have ended. Requests are refused until `wake_up`.

        Args:
            level: "1" or "2", see `FastSpecGenerator.sleep`.
            mode: see `pause`.

        Raises:
            Refusal: the level or the mode is unknown, or the model does not support the level.
        """
        if level not in ("1", "2"):
            raise Refusal(f"level must be 1 or 2, got {level!r}", "level")
        _check_mode(mode)
        await self._change(lambda: self._sleep(int(level), abort=mode == "abort"))
        return self.sleeping

    async def wake_up(self, path: str | None, version: str | None) -> Sleeping:
        """Ends sleep: allocates the memory of the model again, and fills it. Does nothing if the model does not sleep.

        Args:
            path: checkpoint with new weights of the target, after level 2. None: the checkpoint that was served.
            version: name of these weights. None: see `UpdateWeights.version`.

        Raises:
            Refusal: the weights do not fit, or memory is missing. The model still sleeps.
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
            except RuntimeError as error:  # the generator is closed, or only a part of its weights is changed
                raise failed(error) from error

    def _update(self, body: UpdateWeights) -> None:
        generator, was_paused = self._generator, self._generator.paused
        generator.pause(abort=body.running == "abort")
        try:
            generator.update_weights(body.path, model="target" if body.target_model else "draft", version=body.version)
        except (ValueError, OSError) as error:
            if not was_paused:
                generator.resume()  # raises RuntimeError if only a part of the weights is changed
            raise Refusal(str(error), "path") from error
        if not was_paused:
            generator.resume()


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise Refusal(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}", "mode")
