"""Tables with one row for each field of a request: fields of OpenAI's and vLLM's APIs, and fastspec's own.

FIELDS has the fields of chats and completions, RESPONSE_FIELDS those of /v1/responses. The parsers of request bodies
use the tables, and docs/fields.md is written from them. A served field has an effect. A taken field is accepted: its
type is checked, but it changes no answer. All other fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from fastspec.server.errors import Refusal


class Treatment(Enum):
    """Treatment of a request field by the server: served, taken (accepted without effect) or refused."""

    SERVED = "served"
    TAKEN = "taken"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One field of a request.

    Attributes:
        name: key in the JSON body.
        origin: API that defines the field: "OpenAI", "vLLM" or "fastspec".
        paths: API paths that define the field, some of "chat", "completions" and "responses".
        treatment: treatment of the field by the server.
        note: text for docs/fields.md and for errors. A served field has its values here, and a taken field the reason
            why it changes no answer. A refused field has the reason and the next step.
        kind: type of the values of a taken field. None for other fields.
        neutral: values of a refused field that have no effect. A request with such a value is accepted.
    """

    name: str
    origin: str
    paths: tuple[str, ...]
    treatment: Treatment
    note: str
    kind: Any = None
    neutral: tuple[object, ...] = ()


_SERVED, _TAKEN, _REFUSED = Treatment.SERVED, Treatment.TAKEN, Treatment.REFUSED
_CHAT, _COMPLETIONS, _RESPONSES = ("chat",), ("completions",), ("responses",)
_BOTH = (*_CHAT, *_COMPLETIONS)


def _served(origin: str, paths: tuple[str, ...], notes: Mapping[str, str]) -> list[RequestField]:
    return [_row(name, origin, paths, _SERVED, note) for name, note in notes.items()]


def _taken(origin: str, paths: tuple[str, ...], notes: Mapping[str, tuple[Any, str]]) -> list[RequestField]:
    return [_row(name, origin, paths, _TAKEN, note, kind=kind) for name, (kind, note) in notes.items()]


def _refused(
    origin: str, paths: tuple[str, ...], notes: Mapping[str, tuple[tuple[object, ...], str]]
) -> list[RequestField]:
    return [_row(name, origin, paths, _REFUSED, note, neutral=neutral) for name, (neutral, note) in notes.items()]


def _row(
    name: str,
    origin: str,
    paths: tuple[str, ...],
    treatment: Treatment,
    note: str,
    kind: Any = None,
    neutral: tuple[object, ...] = (),
) -> RequestField:
    return RequestField(
        name=name,
        origin=origin,
        paths=paths,
        treatment=treatment,
        note=note,
        kind=kind,
        neutral=neutral,
    )


_NAMES_CLIENT = "It names the client or the purpose."
_BEAMS = "There is no beam search; sample with n and choose by logprobs."
_MEDIA = "Text is all that is read and written; leave it out."
_ENGINES = "Caches do not move between servers; leave it out."
_OLD_GUIDED = "vLLM's older name; use structured_outputs."

