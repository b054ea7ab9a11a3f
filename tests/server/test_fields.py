"""The table of fields: it has every field of the specifications, and the parser treats each one as it says."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from fastspec.server.field_table import (
    FIELDS,
    RESPONSE_FIELDS,
    RESPONSE_TAKEN,
    ROW_OF,
    TAKEN,
    RequestField,
    Treatment,
)
from fastspec.server.fields import Chat, Completion
from fastspec.server.responses.body import ResponseBody
from tests.server.conftest import Running
from tests.server.test_refusals import CHAT, TEXT, post
from tools.fields_page import PAGE, page

# names of vLLM 0.33's requests that are not OpenAI's, of both paths, of chats, and of completions
VLLM = {
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "stream_interval",
    "thinking_token_budget",
}
VLLM_CHAT = {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
    "include_reasoning",
}
VLLM_COMPLETIONS = {"prompt_embeds"}
VLLM_RESPONSES = {
    "logit_bias",
    "top_k",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "request_id",
    "mm_processor_kwargs",
    "priority",
    "cache_salt",
    "enable_response_messages",
    "previous_input_messages",
    "previous_response",
    "structured_outputs",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "vllm_xargs",
}
OLDER = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
VALUES: dict[type, Any] = {str: "x", int: 3, float: 0.5, bool: True, dict[str, object]: {"a": 1}}
REFUSED = [row for row in FIELDS if row.treatment is Treatment.REFUSED]
REFUSED_IN_RESPONSES = [row for row in RESPONSE_FIELDS if row.treatment is Treatment.REFUSED]
RESPONSE: dict[str, Any] = {"model": "small", "input": "x", "max_output_tokens": 4}


def test_every_field_has_one_row() -> None:
    for rows in (FIELDS, RESPONSE_FIELDS):
        assert [name for name, count in Counter(row.name for row in rows).items() if count > 1] == []


def test_the_table_has_the_fields_of_the_openai_package() -> None:
    chat = {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *chat_create_params.CompletionCreateParamsStreaming.__annotations__,
    }
    text = {
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsStreaming.__annotations__,
    }
    assert {"messages", "stream", "store"} < chat
    rows = [row for row in FIELDS if row.origin == "OpenAI"]
    assert {row.name for row in rows if "chat" in row.paths} == chat
    assert {row.name for row in rows if "completions" in row.paths} == text


def test_the_table_of_responses_has_the_fields_of_the_openai_package_and_of_vllm() -> None:
    specified = {
        *response_create_params.ResponseCreateParamsBase.__annotations__,
        *response_create_params.ResponseCreateParamsStreaming.__annotations__,
    }
    assert {"input", "stream", "conversation"} < specified
    assert {row.name for row in RESPONSE_FIELDS if row.origin == "OpenAI"} == specified
    assert {row.name for row in RESPONSE_FIELDS if row.origin == "vLLM"} == VLLM_RESPONSES


def test_the_table_has_the_fields_of_vllm() -> None:
    rows = [row for row in FIELDS if row.origin == "vLLM" and row.name not in OLDER]
    assert {row.name for row in rows if "chat" in row.paths} == VLLM | VLLM_CHAT
    assert {row.name for row in rows if "completions" in row.paths} == VLLM | VLLM_COMPLETIONS


def test_what_is_served_is_what_bodies_have() -> None:
    bodies = {*Chat.model_fields, *Completion.model_fields}
    assert {row.name for row in FIELDS if row.treatment is Treatment.SERVED} == bodies - set(TAKEN)
    assert set(TAKEN) < bodies
    served = {row.name for row in RESPONSE_FIELDS if row.treatment is Treatment.SERVED}
    assert served == {*ResponseBody.model_fields} - set(RESPONSE_TAKEN)
    assert set(RESPONSE_TAKEN) < {*ResponseBody.model_fields}


def test_fields_that_change_no_answer_are_taken_and_logged_once(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {name: VALUES[row.kind] for name, row in TAKEN.items()}
    with caplog.at_level(logging.INFO, "fastspec.server"):
        for body, path in ((TEXT, "completions"), (CHAT, "chat/completions")):
            (status, plain), (_, taken) = post(server, body, path), post(server, body | asked, path)
            assert status == 200
            assert taken["choices"] == plain["choices"], taken
        asked = {name: VALUES[row.kind] for name, row in RESPONSE_TAKEN.items()}
        plain, taken = (post(server, RESPONSE | more, "responses")[1] for more in ({}, asked))
        assert taken["output"][0]["content"] == plain["output"][0]["content"]
    assert any("have the field max_tool_calls," in line for line in caplog.messages)
    assert all(sum(f"have the field {name}," in line for line in caplog.messages) <= 1 for name in TAKEN)
    for name in TAKEN:
        wrong = 3 if TAKEN[name].kind is str else "x"
        status, answer = post(server, TEXT | {name: wrong})
        assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_refused_fields_tell_the_reason_unless_they_ask_for_nothing(server: Running, row: RequestField) -> None:
    body, path = (CHAT, "chat/completions") if "chat" in row.paths else (TEXT, "completions")
    status, answer = post(server, body | {row.name: "something"}, path)
    assert (status, answer["error"]["param"]) == (400, row.name)
    assert answer["error"]["message"] == f"{row.name} is not supported. {row.note}"
    for value in row.neutral:
        assert post(server, body | {row.name: value}, path)[0] == 200


@pytest.mark.parametrize("row", REFUSED_IN_RESPONSES, ids=lambda row: row.name)
def test_refused_fields_of_responses_tell_the_reason(server: Running, row: RequestField) -> None:
    status, answer = post(server, RESPONSE | {row.name: "something"}, "responses")
    assert (status, answer["error"]["param"]) == (400, row.name)
    assert answer["error"]["message"] == f"{row.name} is not supported. {row.note}"


def test_values_that_ask_for_nothing_are_accepted_in_responses(server: Running) -> None:
    neutral = {row.name: row.neutral[0] for row in REFUSED_IN_RESPONSES if row.neutral}
    assert {"background_options", "context_management"} < set(neutral)
    assert post(server, RESPONSE | neutral, "responses")[0] == 200


def test_true_is_no_number_that_asks_for_nothing(server: Running) -> None:
    assert ROW_OF["routed_experts_prompt_start"].neutral == (0,)
    assert post(server, TEXT | {"routed_experts_prompt_start": False})[0] == 400


def test_both_limits_may_be_equal(client: openai.OpenAI) -> None:
    asked: Any = {"model": "small", "messages": CHAT["messages"], "max_tokens": 3, "max_completion_tokens": 3}
    answer = client.chat.completions.create(**asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tools.fields_page"
