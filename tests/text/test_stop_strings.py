"""Stop strings against an oracle that decodes everything anew after every token, and against transformers' own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from fastspec.text.stop_strings import StoppedWriter, StopWatch
from tests.helpers.tokenizers import byte_tokenizer, mended, word_tokenizer


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(mended(tokenizer, ids, skip=False), clean_up_tokenization_spaces=False))


def oracle(
    tokenizer: PreTrainedTokenizerBase, strings: list[str], prompt: list[int], new: list[int]
) -> tuple[int | None, str]:
    """(tokens up to the end or None, text): the first n whose whole text holds a stop string that ends in it."""
    known = len(decoded(tokenizer, prompt))
    text = ""
    for count in range(1, len(new) + 1):
        whole = decoded(tokenizer, prompt + new[:count])
        text = whole[known:]
        ends = [
            at + len(string)
            for string in strings
            for at in range(len(whole))
            if whole.startswith(string, at) and at + len(string) > known
        ]
        if ends:
            return count, whole[known : min(ends)]
    return None, text


def watched(
    make: Callable[..., StopWatch],
    tokenizer: PreTrainedTokenizerBase,
    strings: list[str],
    prompt: list[int],
    new: list[int],
    rng: random.Random,
) -> tuple[int | None, str]:
    """The same by a StopWatch that gets the tokens in pieces, as steps make them."""
    watch, at = make(tokenizer, strings, prompt), 0
    while at < len(new):
        piece = new[at : at + rng.randint(1, 5)]
        if (end := watch(piece)) is not None:
            return at + end, watch.text
        at += len(piece)
    return None, watch.text


def case(seed: int, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[int], list[int], random.Random]:
    """(stop strings, prompt, new tokens) over few ids, so that strings come up; some cut out of the text itself."""
    rng = random.Random(seed)
    alphabet = tokenizer.encode("the end. a b ", add_special_tokens=False)
    alphabet += tokenizer.encode("é€", add_special_tokens=False)  # characters of several tokens
    alphabet += [tokenizer.eos_token_id]
    prompt = [rng.choice(alphabet) for _ in range(rng.randint(1, 8))]
    new = [rng.choice(alphabet) for _ in range(rng.randint(1, 40))]
    text = decoded(tokenizer, prompt + new)
    strings = []
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        cut = text[at : at + rng.randint(1, 6)]
        strings.append(
            cut if cut and "\ufffd" not in cut and rng.random() < 0.8 else rng.choice(["the", "zz", "é", "e"])
        )
    return strings, prompt, new, rng


def mismatches(make: Callable[..., StopWatch], tokenizer: PreTrainedTokenizerBase, cases: int) -> list[int]:
    wrong = []
    for seed in range(cases):
        strings, prompt, new, rng = case(seed, tokenizer)
        if "\ufffd" in decoded(tokenizer, prompt) or tokenizer.convert_ids_to_tokens(prompt[-1]).startswith("<0x"):
            continue  # a prompt that ends inside a character or a run of bytes: its own text changes with what follows
        if watched(make, tokenizer, strings, prompt, new, rng) != oracle(tokenizer, strings, prompt, new):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_ends_and_texts_are_those_of_decoding_everything_anew(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    assert mismatches(StopWatch, make(), 400) == []


class ForgetsThePast(StopWatch):
    """Sees no string that began in an earlier token."""

    def _tail(self, text: str) -> str:
        return ""


class LooksAtWholeStepsOnly(StopWatch):
    """Cuts behind the step's last token."""

    def __call__(self, tokens: list[int]) -> int | None:  # type: ignore[override]
        return None if super().__call__(tokens) is None else len(tokens)


@pytest.mark.parametrize("invalid", [ForgetsThePast, LooksAtWholeStepsOnly])
def test_the_oracle_finds_planted_bugs(invalid: Callable[..., StopWatch]) -> None:
    assert len(mismatches(invalid, byte_tokenizer(), 60)) > 3


def test_the_ends_are_those_of_transformers() -> None:
    """Its criterion looks at the last token alone, so it is asked after every one."""
    tokenizer = byte_tokenizer()
    compared = 0
    for seed in range(60):
        strings, prompt, new, rng = case(seed, tokenizer)
        new = [token for token in new if token != tokenizer.eos_token_id]
        prompt = [token for token in prompt if token != tokenizer.eos_token_id] or [5]
        criterion = StopStringCriteria(tokenizer, strings)
        wanted = next((n for n in range(1, len(new) + 1) if criterion(torch.tensor([prompt + new[:n]]), None)[0]), None)
        got, _ = watched(StopWatch, tokenizer, strings, prompt, new, rng)
        assert got == wanted, (seed, strings)
        compared += wanted is not None
    assert compared > 20


def test_a_string_across_tokens_of_one_step() -> None:
    """ "the" is one token, "he" another: the row ends with the whole token, the text with the string."""
    tokenizer = byte_tokenizer()
    ids = {char: tokenizer.convert_tokens_to_ids(char) for char in "xt"}
    watch = StopWatch(tokenizer, ["xth"], [ids["x"]])
    assert watch([ids["t"], ids["x"], 257, ids["t"]]) == 3
    assert watch.text == "txth"


def test_a_string_that_ended_in_the_prompt_is_no_end() -> None:
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("stop", add_special_tokens=False)
    watch = StopWatch(tokenizer, ["stop", "top!"], prompt)
    assert watch(tokenizer.encode("x", add_special_tokens=False)) is None
    begun = StopWatch(tokenizer, ["stop", "top!"], prompt)
    assert begun(tokenizer.encode("!", add_special_tokens=False)) == 1
    assert begun.text == "!"
    behind = StopWatch(tokenizer, ["stop", "top!"], prompt, across_prompt=False)
    assert behind(tokenizer.encode("!top!", add_special_tokens=False)) == 5


def test_special_tokens_have_a_text() -> None:
    tokenizer = byte_tokenizer()
    watch = StopWatch(tokenizer, ["<eos>"], [1])
    assert watch([2, tokenizer.eos_token_id, 3]) == 2
    assert watch.text.endswith("<eos>")


@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_what_is_written_is_the_rows_text_without_special_tokens(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer, ended = make(), 0
    units = [tokenizer.encode(text, add_special_tokens=False) for text in ("the", "s", ".", "a", "é", "€")]
    units.append([tokenizer.eos_token_id])
    for seed in range(400):
        rng = random.Random(seed)
        prompt = [*tokenizer.encode("s", add_special_tokens=False)]
        new = [token for _ in range(20) for token in rng.choice(units)]  # characters are whole
        strings = ["".join(rng.choice(["th", "e", "s", ".", "a", "é", "<e"]) for _ in range(2)) for _ in range(2)]
        count, text = oracle(tokenizer, strings, prompt, new)
        written: list[str] = []
        writer, at = StoppedWriter(tokenizer, written.append, strings), 0
        writer.put(torch.tensor([prompt]))
        while at < len(new[:count]):
            size = min(rng.randint(1, 5), len(new[:count]) - at)  # a row's tokens end with its end
            writer.put(torch.tensor(new[at : at + size]))
            at += size
        writer.end()
        assert "".join(written) == re.sub("<eos>|<(eo?)?$", "", text), (seed, strings)
        ended += count is not None
    assert ended > 100