FIELDS: Final[tuple[RequestField, ...]] = (
    *_served(
        "OpenAI",
        _BOTH,
        {
            "model": "A name that `GET /v1/models` lists.",
            "max_tokens": "Default: 16 for completions; for chats all remaining context.",
            "temperature": "0 to 2; 0 is greedy. Default: the checkpoint's `generation_config.json`, else greedy.",
            "top_p": "0 to 1.",
            "presence_penalty": "-2 to 2, over the new tokens.",
            "frequency_penalty": "-2 to 2, over the new tokens.",
            "logit_bias": "Token ids to numbers from -100 to 100.",
            "seed": "-2^63 to 2^63 - 1. Row i of n answers is row i of `generate(num_return_sequences=n, seed=seed)`.",
            "n": "1 to 64 answers.",
            "stop": "Up to 16 texts. The answer ends before them. They are not searched in the prompt.",
            "stream": "Server-sent events.",
            "stream_options": "`include_usage`; `continuous_usage_stats` gives usage in every event.",
            "logprobs": "Of the target. Completions: number of most probable tokens, 0 to 20; the chosen token is "
            "always listed, and one that is a part of a character is named by its bytes (`bytes:\\xe2`). Chats: true "
            "or false.",
        },
    ),
    *_served(
        "OpenAI",
        _CHAT,
        {
            "messages": "Contents are texts or lists of text parts, and arguments of `tool_calls` JSON text: each is "
            "given to the template in the form that it writes. A field, a role or tool calls that the template would "
            "leave out are a 400 that names them.",
            "max_completion_tokens": "Means the same as `max_tokens`; if both are given they must be equal.",
            "top_logprobs": "0 to 20; needs `logprobs`.",
            "tools": "Written by the chat template; calls come back as `tool_calls`. A template without tools is a "
            "400. With `strict` the arguments follow the schema once a call has begun.",
            "tool_choice": "none, auto, required, a function, or `allowed_tools`. To demand a call needs llguidance.",
            "parallel_tool_calls": "false: one call at most.",
            "reasoning_effort": "Sets the variable of the template that turns reasoning on; a template without one is "
            "a 400.",
            "response_format": "text, json_object or json_schema; the answer follows it. Needs llguidance. "
            "Completions have it, too.",
            "modalities": 'Only ["text"].',
            "prediction": "Drafts come from it with `--proposer suffix`; it changes no answer. Completions have it.",
        },
    ),
    *_served(
        "OpenAI",
        _COMPLETIONS,
        {
            "prompt": "A text, a list of token ids, or a list of either.",
            "best_of": "n to 64: so many answers are drawn, and those n with the largest mean log-probability of a "
            "token are returned. Not with `stream`, unless it equals `n`.",
            "echo": "true puts the prompt before the answer, with the log-probabilities of its tokens if `logprobs` is "
            "given. `max_tokens` may then be 0.",
        },
    ),
    *_served(
        "vLLM",
        _BOTH,
        {
            "prompt_logprobs": "0 to 20: log-probabilities of the prompt's tokens by id, and of so many most probable "
            "ones; in the choices of completions, beside the choices of chats. Not with `stream`.",
            "top_k": "0 and more; 0 and -1 are all tokens. Default: the checkpoint's, else all tokens.",
            "min_p": "0 to 1.",
            "repetition_penalty": "Above 0 to 10, over prompt and new tokens.",
            "min_tokens": "No stop id comes before so many new tokens.",
            "ignore_eos": "true: the checkpoint's stop ids do not end the answer.",
            "stop_token_ids": "Ids that end the answer, besides the checkpoint's. The id is not part of the text.",
            "allowed_token_ids": "The only ids that may come.",
            "skip_special_tokens": "false keeps special tokens in the text, such as marks of tool calls.",
            "add_special_tokens": "Completions: false adds no special tokens to a prompt that is text. Chats: only "
            "false, since the template writes them.",
            "structured_outputs": "One of `json`, `regex`, `choice`, `grammar` (Lark) and `json_object`.",
            "return_token_ids": "true adds `token_ids` to each choice, and `prompt_token_ids`.",
        },
    ),
    *_served(
        "vLLM",
        _CHAT,
        {
            "add_generation_prompt": "false: the template does not begin a new message of the assistant.",
            "continue_final_message": "true: the answer continues the last message. Needs add_generation_prompt=false.",
            "chat_template_kwargs": 'Variables of the template, such as `{"enable_thinking": false}`.',
        },
    ),
    *_served(
        "fastspec",
        _BOTH,
        {
            "speculative_tokens": 'Drafts per step, at most the server\'s, or "auto"; 0 decodes plainly. No value '
            "changes a greedy answer."
        },
    ),
    *_served(
        "fastspec",
        _CHAT,
        {
            "sanitize_control_tokens": "true reads control tokens in messages as plain text. With "
            "`--sanitize-control-tokens` this holds for every request."
        },
    ),
    *_taken("OpenAI", _BOTH, {"user": (str, _NAMES_CLIENT)}),
    *_taken(
        "OpenAI",
        _CHAT,
        {
            "metadata": (dict[str, object], _NAMES_CLIENT),
            "safety_identifier": (str, _NAMES_CLIENT),
            "store": (bool, "Answers are not stored for later; the answer itself is the same."),
            "service_tier": (str, "There is one tier."),
            "prompt_cache_key": (str, "Prompts that begin alike are found without a key."),
            "prompt_cache_options": (dict[str, object], "The prefix cache decides by itself what it keeps."),
            "prompt_cache_retention": (str, "The prefix cache decides by itself what it keeps."),
            "verbosity": (str, "A hint to models that were trained for it; no template reads it."),
        },
    ),
    *_taken(
        "vLLM",
        _BOTH,
        {
            "priority": (int, "Requests are served in the order of their arrival."),
            "request_id": (str, "The header X-Request-Id names a request in logs."),
            "session_id": (str, _NAMES_CLIENT),
            "length_penalty": (float, "Only beam search reads it."),
            "stream_interval": (int, "An event is sent for each step; joined texts are equal."),
            "return_token_offsets": (bool, "vLLM itself reads it only on paths that render prompts."),
            "return_mm_kwargs": (bool, "vLLM itself reads it only on paths that render prompts."),
            "truncation_side": (str, "Nothing is truncated."),
        },
    ),
    *_refused(
        "OpenAI",
        _CHAT,
        {
            "audio": ((), _MEDIA),
            "functions": ((), "The older name of tools; send tools."),
            "function_call": ((), "The older name of tool_choice; send tool_choice."),
            "web_search_options": ((), "The server searches nothing; offer a tool instead."),
            "moderation": ((), "Nothing is moderated here; leave it out."),
        },
    ),
    *_refused("OpenAI", _COMPLETIONS, {"suffix": (("",), "Text is only added at the end of a prompt; leave it out.")}),
    *_refused(
        "vLLM",
        _BOTH,
        {
            "use_beam_search": ((False,), _BEAMS),
            "watermarking": ((False,), "Nothing is watermarked; leave it out."),
            "include_stop_str_in_output": ((False,), "The answer ends before a stop text; add it on your side."),
            "spaces_between_special_tokens": ((True,), "Texts are what the tokenizer decodes; leave it out."),
            "truncate_prompt_tokens": ((-1,), "A prompt is read whole; shorten it on your side."),
            "logprob_token_ids": ((), "Use top_logprobs, which reports the most probable tokens."),
            "bad_words": (([],), "Ban token ids with logit_bias of -100."),
            "return_tokens_as_token_ids": ((False,), "Use return_token_ids."),
            "routed_experts_prompt_start": ((0,), "Chosen experts are not reported; leave it out."),
            "cache_salt": ((), "The prefix cache has no salt; give each tenant a server."),
            "kv_transfer_params": ((), _ENGINES),
            "ec_transfer_params": ((), _ENGINES),
            "vllm_xargs": (({},), "There are no extensions of vLLM here; leave it out."),
            "repetition_detection": ((), "Use repetition_penalty or frequency_penalty."),
            "thinking_token_budget": ((-1,), "Use max_tokens."),
            "guided_json": ((), _OLD_GUIDED),
            "guided_regex": ((), _OLD_GUIDED),
            "guided_choice": ((), _OLD_GUIDED),
            "guided_grammar": ((), _OLD_GUIDED),
        },
    ),
    *_refused(
        "vLLM",
        _CHAT,
        {
            "chat_template": ((), "A template is a program; serve with --chat-template FILE."),
            "documents": ((), "Write them into a message."),
            "media_io_kwargs": ((), _MEDIA),
            "mm_processor_kwargs": ((), _MEDIA),
            "return_prompt_text": ((False,), "POST /tokenize returns the tokens of messages."),
            "include_reasoning": ((True,), "The answer is returned as it was written; leave it out."),
        },
    ),
    *_refused("vLLM", _COMPLETIONS, {"prompt_embeds": ((), "Send a text or token ids.")}),
)

