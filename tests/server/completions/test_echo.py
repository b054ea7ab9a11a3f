"""Completions with `echo`, `prompt_logprobs` and `max_tokens` 0: scores of `generate` before those of the answer."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator
from tests.server.test_openai_client import PROMPT, generated

NEW = 12


def complete(client: Any, **more: Any) -> Any:
    return client.completions.create(**{"model": "small", "prompt": PROMPT, "max_tokens": NEW, **more})


def test_a_prompt_and_its_scores_come_before_the_answer(client: Any, gen: FastSpecGenerator) -> None:
    (text,), output = generated(gen, PROMPT, max_new_tokens=NEW, logprobs=2, prompt_logprobs=2)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    whole = complete(client, echo=True, logprobs=2)
    (choice,) = whole.choices
    assert choice.text == PROMPT + text
    assert choice.logprobs.token_logprobs == [None, *output.prompt_logprobs[0], *output.logprobs[0]]
    assert choice.logprobs.top_logprobs[0] is None
    assert all(len(tops) in (2, 3) for tops in choice.logprobs.top_logprobs[1:])
    for token, value, tops in zip(
        choice.logprobs.tokens[1:], choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert value in tops.values()
        assert token in tops or any(name.startswith("token_id:") for name in tops)
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    pieces = [choice.text[start:stop] for start, stop in zip(offsets, [*offsets[1:], None], strict=True)]
    assert "".join(pieces) == choice.text
    assert pieces[:3] == ["the", " ", "he"]
    assert whole.usage.prompt_tokens == len(output.prompt_logprobs[0]) + 1
    assert whole.usage.completion_tokens == NEW


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(stream: bool, client: Any, gen: FastSpecGenerator) -> None:
    _, output = generated(gen, PROMPT, max_new_tokens=1, prompt_logprobs=1)
    assert output.prompt_logprobs is not None
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if not stream:
        whole = complete(client, **asked)
        (choice,) = whole.choices
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        assert choice.logprobs.token_logprobs == [None, *output.prompt_logprobs[0]]
        assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (0, whole.usage.prompt_tokens)
        return
    chunks = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == PROMPT
    assert chunks[-1].usage.completion_tokens == 0
    assert chunks[-2].choices[0].finish_reason == "length"


def test_streams_give_what_whole_answers_give(client: Any) -> None:
    asked: dict[str, Any] = {
        "echo": True,
        "logprobs": 1,
        "prompt": [PROMPT, "list"],
        "n": 2,
        "seed": 3,
        "temperature": 1,
    }
    whole = complete(client, **asked)
    texts: dict[int, str] = {}
    values: dict[int, list[Any]] = {}
    for chunk in complete(client, **asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else [])
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert values == {choice.index: choice.logprobs.token_logprobs for choice in whole.choices}
    assert [choice.text.startswith(PROMPT) for choice in whole.choices] == [True, True, False, False]


def test_ids_are_echoed_as_text(client: Any, gen: FastSpecGenerator) -> None:
    tokenizer: Any = gen.tokenizer
    ids = tokenizer(PROMPT)["input_ids"]
    asked: dict[str, Any] = {"echo": True, "logprobs": 0}
    assert complete(client, prompt=ids, **asked).choices == complete(client, **asked).choices
    plain = complete(client, echo=True).choices[0]
    assert plain.text.startswith(PROMPT)
    assert plain.logprobs is None


def test_scores_of_prompts_by_id(client: Any, gen: FastSpecGenerator) -> None:
    tokenizer: Any = gen.tokenizer
    ids = tokenizer(PROMPT)["input_ids"]
    _, output = generated(gen, PROMPT, max_new_tokens=NEW, prompt_logprobs=2)
    assert output.prompt_logprobs is not None
    assert output.prompt_top_logprobs is not None
    choice = complete(client, extra_body={"prompt_logprobs": 2}).choices[0].model_dump()
    assert not choice["text"].startswith(PROMPT)
    places = choice["prompt_logprobs"]
    assert places[0] is None
    for token, value, tops, place in zip(
        ids[1:], output.prompt_logprobs[0], output.prompt_top_logprobs[0], places[1:], strict=True
    ):
        assert place[str(token)]["logprob"] == value
        assert [place[str(one)]["rank"] for one, _ in tops] == [1, 2]
        assert {int(one): each["logprob"] for one, each in place.items()} == {token: value, **dict(tops)}
        assert all(
            each["decoded_token"] == tokenizer.decode([int(one)]) for one, each in place.items() if int(one) < 128
        )


def test_scores_of_messages_stand_beside_the_choices(client: Any, gen: FastSpecGenerator) -> None:
    messages: Any = [{"role": "user", "content": "def f(x):"}]
    ids = gen.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    output: Any = gen.generate([ids], max_new_tokens=1, prompt_logprobs=1, return_dict_in_generate=True)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).model_dump()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    found = [place[str(token)]["logprob"] for token, place in zip(ids[1:], others, strict=True)]
    assert found == output.prompt_logprobs[0]


def test_scores_of_prompts_are_not_streamed(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs come with whole answers"):
        complete(client, stream=True, extra_body={"prompt_logprobs": 1})


def test_no_answer_and_no_prompt_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens=0 asks for no answer"):
        complete(client, max_tokens=0)
