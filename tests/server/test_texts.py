"""Text without its stop string: the same whether tokens come one by one or all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from fastspec.server.texts import Answer, Visible
from fastspec.text.text_stream import bytes_of
from fastspec.text.token_bytes import byte_letters
from tests.helpers.services import opened
from tests.helpers.tokenizers import byte_tokenizer, word_tokenizer

TEXT = "the héad of the hhhe ende end"


@pytest.mark.parametrize("stops", [[], ["end"], ["hhe"], ["hhhx", "of"], ["é"], ["the"], ["nothing", "d "]], ids=str)
def test_pieces_are_the_whole(stops: list[str]) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    cut = min((TEXT.index(stop) for stop in stops if stop in TEXT), default=len(TEXT))
    for size in (1, 2, 3, len(ids)):
        visible = Visible(tokenizer, [40], stops)
        pieces = [visible.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        pieces.append(visible.finish())
        assert "".join(pieces) == TEXT[:cut]
        assert all(not piece or stops for piece in pieces[-1:])


def test_the_id_that_ends_an_answer_is_no_part_of_it(pair: tuple[Path, Path]) -> None:
    """Also where it is no special token, whose text is left out anyway."""
    tokenizer: Any = byte_tokenizer()
    with opened(pair) as gen:
        whole: Any = gen.generate([[104]], max_new_tokens=12, return_dict_in_generate=True)
        tokens = whole.new_tokens[0]
        last = next(token for token in tokens[4:] if token < 128 and token not in tokens[:4])
        answer = Answer(0, gen.submit([104], max_new_tokens=12, eos_token_id=last), tokenizer, [])

        async def text() -> str:
            return "".join([piece.text async for piece in answer.pieces()])

        assert asyncio.run(text()) == tokenizer.decode(tokens[: tokens.index(last)])
        assert answer.request.finish_reason == "stop"


@pytest.mark.parametrize("made", [byte_tokenizer, word_tokenizer])
def test_tokens_are_told_with_their_places_in_the_text(made: Any) -> None:
    """A character of several tokens counts once, and a word has its space, whatever a decoder does with one alone."""
    tokenizer, text = made(), "the wo€rd. a word"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if made is word_tokenizer:
        names = ["▁a", "<0xE2>", "<0x82>", "<0xAC>", "s", "▁word", "é", "▁a"]
        tokens, text = tokenizer.convert_tokens_to_ids(names), " a€s wordé a"
    request = SimpleNamespace(
        prompt=tokenizer.convert_tokens_to_ids(["."]), new_tokens=tokens, logprobs=[0.0] * len(tokens)
    )
    request.top_logprobs = [[] for _ in tokens]
    call = SimpleNamespace(requests=[request], options=SimpleNamespace(top_logprobs=0))
    for size in (1, 3, len(tokens)):
        answer = Answer(0, SimpleNamespace(call=call), tokenizer, [])  # type: ignore[arg-type]
        names, offsets = [], []
        for start in range(0, len(tokens), size):
            told = answer.text_logprobs(start, min(start + size, len(tokens)))
            assert told is not None
            names += told["tokens"]
            offsets += told["text_offset"]
        for name, at in zip(names, offsets, strict=True):
            assert name.startswith("bytes:") or text[at:].startswith(name), (name, at)
            assert name != "\ufffd" or text[at] == "€"


def test_special_tokens_are_text_where_they_are_asked_for(pair: tuple[Path, Path]) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CALL]"]})
    ids = tokenizer("a[CALL]b")["input_ids"]
    texts = []
    for skip in (True, False):
        visible = Visible(tokenizer, [40], [], skip_special_tokens=skip)
        texts.append("".join([visible.push([one]) for one in ids]) + visible.finish())
    assert texts == ["ab", "a[CALL]b"]


@pytest.mark.parametrize("made", [byte_tokenizer, word_tokenizer])
def test_log_probabilities_of_tokens_that_print_the_same_are_all_there(made: Any) -> None:
    """Parts of characters have the names of their bytes; of two tokens with one text the chosen one keeps it."""
    tokenizer = made()
    names = ["<0xE2>", "<0x82>", "<0xAC>"] if made is word_tokenizer else ["â", "Ĥ", "¬"]
    parts = tokenizer.convert_tokens_to_ids(names)
    twin = tokenizer.convert_tokens_to_ids("<0x73>" if made is word_tokenizer else "t")
    letter = tokenizer.convert_tokens_to_ids("s")
    request = SimpleNamespace(prompt=[40], new_tokens=[parts[0], letter], logprobs=[-3.0, -4.0])
    request.top_logprobs = [[(parts[1], -1.0), (parts[2], -2.0)], [(twin, -0.5), (letter, -4.0)]]
    call = SimpleNamespace(requests=[request], options=SimpleNamespace(top_logprobs=2))
    told: Any = Answer(0, SimpleNamespace(call=call), tokenizer, []).text_logprobs(0, 2)  # type: ignore[arg-type]
    assert told["tokens"] == ["bytes:\\xe2", "s"]
    assert told["top_logprobs"][0] == {"bytes:\\xe2": -3.0, "bytes:\\x82": -1.0, "bytes:\\xac": -2.0}
    assert told["top_logprobs"][1]["s"] == -4.0
    assert sorted(told["top_logprobs"][1].values()) == [-4.0, -0.5]


def test_bytes_are_those_of_the_tokenizers() -> None:
    assert set(byte_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = byte_tokenizer()
    for text in ("é", "漢字", " x", "\n"):
        assert b"".join(bytes_of(tokenizer, one) or b"" for one in tokenizer(text)["input_ids"]) == text.encode()
