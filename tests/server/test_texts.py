"""Text without its stop string: the same whether tokens come one by one or all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fastspec.server.texts import Answer, Visible
from tests.helpers.services import opened
from tests.helpers.tokenizers import byte_tokenizer

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
