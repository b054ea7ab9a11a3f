"""Token ids to text while they arrive, and text that is safe to show on a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class TextStream:
    """Turns token ids into pieces of text, each of them final.

    The pieces joined are the text of `context + ids` after the text of `context`, as one call of the
    tokenizer's `decode` gives it: special tokens left out, and spaces never "cleaned up", which would take
    back text that is already shown. Where `context` is empty, that is `decode(ids)`. A character whose bytes
    are spread over tokens is held back until it is whole; `finish` gives what is left as `decode` does, with
    U+FFFD.

    Args:
        tokenizer: the model's.
        context: ids that come before, usually the prompt. Some tokenizers write a word's leading space only
            where something stands before it.
        skip_special_tokens: as in `decode`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # `_window` starts where decoding may start afresh; `_shown` is the text of its first tokens, which is
        # out already. Both are cut back whenever a piece leaves, so that a token's cost does not grow.
        self._window = list(context)
        self._shown = self._decode(self._window)
        self._fresh: list[int] = []
        self._in_bytes = False

    def push(self, ids: Iterable[int]) -> str:
        """Takes new ids and returns the text that is final now, possibly none."""
        return "".join([self._push_one(token) for token in ids])

    def pending(self) -> str:
        """What is held back so far, as `finish` would give it."""
        return self._unseen(self._decode(self._window))

    def finish(self) -> str:
        """Returns what was held back. The stream is then at its start again, without a context."""
        rest = self.pending()
        self._window, self._shown, self._fresh, self._in_bytes = [], "", [], False
        return rest

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        self._fresh.append(token)
        # a run of byte tokens is decoded as a whole: one bad byte spoils the good ones before it
        if _BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._in_bytes = True
        elif self._in_bytes and self._decode([token]):  # a token that is left out does not end the run
            self._in_bytes = False
        if self._in_bytes:
            return ""
        text = self._decode(self._window)
        piece = self._unseen(text)
        if not piece or text.endswith(_REPLACEMENT):
            return ""
        self._window, self._fresh = self._fresh, []
        self._shown = self._decode(self._window)
        return piece

    def _unseen(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # a context that ends inside a character reads otherwise once the character is whole
        pairs = zip(self._shown, text, strict=False)
        return text[next((at for at, (old, new) in enumerate(pairs) if old != new), len(text)) :]

    def _decode(self, ids: list[int]) -> str:
        skip = self._skip_special_tokens
        text = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return str(text)


class StreamWriter(BaseStreamer):
    """A streamer for `generate`: writes the text of the new tokens as they come, without the prompt's.

    Args:
        tokenizer: the target's.
        write: takes each piece of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._stream: TextStream | None = None

    def put(self, value: Tensor) -> None:
        """Takes the prompt's ids ([1, T] or [T]) the first time, then the ids of new tokens ([n]).

        Raises:
            ValueError: the prompt has several rows, whose texts would mix.
        """
        if value.dim() > 1 and value.shape[0] != 1:
            raise ValueError(f"a StreamWriter shows one prompt, got {value.shape[0]} rows of ids; give it one")
        ids = value.reshape(-1).tolist()
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, context=ids)
        elif piece := self._stream.push(ids):
            self._write(piece)

    def end(self) -> None:
        """Writes what was held back; the next `put` is a new prompt."""
        if self._stream is not None and (rest := self._stream.finish()):
            self._write(rest)
        self._stream = None


def escape_control(text: str) -> str:
    r"""Writes control characters as `\xNN` or `\uNNNN`, so that text cannot steer the terminal that shows it.

    Line feeds and tabs stay. The marks that reorder a whole line (bidirectional embeddings, overrides and
    isolates) count as control characters; the joiner inside an emoji does not.
    """
    return "".join(_escaped(char) if _steers(char) else char for char in text)


def _steers(char: str) -> bool:
    return (unicodedata.category(char) == "Cc" and char not in "\n\t") or char in _BIDI


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"
