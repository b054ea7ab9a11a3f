"""Converts token ids to text while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from fastspec.text.decoding import decoder_of
from fastspec.text.token_bytes import BYTE_TOKEN, byte_letters

_REPLACEMENT = "\ufffd"
_REACH = 4  # number of last tokens that are decoded again while a character is incomplete


def bytes_of(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes | None:
    """Returns the bytes of a token that is only a part of a character, so that a decoder cannot show it alone.

    Works for byte tokens such as `<0xE9>`, and for tokens of byte-level BPE (GPT-2; `ByteLevel` of `tokenizers`).
    Returns None for other tokenizers.
    """
    name = str(tokenizer.convert_ids_to_tokens(token))
    if found := BYTE_TOKEN.fullmatch(name):
        return bytes([int(found[1], 16)])
    letters = byte_letters()
    return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else None


class TextStream:
    """Converts token ids to pieces of text. A returned piece never changes.

    One call of the tokenizer's `decode` with `context + ids` gives the text of `context`, then the joined pieces.
    Special tokens are left out. Spaces are not "cleaned up", because that would change text already returned. A
    character of several tokens is held back until it is complete. `finish` returns an incomplete character as `decode`
    does, with U+FFFD.

    There is one difference, in a sequence of byte tokens (`<0xE9>`) with an invalid byte. `decode` writes U+FFFD for
    every byte of the sequence. This class keeps the complete characters, because they were already returned.

    Args:
        tokenizer: the model's tokenizer.
        context: ids before the text, usually the prompt. Some tokenizers write the leading space of a word only after
            other text.
        skip_special_tokens: see `decode` of transformers.

    Attributes:
        context: text of the context, without an incomplete character.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._decoded = tokenizer, decoder_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._bytes = _ByteTokens(self._decode, tokenizer)
        # `_window` has the tokens from which decoding may start; `_shown` is the text of its first tokens, which was
        # already returned. Both are shortened whenever a piece is returned, so that the cost per token does not grow.
        self._window = self._bytes.mended(context)
        self.context = self._shown = self._decode(self._window)
        self._fresh: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Receives new token ids. Returns the new text that later ids cannot change. It may be empty."""
        return "".join([self._push_one(token) for token in ids])

    def pending(self) -> str:
        """Returns the text that is held back, without ending the stream."""
        return self._unseen(self._decode([*self._window, *self._bytes.spoiled()]))

    def finish(self) -> str:
        """Returns the text that was held back. The stream is then empty, without a context."""
        rest = self.pending()
        self._window, self._shown, self._fresh = [], "", []
        self._bytes.forget()
        return rest

    def _push_one(self, token: int) -> str:
        value = self._bytes.value(token)
        if value is None and self._left_out(token):
            return ""  # `decode` leaves this token out, so it does not end a sequence of bytes
        ready = self._bytes.push(token, value)
        if not ready:
            return ""
        self._window += ready
        self._fresh += ready
        text = self._decode(self._window)
        piece = self._unseen(text)
        # a byte-level tokenizer decodes an incomplete character to one U+FFFD at the end
        held = value is None and text.endswith(_REPLACEMENT)
        piece = piece[:-1] if held else piece
        if not piece:
            return ""
        # the bytes of an incomplete character are in its last three tokens
        self._window = self._window[-_REACH:] if held else self._fresh
        self._fresh = list(self._window) if held else []
        shown = self._decode(self._window)
        self._shown = shown[:-1] if held else shown
        return piece

    def _left_out(self, token: int) -> bool:
        """True if the tokenizer's `decode` leaves the token out."""
        if self._decode([token]):
            return False
        name = self._tokenizer.convert_ids_to_tokens(token)
        return name is None or (self._skip_special_tokens and token in self._tokenizer.all_special_ids)

    def _unseen(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # a context that ends inside a character has another text after the character is complete
        pairs = zip(self._shown, text, strict=False)
        return text[next((at for at, (old, new) in enumerate(pairs) if old != new), len(text)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decoded(ids, self._skip_special_tokens)


class _ByteTokens:
    """Assembles characters from sequences of byte tokens, such as `<0xE9>`.

    A byte that belongs to no character becomes U+FFFD. So the decoder gets only valid text, and never changes text that
    was already returned.

    Args:
        decode: converts token ids to text.
        tokenizer: converts token ids to the names of tokens, and back.
    """

    def __init__(self, decode: Callable[[list[int]], str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._name_of: Callable[[int], object] = tokenizer.convert_ids_to_tokens
        self._decode, self._ids_of = decode, tokenizer.convert_tokens_to_ids
        self._held: list[tuple[int, int]] = []  # (id, byte) of an incomplete character

    @cached_property
    def _replacement(self) -> list[int]:
        """Returns the ids of the byte tokens of U+FFFD.

        Returns an empty list if the tokenizer's decoder does not assemble characters from byte tokens.
        """
        found = [self._ids_of(f"<0x{byte:02X}>") for byte in _REPLACEMENT.encode()]
        ids = [token for token in found if isinstance(token, int)]
        return ids if len(ids) == len(found) and self._decode(ids) == _REPLACEMENT else []

    def value(self, token: int) -> int | None:
        """Returns the byte that a byte token stands for. Returns None for other tokens."""
        found = BYTE_TOKEN.fullmatch(str(self._name_of(token)))
        return int(found[1], 16) if found and self._replacement else None

    def push(self, token: int, value: int | None) -> list[int]:
        """Receives the next token id. Returns the ids that can be decoded now. An incomplete character is held back.

        `value`: result of the method `value` for the token.
        """
        if value is None:
            ready = [*self.spoiled(), token]
            self.forget()
            return ready
        self._held.append((token, value))
        ready = []
        while self._held:
            length = _character(bytes(byte for _, byte in self._held))
            if length is None:
                break
            ready += [one for one, _ in self._held[:length]] if length else self._replacement
            del self._held[: length or 1]
        return ready

    def spoiled(self) -> list[int]:
        """Returns the ids of one U+FFFD for each byte that is held back."""
        return self._replacement * len(self._held)

    def forget(self) -> None:
        """Drops the bytes that are held back."""
        self._held = []

    def mended(self, ids: Sequence[int]) -> list[int]:
        """Returns `ids` without an incomplete character at their end. Its byte tokens are held back.

        In byte tokens at the end of `ids`, a byte that belongs to no character becomes U+FFFD.
        """
        start = len(ids)
        while start and self.value(ids[start - 1]) is not None:
            start -= 1
        return [*ids[:start], *(one for token in ids[start:] for one in self.push(token, self.value(token)))]


def _character(data: bytes) -> int | None:
    """Returns the number of bytes of the first character of `data`.

    Returns 0 if no character begins with these bytes. Returns None if the character is incomplete.
    """
    try:
        return len(data.decode()[0].encode())
    except UnicodeDecodeError as error:
        if error.start:
            return len(data[: error.start].decode()[0].encode())
        return None if error.reason == "unexpected end of data" else 0


class StreamWriter(BaseStreamer):
    """Streamer for `generate` that writes the text of new tokens, without the prompt.

    Args:
        tokenizer: the target's tokenizer.
        write: called with each piece of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._stream: TextStream | None = None

    def put(self, value: Tensor) -> None:
        """Receives the prompt's token ids ([1, T] or [T]) at the first call, then the ids of new tokens ([n]).

        Raises:
            ValueError: the prompt has several rows, whose texts would mix.
        """
        if value.dim() > 1 and value.shape[0] != 1:
            raise ValueError(f"a StreamWriter writes the text of one prompt, got {value.shape[0]} rows of ids")
        ids = value.reshape(-1).tolist()
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, context=ids)
        elif piece := self._stream.push(ids):
            self._write(piece)

    def end(self) -> None:
        """Writes the text that was held back. The next `put` receives a new prompt."""
        if self._stream is not None and (rest := self._stream.finish()):
            self._write(rest)
        self._stream = None
