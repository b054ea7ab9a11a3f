"""Stop strings: ends of rows that show in the text, found on the host after each step.

Where a row ends is a matter of its tokens alone, not of how steps fell: behind the first token with which the text of
the row holds a stop string, as in transformers' `StopStringCriteria`. The string may begin in the prompt but must end
behind it. The ids then end with that whole token; the text ends with the stop string, without what the token holds
beyond it. Text is what the tokenizer's `decode` makes of all ids, special tokens written out.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from fastspec.text.text_stream import TextStream


def first_end(before: str, new: str, stop_strings: Sequence[str]) -> int:
    """Characters of `new` up to the end of the stop string that ends first in it; 0 where there is none.

    It may begin in `before`.
    """
    text, known = before + new, len(before)
    starts = [(text.find(string, max(0, known - len(string) + 1)), len(string)) for string in stop_strings]
    return min((at + length - known for at, length in starts if at >= 0), default=0)


class StopWatch:
    """Looks for stop strings in the text of one row while its tokens come.

    Args:
        tokenizer: the target's.
        stop_strings: non-empty texts, at least one.
        prompt: token ids before the row's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._stop_strings = stop_strings
        self._stream = TextStream(tokenizer, prompt, skip_special_tokens=False)
        self._reach = max(map(len, stop_strings)) - 1
        # text that a match may begin in but not end in
        self._before = self._tail(str(tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False)))
        self._pieces: list[str] = []
        self._pending = ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """How many of these next tokens there are up to the end of the row; None when it goes on."""
        for index, token in enumerate(tokens):
            piece = self._stream.push([token])
            self._pending = self._stream.pending()
            if end := self._end_in(piece + self._pending):
                self._pieces.append((piece + self._pending)[:end])
                self._pending = ""
                return index + 1
            self._pieces.append(piece)
            self._before = self._tail(self._before + piece)
        return None

    @property
    def text(self) -> str:
        """Of the tokens so far, ending with the stop string if there was one."""
        return "".join(self._pieces) + self._pending

    def _end_in(self, new: str) -> int:
        """Characters of `new` up to the end of the stop string that ends first; 0 where there is none."""
        return first_end(self._before, new, self._stop_strings)

    def _tail(self, text: str) -> str:
        return text[len(text) - min(self._reach, len(text)) :]
