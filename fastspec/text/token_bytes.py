"""Bytes of the text of each token, for tokenizers with byte-level BPE and SentencePiece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_letters() -> dict[str, int]:
    """Maps each letter in the token names of byte-level BPE to its byte (GPT-2; `ByteLevel` of `tokenizers`).

    The letter of a printable byte is its own character. The other bytes have the letters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Maps the id of each token to the bytes that it adds after other text. Special tokens are left out.

    The bytes include the blank before a word: `Ġword` of byte-level BPE and `▁word` of SentencePiece are both b" word".
    If the decoder is of neither kind, the bytes are the name of the token in UTF-8.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        ValueError: the tokenizer is a slow one, whose decoder is not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} does not say how it spells bytes; pass a fast tokenizer")
    spelt = _speller(json.loads(backend.to_str())["decoder"])
    added = tokenizer.added_tokens_decoder
    found = {token: spelt(name) for name, token in tokenizer.get_vocab().items() if token not in added}
    return found | {token: spelt(each.content) for token, each in added.items() if not each.special}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Maps the text of each special token to its id."""
    return {each.content: token for token, each in tokenizer.added_tokens_decoder.items() if each.special}


def _speller(decoder: object) -> Callable[[str], bytes]:
    """Returns the function that maps a token's name to its bytes. `decoder`: this entry of the tokenizer's JSON."""
    parts = list(_parts(decoder))
    kinds = {part["type"] for part in parts}
    letters = byte_letters()
    marks = [part["replacement"] for part in parts if part["type"] == "Metaspace"]
    marks += [part["pattern"]["String"] for part in parts if _writes_blanks(part)]

    def of_letters(name: str) -> bytes:
        known = all(letter in letters for letter in name)
        return bytes(letters[letter] for letter in name) if known else name.encode()

    def of_words(name: str) -> bytes:
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for mark in marks:
            name = name.replace(mark, " ")
        return name.encode()

    return of_letters if "ByteLevel" in kinds else of_words


def _parts(decoder: object) -> Iterator[Mapping[str, Any]]:
    """Yields the JSON object of each single decoder, also from nested sequences of decoders."""
    if not isinstance(decoder, Mapping):
        return
    if decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _parts(each)
    else:
        yield decoder


def _writes_blanks(part: Mapping[str, object]) -> bool:
    """True for a decoder that replaces a fixed text, such as `▁`, by a blank."""
    pattern = part.get("pattern")
    return part["type"] == "Replace" and part["content"] == " " and isinstance(pattern, Mapping) and "String" in pattern
