"""Decoding past transformers' wrapper gives its text; a class that decodes in its own way keeps it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastspec import demo_pair
from fastspec.text.decoding import decoder_of
from tests.helpers.tokenizers import byte_tokenizer

SHIPPED: Any = AutoTokenizer.from_pretrained(str(demo_pair()[0]))
BYTES: Any = byte_tokenizer()


class Loud(PreTrainedTokenizerFast):
    def _decode(self, *given: Any, **options: Any) -> str:
        return super()._decode(*given, **options).upper()


class Own(PreTrainedTokenizerFast):
    def decode(self, *given: Any, **options: Any) -> str:
        return "mine"


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=12), skip=st.booleans())
def test_the_text_is_that_of_decode(ids: list[int], skip: bool) -> None:
    for tokenizer in (SHIPPED, BYTES):
        with_special = [*ids, *tokenizer.all_special_ids[:1]]
        wanted = tokenizer.decode(with_special, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert decoder_of(tokenizer)(with_special, skip) == wanted


def test_a_class_keeps_its_own_decode() -> None:
    tokenizer = Loud(tokenizer_object=SHIPPED.backend_tokenizer)
    ids = SHIPPED("def main")["input_ids"]
    assert decoder_of(tokenizer)(ids, True) == SHIPPED.decode(ids).upper()
    assert decoder_of(Own(tokenizer_object=SHIPPED.backend_tokenizer))(ids, True) == "mine"
