"""The `openai` package talks to a server: its answers are `generate`'s."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from fastspec import FastSpecGenerator, GenerateOutput
from tests.helpers.services import END
from tests.server.test_refusals import post, raw

PROMPT = "the head of the list"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now?"}]},
]
TEMPLATED = "<system>be brief\n<user>what now?\n<assistant>"


def generated(gen: FastSpecGenerator, text: str, **options: Any) -> tuple[list[str], GenerateOutput]:
    tokenizer: Any = gen.tokenizer
    ids = tokenizer(text)["input_ids"]
    output = gen.generate([ids], return_dict_in_generate=True, **options)
    assert isinstance(output, GenerateOutput)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in output.new_tokens], output


def joined(chunks: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Texts and reasons of a stream's answers, and its usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.text if chunk.object == "text_completion" else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_the_one_model_is_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "small"
    assert client.models.retrieve("small").id == "small"
    assert model.max_model_len == 400
    with pytest.raises(openai.NotFoundError, match="the model 'large' is not here"):
        client.models.retrieve("large")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0, "extra_body": {"speculative_tokens": 2}}, {"num_speculative_tokens": 2}),
        ({"temperature": 0, "extra_body": {"speculative_tokens": "auto"}}, {"num_speculative_tokens": "auto"}),
        ({"temperature": 0.8, "seed": 4}, {"do_sample": True, "temperature": 0.8, "seed": 4, "top_k": 0}),
        (
            {"temperature": 1, "top_p": 0.8, "seed": 4, "extra_body": {"top_k": 20, "min_p": 0.01}},
            {"do_sample": True, "temperature": 1.0, "top_p": 0.8, "seed": 4, "top_k": 20, "min_p": 0.01},
        ),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"40": 3}},
            {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {40: 3.0}},
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_completions_are_what_generate_gives(
    client: Any, gen: FastSpecGenerator, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    (text,), output = generated(gen, PROMPT, max_new_tokens=24, **options)
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 24, **fields}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == output.finish_reasons[0]
    row = output.stats.rows[0]
    assert whole.usage.completion_tokens == row.emitted
    assert whole.usage.prompt_tokens == len(gen.tokenizer(PROMPT)["input_ids"])  # type: ignore[misc]
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    if fields.get("extra_body", {}).get("speculative_tokens") != "auto":  # which learns from one to the next
        drafts = whole.usage.completion_tokens_details
        assert drafts.accepted_prediction_tokens == row.accepted
        assert drafts.rejected_prediction_tokens == row.drafted - row.accepted
    texts, reasons, usage = joined(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert (texts, reasons) == ({0: text}, {0: output.finish_reasons[0]})
    assert usage.completion_tokens == row.emitted


def test_chat_goes_through_the_template(client: Any, gen: FastSpecGenerator) -> None:
    (text,), _ = generated(gen, TEMPLATED, max_new_tokens=24)
    asked = {"model": "small", "messages": MESSAGES, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks)[:2] == ({0: text}, {0: "length"})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with_tools = TEMPLATED.replace("<assistant>", "tools: 1\n<assistant>")
    (told,), _ = generated(gen, with_tools, max_new_tokens=8)
    answer = client.chat.completions.create(model="small", messages=MESSAGES, tools=[tool], max_tokens=8)
    assert answer.choices[0].message.content == told


def test_variables_of_a_template_are_those_of_the_request(client: Any, gen: FastSpecGenerator) -> None:
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 8}
    (text,), _ = generated(gen, TEMPLATED.replace("<assistant>", "<assistant>(briefly)"), max_new_tokens=8)
    answer = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"how": "briefly"}})
    assert answer.choices[0].message.content == text


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(
            ("n", "stream", "stream_options", "temperature", "stop", "logprobs", "suffix", "best_of", "user")
        ),
        {"n": 1, "best_of": 1, "echo": False, "top_k": -1, "service_tier": "auto", "user": "me"},
    ],
    ids=["null", "neutral"],
)
def test_fields_that_ask_for_nothing_change_nothing(server: Any, fields: dict[str, Any]) -> None:
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain, given = post(server, asked), post(server, {**fields, **asked})
    assert (plain[0], given[0]) == (200, 200), given
    assert plain[1]["choices"] == given[1]["choices"]


def test_pieces_before_the_usage_say_that_it_is_to_come(server: Any) -> None:
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 8, "stream": True}
    for options in ({}, {"stream_options": {"include_usage": True, "include_obfuscation": False}}):
        events = [
            json.loads(line[6:]) for line in raw(server, {**asked, **options}).splitlines() if line[:7] == "data: {"
        ]
        usages = [event.get("usage", "none") for event in events]
        wanted: list[Any] = ["none"] * len(usages) if not options else [None] * (len(usages) - 1) + [usages[-1]]
        assert usages == wanted
        assert not options or usages[-1]["completion_tokens"] == 8


def test_an_answer_has_the_room_that_is_left(client: Any, gen: FastSpecGenerator) -> None:
    answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x" * 350}])
    assert answer.usage.total_tokens == gen.max_length
    assert client.completions.create(model="small", prompt="x").usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", [[104, 101, 40], [[104, 101, 40]]])
def test_prompts_may_be_token_ids(client: Any, gen: FastSpecGenerator, prompt: Any) -> None:
    output: Any = gen.generate([[104, 101, 40]], max_new_tokens=8, return_dict_in_generate=True)
    answer = client.completions.create(model="small", prompt=prompt, max_tokens=8)
    assert answer.choices[0].text == gen.tokenizer.decode(output.new_tokens[0])  # type: ignore[union-attr]


def test_several_answers_are_the_rows_of_generate(client: Any, gen: FastSpecGenerator) -> None:
    texts, _ = generated(gen, PROMPT, max_new_tokens=16, do_sample=True, seed=7, num_return_sequences=3, top_k=0)
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 16, "n": 3, "seed": 7, "temperature": 1}
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == texts
    assert len(set(texts)) == 3
    assert joined(client.completions.create(**asked, stream=True))[0] == dict(enumerate(texts))
    prompts = client.completions.create(**{**asked, "prompt": [PROMPT, "x"], "n": 2})
    assert [choice.text for choice in prompts.choices][:2] == texts[:2]
    assert len(prompts.choices) == 4


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: Any, gen: FastSpecGenerator) -> None:
    (text,), output = generated(gen, PROMPT, max_new_tokens=40)
    tokenizer: Any = gen.tokenizer
    for at, length in ((5, 1), (9, 3), (14, 2)):
        stop = text[at : at + length]
        asked = {"model": "small", "prompt": PROMPT, "max_tokens": 40, "stop": [stop, "never"]}
        whole = client.completions.create(**asked)
        assert whole.choices[0].text == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens <= 40
        assert joined(client.completions.create(**asked, stream=True))[:2] == ({0: whole.choices[0].text}, {0: "stop"})
    beside = client.completions.create(model="small", prompt=PROMPT, max_tokens=9, stop=PROMPT[-1] + text[:2])
    assert beside.choices[0].text == text[:9], "a stop string that begins in the prompt is none of the answer"
    biased = client.completions.create(model="small", prompt=PROMPT, max_tokens=9, logit_bias={END: 100})
    assert (biased.choices[0].text, biased.choices[0].finish_reason) == ("", "stop")
    for fields, length in (
        ({"ignore_eos": True}, 9),
        ({"min_tokens": 4}, 5),
        ({"min_tokens": 0, "ignore_eos": False}, 1),
    ):
        asked = {"model": "small", "prompt": PROMPT, "max_tokens": 9, "logit_bias": {END: 100}, "extra_body": fields}
        assert client.completions.create(**asked).usage.completion_tokens == length
    assert tokenizer.eos_token_id == END
    assert output.finish_reasons == ["length"]


def test_log_probabilities_are_those_of_generate(client: Any, gen: FastSpecGenerator) -> None:
    _, output = generated(gen, PROMPT, max_new_tokens=12, logprobs=3)
    assert output.logprobs is not None
    assert output.top_logprobs is not None
    whole = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, logprobs=3)
    told = whole.choices[0].logprobs
    assert told.token_logprobs == output.logprobs[0]
    assert [sorted(each.values()) for each in told.top_logprobs] == [
        sorted({token: value, **dict(pairs)}.values())
        for token, value, pairs in zip(output.new_tokens[0], output.logprobs[0], output.top_logprobs[0], strict=True)
    ]
    streamed: list[float] = []
    for chunk in client.completions.create(model="small", prompt=PROMPT, max_tokens=12, logprobs=3, stream=True):
        streamed += chunk.choices[0].logprobs.token_logprobs if chunk.choices[0].logprobs else []
    assert streamed == output.logprobs[0]

    _, output = generated(gen, TEMPLATED, max_new_tokens=12, logprobs=2)
    assert output.logprobs is not None
    assert output.top_logprobs is not None
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "logprobs": True}
    content = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    assert [each.logprob for each in content] == output.logprobs[0]
    assert [[top.logprob for top in each.top_logprobs] for each in content] == [
        [value for _, value in pairs] for pairs in output.top_logprobs[0]
    ]
    none = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [each.top_logprobs for each in none] == [[]] * 12


def test_many_clients_at_once(client: Any, gen: FastSpecGenerator) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [PROMPT[: 3 + index] for index in range(12)]
    expected = [generated(gen, prompt, max_new_tokens=10)[0][0] for prompt in prompts]

    def ask(index: int) -> str:
        asked = {"model": "small", "prompt": prompts[index], "max_tokens": 10}
        if index % 2:
            return joined(client.completions.create(**asked, stream=True))[0][0]
        return str(client.completions.create(**asked).choices[0].text)

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == expected


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"the": {"enum": ["the", "hehe"]}, "list": {"type": "array", "items": {"enum": [1, 22]}}},
    "required": ["the", "list"],
    "additionalProperties": False,
}


def asked(kind: str) -> dict[str, Any]:
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {"name": "list", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["text", "json_object", "json_schema"])
def test_response_format_gives_the_text_of_generate_under_that_grammar(
    client: Any, gen: FastSpecGenerator, kind: str, stream: bool
) -> None:
    """The answer is `generate`'s under the same grammar; one that has ended is JSON of that schema."""
    schema = {"text": None, "json_object": {"type": "object"}, "json_schema": SCHEMA}[kind]
    fields = {"model": "small", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    answer = client.chat.completions.create(**fields, response_format=asked(kind), stream=stream)
    if stream:
        texts, reasons, _ = joined(answer)
        text, reason = texts[0], reasons[0]
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    (expected,), output = generated(gen, TEMPLATED, max_new_tokens=200, do_sample=False, json_schema=schema)
    assert (text, reason) == (expected, output.finish_reasons[0])
    if kind != "text" and reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_completion_follows_a_schema_too(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["the", "hehe"]}}}
    given = {"model": "small", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    (choice,) = client.completions.create(**given, extra_body={"response_format": form}).choices
    assert (json.loads(choice.text) in ("the", "hehe"), choice.finish_reason) == (True, "stop")


def test_a_sampled_answer_ends_with_its_schema(client: Any) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=200,
        temperature=1,
        seed=3,
        n=2,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["the", {"he": 1}]}}},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content) in ("the", {"he": 1})
        assert all(len(place.top_logprobs) == 2 for place in choice.logprobs.content)
