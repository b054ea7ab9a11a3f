"""Stop strings. After each decode step the host searches for them in the text of each row of the batch.

A row ends with the first token that completes a stop string, as in transformers' `StopStringCriteria`. The number of
tokens per step makes no difference. The string may begin in the prompt, unless the user excludes that, but must end
after the prompt. The returned ids include the whole last token, but the text ends with the stop string. `TextStream`
makes the searched text from all ids, with special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastspec.text.text_stream import StreamWriter, TextStream


def first_end(before: str, new: str, stop_strings: Sequence[str]) -> int:
    """Returns the number of characters of `new` up to the end of the first complete stop string.

    The string may begin in `before`, the text before `new`. Returns 0 if there is no complete stop string.
    """
    text, known = before + new, len(before)
    starts = [(text.find(string, max(0, known - len(string) + 1)), len(string)) for string in stop_strings]
    return min((at + length - known for at, length in starts if at >= 0), default=0)


class StopWatch:
    """Searches for stop strings in the text of one row while its tokens arrive.

    Args:
        tokenizer: the target's tokenizer.
        stop_strings: stop strings, at least one. None of them is empty.
        prompt: token ids of the prompt.
        across_prompt: True if a stop string may begin in the prompt.

    Attributes:
        beyond: number of characters of the row's last token that follow the stop string. None while the row continues.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        prompt: Sequence[int],
        *,
        across_prompt: bool = True,
    ) -> None:
        self._stop_strings = stop_strings
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=False)
        self._reach = max(map(len, stop_strings)) - 1
        # end of the text so far: a stop string may begin there, but must end in later text
        self._before = self._tail(self._stream.context) if across_prompt else ""
        self._pieces: list[str] = []
        self._pending = ""
        self.beyond: int | None = None

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Receives the row's next tokens. Returns how many of them there are up to the row's end.

        Returns None if no stop string is complete, so that the row continues.
        """
        for index, token in enumerate(tokens):
            piece = self._stream.push([token])
            self._pending = self._stream.pending()
            if end := self._end_in(piece + self._pending):
                whole = piece + self._pending
                self._pieces.append(whole[:end])
                self._pending, self.beyond = "", len(whole) - end
                return index + 1
            self._pieces.append(piece)
            self._before = self._tail(self._before + piece)
        return None

    @property
    def text(self) -> str:
        """Text of the tokens so far. Ends with the stop string if one was found."""
        return "".join(self._pieces) + self._pending

    def _end_in(self, new: str) -> int:
        """Returns the number of characters of `new` up to the end of the first complete stop string.

        Returns 0 if there is none.
        """
        return first_end(self._before, new, self._stop_strings)

    def _tail(self, text: str) -> str:
        return text[len(text) - min(self._reach, len(text)) :]


class StoppedWriter(StreamWriter):
    """StreamWriter that writes nothing after the stop string that ends the row. The stop string itself is written.

    The text ends where that of `GenerateOutput.texts` ends. Special tokens are not written, but stop strings are
    searched in the text with special tokens.

    Args:
        tokenizer, write: see `StreamWriter`.
        stop_strings: stop strings of the call. Empty: all text is written.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object], stop_strings: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, self._hold)
        self._out, self._stop_strings = write, tuple(stop_strings)
        self._watch: StopWatch | None = None
        self._begun, self._held, self._cut = False, "", 0

    def put(self, value: Tensor) -> None:
        """Receives the prompt's token ids at the first call, then new ids, and writes the text of the new ids.

        Writes nothing after the end of the row.
        """
        ids = value.reshape(-1).tolist()
        if not self._begun:
            super().put(value)
            self._watch = StopWatch(self._tokenizer, self._stop_strings, ids) if self._stop_strings else None
            self._begun = True
            return
        if self._watch is not None and self._watch.beyond is not None:
            return
        end = None if self._watch is None else self._watch(ids)
        super().put(value[:end])
        if end is None:
            self._flush(len(self._held))
        # no text is written for a special token, so there is nothing to cut off
        elif self._tokenizer.decode(ids[end - 1 : end], skip_special_tokens=True):
            self._cut = (self._watch and self._watch.beyond) or 0

    def end(self) -> None:
        """Ends the answer: writes the text that was held back. The next `put` gives the prompt of a new answer."""
        super().end()
        self._flush(len(self._held) - self._cut)
        self._watch, self._begun, self._held, self._cut = None, False, "", 0

    def _hold(self, piece: str) -> None:
        self._held += piece

    def _flush(self, size: int) -> None:
        if size > 0:
            self._out(self._held[:size])
        self._held = self._held[max(size, 0) :]
