"""Texts under schemas of the wild are valid: any allowed token may come, and the text ends where it is whole."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from fastspec.grammar.library import Grammars
from fastspec.grammar.spec import GrammarSpec
from tests.helpers.schemas import MAKERS
from tests.helpers.tokenizers import byte_tokenizer

END = 258
EACH = 70  # three makers: more than 200 schemas
LONGEST = 120  # tokens of a text before it is led to its end


def allowed_of(mask: Any) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def text_under(schema: dict[str, Any], chance: random.Random) -> str:
    """A random text that the schema's masks allow, of printable letters where there is a choice."""
    tokenizer = byte_tokenizer()
    quote, letter, *closers = (tokenizer.convert_tokens_to_ids(each) for each in '"x}],"@:0')
    printable = {tokenizer.convert_tokens_to_ids(chr(code)) for code in range(33, 127) if chr(code) != "\\"}
    row = Grammars(END + 1).row(GrammarSpec("json_schema", json.dumps(schema)), tokenizer, [], (END,))
    ids: list[int] = []
    while True:
        step = row.next_step(chance.choice((0, 4)))
        allowed = allowed_of(step.masks[0])
        assert allowed, tokenizer.decode(ids)
        if END in allowed:
            return str(tokenizer.decode(ids))
        easy = [token for token in allowed if token in printable] or allowed
        in_text = quote in allowed and letter in allowed
        ending = [token for token in ([quote] if in_text else closers) if token in easy]
        token = ending[0] if ending and len(ids) > LONGEST else chance.choice(ending * 8 + easy)
        row.advance([token])
        ids.append(token)
        assert len(ids) < 10 * LONGEST, tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("maker", MAKERS)
def test_texts_are_valid_to_the_end(maker: str, seed: int) -> None:
    chance = random.Random(f"{maker} {seed}")
    schema = MAKERS[maker](chance)
    text = text_under(schema, chance)
    jsonschema.validate(json.loads(text), schema)