ROW_OF: Final[Mapping[str, RequestField]] = {row.name: row for row in FIELDS}
TAKEN: Final[Mapping[str, RequestField]] = {row.name: row for row in FIELDS if row.treatment is Treatment.TAKEN}

# served fields of /v1/responses that mean the same as in chats, by the specification that has them
SAME_AS_CHAT: Final[Mapping[str, tuple[str, ...]]] = {
    "OpenAI": ("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"),
    "vLLM": (
        *("top_k", "repetition_penalty", "seed", "stop", "logit_bias", "ignore_eos", "skip_special_tokens"),
        "structured_outputs",
    ),
    "fastspec": (
        *("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids", "allowed_token_ids"),
        *("chat_template_kwargs", "speculative_tokens", "sanitize_control_tokens"),
    ),
}
_OTHER_SEED = "A whole number from -2^63 to 2^63 - 1: the same request with it gives the same answer."
_OTHER_TOP = "0 to 20 most probable tokens at each place of `output_text`."


def _same() -> list[RequestField]:
    other = {"seed": _OTHER_SEED, "top_logprobs": _OTHER_TOP}
    return [
        _row(name, origin, _RESPONSES, _SERVED, other.get(name, ROW_OF[name].note))
        for origin, names in SAME_AS_CHAT.items()
        for name in names
    ]


def _taken_as_in_chat(origin: str, *names: str) -> list[RequestField]:
    return _taken(origin, _RESPONSES, {name: (ROW_OF[name].kind, ROW_OF[name].note) for name in names})


