"""Decodes token ids without transformers' wrapper. The wrapper takes more time than the decoding itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Decoder: TypeAlias = Callable[[list[int], bool], str]


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Decoder:
    """Returns a function of token ids and `skip_special_tokens` that decodes ids like the tokenizer's `decode`.

    It does not "clean up" spaces. If the tokenizer's class has its own `decode`, the function calls that method.
    """
    kind = type(tokenizer)
    same = kind.decode is PreTrainedTokenizerBase.decode
    if same and isinstance(tokenizer, PreTrainedTokenizerFast) and kind._decode is PreTrainedTokenizerFast._decode:
        backend = tokenizer.backend_tokenizer

        def decoded(ids: list[int], skip_special_tokens: bool) -> str:
            return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))

        return decoded

    def wrapped(ids: list[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    return wrapped
