"""Streams new text, and tells for each piece whether a draft token or a token of the target completed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from fastspec.text.stop_strings import StoppedWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastspec.text.text_stream import StreamWriter


class OriginWriter(BaseStreamer):
    """Streamer that tells for each piece of text whether a draft token completed it.

    A decode step emits its accepted draft tokens and then one token of the target. Only in the last step of a row the
    target's token may be cut off. Then the last token is a draft token. So the last token of a step is held back until
    the next step, or until `finish`.

    Args:
        tokenizer: the target's tokenizer.
        write: called with (piece of text, True if a draft token completed it).
        stop_strings: stop strings of the call.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, bool], object], stop_strings: Sequence[str]
    ) -> None:
        self._drafted, self._begun = False, False
        self._last: torch.Tensor | None = None
        self._writer: StreamWriter = StoppedWriter(
            tokenizer, lambda piece: write(piece, self._drafted), tuple(stop_strings)
        )

    def put(self, value: Any) -> None:
        """Receives the prompt's token ids at the first call, then the new token ids of each decode step ([n])."""
        if not self._begun:
            self._writer.put(value)
            self._begun = True
            return
        self._put_last(drafted=False)
        self._drafted = True
        for index in range(len(value) - 1):
            self._writer.put(value[index : index + 1])
        self._last = value[-1:]

    def end(self) -> None:
        """Does nothing: `finish` writes the last token."""

    def finish(self, *, drafted: bool) -> None:
        """Writes the last token and the text that was held back.

        Args:
            drafted: True if the target's last token was cut off, so that the last token is a draft token.
        """
        self._put_last(drafted=drafted)
        self._writer.end()

    def _put_last(self, *, drafted: bool) -> None:
        if self._last is not None:
            self._drafted = drafted
            self._writer.put(self._last)
            self._last = None