RESPONSE_FIELDS: Final[tuple[RequestField, ...]] = (
    *_same(),
    *_served(
        "OpenAI",
        _RESPONSES,
        {
            "input": "A text, or a list of items: messages with parts `input_text` and `output_text`, `function_call`, "
            "`function_call_output`, `reasoning`, and with `--response-store` also `item_reference`.",
            "instructions": "Become the first message, of the role system. They do not carry over to later responses.",
            "max_output_tokens": "Default: all remaining context. An answer that it cuts has the status incomplete.",
            "tools": "Functions, in the flat form of this path. With `strict` the arguments follow the schema once a "
            "call has begun; without the field a function is not strict.",
            "tool_choice": "As in chats, with the name of a function beside its type.",
            "text": "`format`: text, json_object or json_schema, which the answer follows (needs llguidance). "
            "`verbosity` changes nothing.",
            "reasoning": "`effort` sets the variable of the template that turns reasoning on; a template without one "
            "is a 400. No summaries are written: a reasoning item has the reasoning itself.",
            "include": "`message.output_text.logprobs` adds log-probabilities. `reasoning.encrypted_content` adds the "
            "reasoning in an encoded form, which some clients send back; it is not encrypted. The others change "
            "nothing.",
            "store": "Kept with `--response-store N`, unless it is false; without the flag nothing is kept.",
            "previous_response_id": "Continues a stored response. Without `--response-store N` a 400.",
            "conversation": "Id of a conversation of `POST /v1/conversations`: its items come first, and those of the "
            "request and of the answer are added. Without `--response-store N` a 400.",
            "background": "true answers at once with the status queued; `GET /v1/responses/{id}` tells the rest, with "
            "`stream=true` by events. Without `--response-store N` a 400.",
            "truncation": "auto drops the oldest turns of the conversation until the prompt and `max_output_tokens` "
            "fit. Messages of the roles system and developer stay, and the last of the user. Default: disabled, a 400.",
            "metadata": "Up to 16 texts, which come back in the response.",
            "stream_options": "`include_obfuscation`: only false.",
        },
    ),
    *_taken_as_in_chat(
        "OpenAI",
        *("user", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    ),
    *_taken_as_in_chat("vLLM", "priority", "request_id"),
    *_taken("OpenAI", _RESPONSES, {"max_tool_calls": (int, "It limits tools of the server, which runs none.")}),
    *_refused(
        "OpenAI",
        _RESPONSES,
        {
            "background_options": (
                ({}, {"completion_window": "soonest"}),
                "All responses begin at once; leave it out.",
            ),
            "context_management": (([],), 'Nothing is compacted; send truncation="auto".'),
            "prompt": ((), "Prompts are not stored here; send their text as instructions."),
            "moderation": ((), "Nothing is moderated here; leave it out."),
            "image": (({},), _MEDIA),
            "access_programs": (({},), "There are no access programs here; leave it out."),
        },
    ),
    *_refused(
        "vLLM",
        _RESPONSES,
        {
            **{
                name: (ROW_OF[name].neutral, ROW_OF[name].note)
                for name in ("include_stop_str_in_output", "mm_processor_kwargs", "cache_salt", "vllm_xargs")
            },
            "enable_response_messages": ((False,), "Send return_token_ids to /v1/chat/completions."),
            "previous_input_messages": ((), "Send all items as input."),
            "previous_response": ((), "Send its output as items of input."),
        },
    ),
)
RESPONSE_ROW_OF: Final[Mapping[str, RequestField]] = {row.name: row for row in RESPONSE_FIELDS}
RESPONSE_TAKEN: Final[Mapping[str, RequestField]] = {
    row.name: row for row in RESPONSE_FIELDS if row.treatment is Treatment.TAKEN
}


def without_neutral(body: object, served: Mapping[str, object], rows: Mapping[str, RequestField]) -> object:
    """Returns a request's fields without those that are null, and without refused ones whose values have no effect.

    Args:
        body: fields of the request, by name. Anything but a dict is returned unchanged, for pydantic to refuse.
        served: fields that the class of the body defines, by name. They are always kept.
        rows: rows of the table by field name.

    Raises:
        Refusal: a refused field has another value. The message has the reason and the next step.
    """
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        row = rows.get(name)
        if name in served or row is None or row.treatment is not Treatment.REFUSED:
            kept[name] = value
        elif not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in row.neutral):
            raise Refusal(f"{name} is not supported. {row.note}", name)
    return kept
