"""One row's place in its grammar: drafts that may come, and the masks along them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastspec.grammar.library import Grammars
from fastspec.grammar.row import RowGrammar, words_of
from fastspec.grammar.spec import GrammarSpec
from tests.helpers.tokenizers import byte_tokenizer, metaspace_tokenizer, word_tokenizer

END, VOCAB = 258, 270  # the target's logits are wider than the vocabulary
SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["the", "hehe"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
SPECS = [
    {"json_schema": SCHEMA},
    {"regex": "(the)+[a-c]{2,4}the"},
    {"grammar": 'start: "(" start? ")"'},
    {"grammar": 'start: <[257]> " "? "[" ("a" | "b" "c") "]"'},  # a token by its id
]


def row_of(given: dict[str, Any], stop_ids: tuple[int, ...] = (END,), prompt: str = "the") -> RowGrammar:
    spec = GrammarSpec.read(given)
    assert spec is not None
    tokenizer = byte_tokenizer()
    return Grammars(VOCAB).row(spec, tokenizer, tokenizer(prompt)["input_ids"], stop_ids)


def ids_of(mask: NDArray[np.int32]) -> list[int]:
    return [token for token in range(len(mask) * 32) if mask[token // 32] >> token % 32 & 1]


@pytest.mark.parametrize("stop_ids", [(END,), (), (END, 265)], ids=str)
@pytest.mark.parametrize("given", SPECS, ids=str)
def test_masks_along_drafts_are_those_of_the_text_alone(given: dict[str, Any], stop_ids: tuple[int, ...]) -> None:
    """Asking for drafts changes nothing; every draft may come; a place's mask is a plain step's there."""
    rng = random.Random(str(given))
    for _ in range(6):
        row, text = row_of(given, stop_ids), []
        for _ in range(40):
            step = row.next_step(rng.choice((0, 1, 3, 8)))
            assert step.masks.shape == (len(step.drafts) + 1, words_of(VOCAB))
            assert step.masks.dtype == np.int32
            for place, draft in enumerate(step.drafts):
                assert draft in ids_of(step.masks[place])
                fresh = row_of(given, stop_ids)
                fresh.advance([*text, *step.drafts[:place]])
                assert ids_of(fresh.next_step(0).masks[0]) == ids_of(step.masks[place])
            count = rng.randint(0, len(step.drafts))
            if any(draft in stop_ids for draft in step.drafts[:count]):
                break
            choices = ids_of(step.masks[count])
            assert choices
            assert max(choices) < VOCAB
            emitted = [*step.drafts[:count], rng.choice(choices)]
            end = row.advance(emitted)
            text += emitted[:end]
            if end is not None or text[-1] in stop_ids:
                break
        else:
            assert "regex" not in given


def test_what_must_come_is_drafted() -> None:
    row = row_of({"regex": "hello[xy]world"}, prompt="zz")
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(row.next_step(8).drafts) == "hello"
    assert tokenizer.decode(row.next_step(2).drafts) == tokenizer.decode(row.next_step(8).drafts[:2])
    assert row.advance(tokenizer("hellox")["input_ids"]) is None
    assert tokenizer.decode(row.next_step(16).drafts) == "world<eos>"
    assert ids_of(row.next_step(16).masks[5]) == [END]


def test_what_came_before_is_drafted_as_far_as_the_grammar_goes() -> None:
    row = row_of({"regex": "[a-z]+"}, prompt="abcde1")
    tokenizer = byte_tokenizer()
    row.advance(tokenizer("abc")["input_ids"])
    assert tokenizer.decode(row.next_step(8).drafts) == "de"


def test_stop_ids_come_where_the_text_is_whole_alone() -> None:
    row = row_of({"regex": "ab?"})
    a, b = (byte_tokenizer()(letter)["input_ids"][0] for letter in "ab")
    assert ids_of(row.next_step(0).masks[0]) == [a]
    row.advance([a])
    assert ids_of(row.next_step(0).masks[0]) == sorted([b, END])
    row.advance([b])
    assert ids_of(row.next_step(0).masks[0]) == [END]


def test_without_stop_ids_a_row_ends_with_its_text() -> None:
    row = row_of({"regex": "ab?"}, ())
    a, b = (byte_tokenizer()(letter)["input_ids"][0] for letter in "ab")
    assert row.advance([a]) is None
    assert ids_of(row.next_step(0).masks[0]) == [b]  # the text might end here, if something could say so
    whole = row_of({"regex": "ab"}, ()).next_step(8)
    assert whole.drafts == [a, b]
    assert len(ids_of(whole.masks[2])) == VOCAB, "what comes behind the text is cut off"
    assert row.advance([b, b, b]) == 1


def test_words_with_byte_fallback() -> None:
    tokenizer = word_tokenizer()
    row = Grammars(len(tokenizer)).row(GrammarSpec("regex", "é|\u00e8"), tokenizer, [], ())
    named = set(tokenizer.convert_ids_to_tokens(ids_of(row.next_step(0).masks[0])))
    assert named == {"é", "<0xC3>"}


TOKENIZERS = {
    "words": word_tokenizer,
    **{how: (lambda how=how: metaspace_tokenizer(how)) for how in ("bytes, metaspace", "metaspace, bytes, fuse")},
}
TEXTS = ["[^ ]{4}", "a word( a)*", "(word|words)(.| word){2}", ".{3}", "é+ words?", r"\{a: word\}"]


@pytest.mark.parametrize("regex", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_decoded_text_matches_whatever_stands_for_a_blank(name: str, regex: str) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(regex)
    size = len(tokenizer)
    grammars = Grammars(size + 1)
    for _ in range(30):
        row, ids = grammars.row(GrammarSpec("regex", regex), tokenizer, [], (size,)), []
        while True:
            step = row.next_step(rng.choice((0, 3)))
            allowed = ids_of(step.masks[0])
            assert all(draft in ids_of(step.masks[place]) for place, draft in enumerate(step.drafts))
            assert allowed, f"nothing may follow {tokenizer.decode(ids)!r}"
            # bytes that make no character are not what is tried here: their text is U+FFFD
            words = [token for token in allowed if token > 256 or token in map(ord, ":{}") or token == size]
            token = rng.choice([one for one in words if one != size] or allowed) if len(ids) < 9 else allowed[-1]
            if token == size or (size in allowed and rng.random() < 0.5):
                break
            row.advance([token])
            ids.append(token)
        assert re.fullmatch(regex, tokenizer.decode(ids)), ids


@pytest.mark.parametrize("stop", ["a", "the", '"', " "])
def test_a_stop_id_that_is_a_token_of_the_text_comes_at_its_end_alone(stop: str) -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(stop)
    stop_id = tokenizer.convert_tokens_to_ids("Ġ" if stop == " " else stop)
    schema = {"type": "array", "items": {"enum": ["the a", "he, a"]}, "minItems": 1, "maxItems": 3}
    if stop == '"':
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
    if stop in ("a", " "):
        schema["items"] = {"enum": ["the", "he,"]}
    for _ in range(20):
        row, ids = row_of({"json_schema": schema}, (END, stop_id), "no"), []
        while True:
            step = row.next_step(rng.choice((0, 4)))
            assert stop_id not in step.drafts[:-1]
            token = rng.choice(ids_of(step.masks[0]))
            if token in (END, stop_id):
                break
            row.advance([token])
            ids.append(token)
        assert 1 <= len(json.loads(tokenizer.decode(ids))) <= 3
