"""Streaming text: pieces that are final, joined they are what one decode gives; and terminal-safe text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fastspec.text import StreamWriter, TextStream, escape_control
from fastspec.text.stop_strings import StopWatch
from tests.helpers.tokenizers import byte_tokenizer, mended, word_tokenizer

TOKENIZERS = {"bytes": byte_tokenizer(), "words": word_tokenizer()}
EMOJI = "👩\u200d💻"  # two characters of four bytes with a joiner between them


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    whole = mended(tokenizer, ids)
    return str(tokenizer.decode(whole, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids: whole characters, halves of them, words and the end token mixed."""
    tokenizer = TOKENIZERS[name]
    anything = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    characters = st.sampled_from(["a", "é", "€", "👩", EMOJI, " word", "the", "\ufffd", "\n"])
    return st.lists(anything | characters.map(lambda text: encode(tokenizer, text)), max_size=12).map(
        lambda parts: [token for part in parts for token in part]
    )


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_one_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    stream = TextStream(tokenizer)
    pieces = [stream.push(chunk) for chunk in chunked(ids, data.draw(st.lists(st.integers(0, 99), max_size=6)))]
    assert "".join([*pieces, stream.finish()]) == decode(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_continue_the_context(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    context = encode(tokenizer, data.draw(st.sampled_from(["", "a", "the word", "€ ", "a👩"])))
    ids = data.draw(ids_of(name))
    stream = TextStream(tokenizer, context)
    pieces = [stream.push(ids), stream.finish()]
    whole = decode(tokenizer, context + ids)
    if whole.startswith(decode(tokenizer, context)):
        assert decode(tokenizer, context) + "".join(pieces) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_are_never_split(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = f"s{EMOJI}.é€s"
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in encode(tokenizer, text)]
    assert "\ufffd" not in "".join(pieces)
    assert sum(bool(piece) for piece in pieces) > 1
    assert "".join([*pieces, stream.finish()]) == decode(tokenizer, encode(tokenizer, text))


def test_bytes_of_an_emoji_arrive_as_one_character() -> None:
    stream = TextStream(TOKENIZERS["bytes"])
    ids = encode(TOKENIZERS["bytes"], "x👩y")
    assert len(ids) == 6
    assert [stream.push([token]) for token in ids] == ["x", "", "", "", "👩", "y"]
    assert stream.finish() == ""


def test_several_tokens_at_once_give_what_is_whole() -> None:
    stream = TextStream(TOKENIZERS["bytes"])
    ids = encode(TOKENIZERS["bytes"], "the é👩")
    assert stream.push(ids[:-1]) == "the é"
    assert stream.push(ids[-1:]) == "👩"


def test_an_incomplete_tail_is_flushed_as_decode_writes_it() -> None:
    stream = TextStream(TOKENIZERS["bytes"])
    ids = encode(TOKENIZERS["bytes"], "x👩")[:-1]
    assert stream.push(ids) == "x"
    assert stream.finish() == "\ufffd"
    assert stream.push(encode(TOKENIZERS["bytes"], "the")) == "the"


def test_a_bad_byte_does_not_take_back_what_was_shown() -> None:
    """transformers' `decode` would: it spoils the whole run of bytes."""
    tokenizer = TOKENIZERS["words"]
    ids = [*encode(tokenizer, "👩"), tokenizer.convert_tokens_to_ids("<0xFF>"), tokenizer.convert_tokens_to_ids("s")]
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["", "", "", "👩", "\ufffd", "s"]
    assert tokenizer.decode(ids) == "\ufffd" * 5 + "s"


SCRIPT = "\u12a0\u121b\u122d\u129b" * 80  # 320 letters that the vocabulary lacks, three bytes each


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.decoded = self.longest = 0

    def decode(self, ids: list[int], **options: object) -> str:
        self.decoded, self.longest = self.decoded + len(ids), max(self.longest, len(ids))
        return str(self._tokenizer.decode(ids, **options))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_script_in_bytes_comes_letter_by_letter_at_the_cost_of_its_length(name: str) -> None:
    tokenizer = Counting(TOKENIZERS[name])
    ids = encode(TOKENIZERS[name], SCRIPT)
    assert len(ids) == 960
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    pieces = [stream.push([token]) for token in ids]
    assert pieces == [letter for whole in SCRIPT for letter in ("", "", whole)]
    watch = StopWatch(tokenizer, ["zz"], [1])  # type: ignore[arg-type]
    assert [watch([token]) for token in ids] == [None] * len(ids)
    assert watch.text == SCRIPT
    assert tokenizer.decoded < 40 * len(ids)


@pytest.mark.parametrize("bad", ["<0xFF>", "<0xE2>", "<0x80>", "\ufffd"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_that_are_no_text_cost_their_length_too(name: str, bad: str) -> None:
    """Also U+FFFD itself, which a tokenizer of bytes cannot tell from a character that is not whole."""
    tokenizer = Counting(TOKENIZERS[name])
    if bad == "\ufffd":
        ids = encode(TOKENIZERS[name], bad) * 100
    elif name == "words":
        ids = [TOKENIZERS[name].convert_tokens_to_ids(bad)] * 300
    else:
        ids = [pre_tokenizer_id(int(bad[3:5], 16))] * 300
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    pieces = [stream.push([token]) for token in ids]
    assert len("".join(pieces)) >= len(ids) // 3 - 1
    assert "".join([*pieces, stream.finish()]) == decode(TOKENIZERS[name], ids)
    assert tokenizer.decoded < 40 * len(ids)


def pre_tokenizer_id(byte: int) -> int:
    """The token of one byte in the tokenizer of bytes."""
    tokenizer = TOKENIZERS["bytes"]
    return next(token for token in range(256) if char_of(tokenizer.convert_ids_to_tokens(token)) == byte)


def char_of(char: str) -> int:
    """The byte that GPT-2 writes as `char`."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return ord(char) if ord(char) in kept else rest[ord(char) - 256]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_that_ends_inside_a_character_of_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, "s€👩s")
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        text = stream.push(ids[cut:]) + stream.finish()
        assert (stream.context.rstrip("\ufffd") + text) in ("s€👩s", " s€👩s"), cut


def no_decoder() -> PreTrainedTokenizerFast:
    """Its tokens are written with spaces between them, those that look like bytes too."""
    vocab = {word: index for index, word in enumerate(["<unk>", "a", "b", "<0xC3>", "<0xA9>", "\ufffd"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>")), unk_token="<unk>"
    )


def metaspace() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<unk>", "\u2581", "\u2581a", "\u2581word", "s", ".", "\u00e9"])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


@pytest.mark.parametrize("make", [no_decoder, metaspace])
def test_streams_of_other_tokenizers(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer, rng = make(), random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 12))]
        cut = rng.randrange(len(ids))
        stream = TextStream(tokenizer, ids[:cut])
        before = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if whole.startswith(before):
            assert before + "".join(stream.push([token]) for token in ids[cut:]) + stream.finish() == whole, ids


def test_a_word_after_the_context_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["words"]
    a, word = tokenizer.convert_tokens_to_ids(["▁a", "▁word"])
    assert TextStream(tokenizer, [a]).push([word]) == " word"
    assert TextStream(tokenizer).push([word]) == "word"


def test_a_context_that_ends_inside_a_character() -> None:
    ids = encode(TOKENIZERS["bytes"], "a👩b")
    assert TextStream(TOKENIZERS["bytes"], ids[:3]).push(ids[3:]) == "👩b"


def test_special_tokens_are_left_out() -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer)
    ids = [*encode(tokenizer, "the"), tokenizer.eos_token_id, *encode(tokenizer, "he")]
    assert stream.push(ids) == "thehe"


def test_a_long_text_is_decoded_in_small_windows() -> None:
    counting = Counting(TOKENIZERS["bytes"])
    stream = TextStream(counting)  # type: ignore[arg-type]
    stream.push(encode(TOKENIZERS["bytes"], f"the {EMOJI}" * 50))
    assert counting.longest <= 8


def test_writer_shows_only_new_text() -> None:
    tokenizer = TOKENIZERS["bytes"]
    written: list[str] = []
    writer = StreamWriter(tokenizer, written.append)
    for _ in range(2):
        writer.put(torch.tensor([encode(tokenizer, "the ")]))
        for chunk in ("he", "👩"):
            writer.put(torch.tensor(encode(tokenizer, chunk)))
        writer.put(torch.tensor(encode(tokenizer, "é")[:1]))
        writer.end()
    assert written == ["he", "👩", "\ufffd"] * 2


def test_writer_refuses_a_batch() -> None:
    with pytest.raises(ValueError, match="one prompt, got 2 rows"):
        StreamWriter(TOKENIZERS["bytes"], print).put(torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 👩\u200d💻\n\tend", "plain é 👩\u200d💻\n\tend"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x07\x7f\x9b", "a\\x0db\\x07\\x7f\\x9b"),
        ("\u202eevil\u2069", "\\u202eevil\\u2069"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape_control(text) == shown
