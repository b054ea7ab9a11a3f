"""Fields of vLLM and the rarer ones of OpenAI: answers are those of `generate` with the option that the field means."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator
from tests.helpers.services import END
from tests.server.conftest import Running
from tests.server.test_openai_client import MESSAGES, PROMPT, TEMPLATED, generated
from tests.server.test_refusals import post, raw

ASKED: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 24}


def ids_of(gen: FastSpecGenerator, text: str) -> list[int]:
    tokenizer: Any = gen.tokenizer
    return list(tokenizer(text)["input_ids"])


def test_stop_ids_end_an_answer_besides_the_checkpoints(server: Running, gen: FastSpecGenerator) -> None:
    (text,), output = generated(gen, PROMPT, max_new_tokens=24)
    stop = output.new_tokens[0][7]
    at = output.new_tokens[0].index(stop)
    expected = gen.tokenizer.decode(output.new_tokens[0][:at])
    for more in ({}, {"ignore_eos": True}):
        (choice,) = post(server, {**ASKED, "stop_token_ids": [stop], **more})[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        assert text.startswith(expected)
    biased = {**ASKED, "logit_bias": {END: 100}, "stop_token_ids": [stop]}
    assert post(server, biased)[1]["usage"]["completion_tokens"] == 1, "the checkpoint's own stop id still ends it"
    assert post(server, {**biased, "ignore_eos": True})[1]["usage"]["completion_tokens"] == 24


def test_allowed_ids_are_all_that_come(server: Running, gen: FastSpecGenerator) -> None:
    allowed = ids_of(gen, "abc")
    (text,), _ = generated(gen, PROMPT, max_new_tokens=24, allowed_token_ids=allowed)
    assert post(server, {**ASKED, "allowed_token_ids": allowed})[1]["choices"][0]["text"] == text
    assert set(text) <= set("abc")


ODD = ["a b", "(x|y)*", "c:\\d\n", "[]{}^$.?+-#&~ \t"]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ({"json": {"enum": ["the", "hehe"]}}, {"json_schema": {"enum": ["the", "hehe"]}}),
        ({"json": '{"enum": [1, 22]}'}, {"json_schema": {"enum": [1, 22]}}),
        ({"regex": "(he)+!"}, {"regex": "(he)+!"}),
        ({"grammar": 'start: "a" "b"+'}, {"grammar": 'start: "a" "b"+'}),
        ({"json_object": True}, {"json_schema": {"type": "object"}}),
    ],
    ids=str,
)
def test_structured_outputs_are_the_grammars_of_generate(
    server: Running, gen: FastSpecGenerator, field: dict[str, Any], options: dict[str, Any]
) -> None:
    (text,), output = generated(gen, PROMPT, max_new_tokens=24, **options)
    (choice,) = post(server, {**ASKED, "structured_outputs": field})[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, output.finish_reasons[0])


@pytest.mark.parametrize("odd", ODD)
def test_a_choice_is_one_of_the_texts_letter_by_letter(server: Running, odd: str) -> None:
    for choices in ([odd], ODD):
        (choice,) = post(server, {**ASKED, "structured_outputs": {"choice": choices}})[1]["choices"]
        assert choice["text"] in choices
        assert choice["finish_reason"] == "stop"


def test_two_rules_for_one_answer_are_refused(server: Running) -> None:
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    for more, field in (
        (both, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
    ):
        status, answer = post(server, {**ASKED, **more})
        assert (status, answer["error"]["param"]) == (400, field)


def test_the_last_message_goes_on(client: openai.OpenAI, gen: FastSpecGenerator) -> None:
    begun = TEMPLATED.removesuffix("<assistant>") + "<assistant>so"
    (text,), _ = generated(gen, begun, max_new_tokens=12)
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "so"}]
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=12, extra_body=extra)
    assert answer.choices[0].message.content == text
    (text,), _ = generated(gen, TEMPLATED.removesuffix("<assistant>"), max_new_tokens=12)
    asked: Any = {"model": "small", "messages": MESSAGES, "max_tokens": 12}
    answer = client.chat.completions.create(**asked, extra_body={"add_generation_prompt": False})
    assert answer.choices[0].message.content == text


def events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = raw(server, {**body, "stream": True}).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_token_ids_are_told(server: Running, client: openai.OpenAI, gen: FastSpecGenerator) -> None:
    _, output = generated(gen, PROMPT, max_new_tokens=24)
    asked = {**ASKED, "prompt": [PROMPT, "x"], "return_token_ids": True}
    whole = post(server, asked)[1]["choices"]
    assert whole[0]["token_ids"] == output.new_tokens[0]
    assert [choice["prompt_token_ids"] for choice in whole] == [ids_of(gen, PROMPT), ids_of(gen, "x")]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for event in events(server, asked):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
            prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole}
    assert prompts == {0: [ids_of(gen, PROMPT)], 1: [ids_of(gen, "x")]}
    assert "token_ids" not in post(server, ASKED)[1]["choices"][0]

    _, output = generated(gen, TEMPLATED, max_new_tokens=12)
    chat: Any = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    answer: Any = client.chat.completions.create(**chat)
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (ids_of(gen, TEMPLATED), output.new_tokens[0])
    chunks: Any = list(client.chat.completions.create(**chat, stream=True))
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [
        ids_of(gen, TEMPLATED)
    ]
    told = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", [])]
    assert told == output.new_tokens[0]


def test_usage_comes_with_every_event_where_it_is_asked_for(server: Running) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    usages = [event["usage"]["completion_tokens"] for event in events(server, {**ASKED, "stream_options": both})]
    assert usages == sorted(usages)
    assert usages[-1] == 24
    alone = events(server, {**ASKED, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in event for event in alone), "as in vLLM, it needs include_usage"


def test_the_best_answers_are_those_with_the_most_probable_tokens(server: Running, gen: FastSpecGenerator) -> None:
    drawing: dict[str, Any] = {"do_sample": True, "seed": 7, "num_return_sequences": 6, "top_k": 0}
    texts, output = generated(gen, PROMPT, max_new_tokens=16, logprobs=True, **drawing)
    assert output.logprobs is not None
    means = [sum(values) / len(values) for values in output.logprobs]
    best = sorted(range(6), key=lambda row: -means[row])
    asked = {**ASKED, "max_tokens": 16, "temperature": 1, "seed": 7, "best_of": 6}
    for n in (1, 2, 6):
        answer = post(server, {**asked, "n": n})[1]
        assert [choice["text"] for choice in answer["choices"]] == [
            texts[row] for row in (best[:n] if n < 6 else range(6))
        ]
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        assert {choice["logprobs"] for choice in answer["choices"]} == {None}
        assert answer["usage"]["completion_tokens"] == sum(map(len, output.new_tokens))
    two = post(server, {**asked, "prompt": [PROMPT, "x"], "logprobs": 0})[1]["choices"]
    assert two[0]["text"] == texts[best[0]]
    assert len(two) == 2
    assert two[0]["logprobs"]["token_logprobs"] == output.logprobs[best[0]]
    for more in ({"stream": True}, {"n": 7}):
        status, answer = post(server, {**asked, **more})
        assert (status, answer["error"]["param"]) == (400, "best_of")


def test_special_tokens_of_a_prompt_can_be_left_out(server: Running, gen: FastSpecGenerator) -> None:
    plain = post(server, {**ASKED, "add_special_tokens": False})[1]["choices"]
    assert plain == post(server, ASKED)[1]["choices"], "this tokenizer adds none"
    tokenizer, seen = server.service.tokenizer, []

    class Watched:
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(options)
            return tokenizer(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    server.service.tokenizer = Watched()  # type: ignore[assignment]
    try:
        post(server, {**ASKED, "add_special_tokens": False})
        post(server, ASKED)
    finally:
        server.service.tokenizer = tokenizer
    assert [one["add_special_tokens"] for one in seen] == [False, True]


def test_errors_of_a_grammar_name_the_field_that_gave_it(server: Running) -> None:
    for field in ({"structured_outputs": {"grammar": "start: ("}}, {"structured_outputs": {"json": {"type": "y"}}}):
        status, answer = post(server, {**ASKED, **field})
        assert (status, answer["error"]["param"]) == (400, "structured_outputs")
        assert re.search("cannot be used", answer["error"]["message"])
