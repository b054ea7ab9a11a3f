"""Two small tokenizers: bytes as GPT-2 and Llama 3 write them, and words with byte fallback as Llama 2 does."""

from __future__ import annotations

import re
from itertools import groupby

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, two merges and an end token: 256 is "he", 257 is "the", 258 is <eos>."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("t", "he")]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def word_tokenizer(end: str = "<eos>") -> PreTrainedTokenizerFast:
    """Words whose spaces are part of them, the first of a text dropped; other characters in bytes. `end`: its eos."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁word", "s", ".", "é"]
    backend = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=end)


def metaspace_tokenizer(how: str) -> PreTrainedTokenizerFast:
    """Words that begin with a mark in place of a blank, and bytes.

    Args:
        how: the parts of its decoder, in order, such as "bytes, metaspace".
    """
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁word", "word", "▁{", "s", ".", "é"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = {"bytes": decoders.ByteFallback(), "metaspace": decoders.Metaspace(), "fuse": decoders.Fuse()}
    backend.decoder = decoders.Sequence([parts[part] for part in how.split(", ")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


def mended(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, skip: bool = True) -> list[int]:
    """Ids whose runs of byte tokens are text: every byte of no character has become a U+FFFD."""
    special = set(tokenizer.all_special_ids) if skip else set()
    made: list[int] = []
    names = [(token, tokenizer.convert_ids_to_tokens(token)) for token in ids if token not in special]
    for in_bytes, run in groupby(names, key=lambda pair: re.fullmatch("<0x..>", pair[1]) is not None):
        tokens = [token for token, _ in run]
        if in_bytes:
            data = bytes(int(tokenizer.convert_ids_to_tokens(token)[3:5], 16) for token in tokens)
            text = re.sub("[\ud800-\udfff]", "\ufffd", data.decode("utf-8", "surrogateescape"))
            tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
        made += tokens
    return made
