"""Bytes of tokens: joined they are the bytes of the text, in every spelling."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from fastspec.text.token_bytes import special_tokens, token_bytes
from tests.helpers.tokenizers import byte_tokenizer, metaspace_tokenizer, word_tokenizer

CASES = {
    "letters": byte_tokenizer,
    "words": word_tokenizer,
    "metaspace": lambda: metaspace_tokenizer("bytes, metaspace"),
}
TEXTS = ["the word s. a word", "é{ 人 \n", "\t\u200b"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_tokens_joined_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = CASES[name]()
    found = token_bytes(tokenizer)
    ids = tokenizer.encode(text)
    joined = b"".join(found[token] for token in ids)
    assert joined.decode().strip(" ") == text.strip(" ")
    assert len(ids) > 1


def test_every_ordinary_token_has_bytes() -> None:
    for made in CASES.values():
        tokenizer = made()
        ids = set(tokenizer.get_vocab().values())
        assert set(token_bytes(tokenizer)) == ids - set(special_tokens(tokenizer).values())


def test_added_tokens_are_spelt_as_the_others() -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["▁▁"])
    assert token_bytes(tokenizer)[tokenizer.convert_tokens_to_ids("▁▁")] == b"  "


def test_a_tokenizer_that_does_not_say_how_is_refused() -> None:
    class Slow(PreTrainedTokenizerFast):
        backend_tokenizer = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="pass a fast tokenizer"):
        token_bytes(Slow.__new__(Slow))
