"""Answers as models write them, one or more for each format, with the parts that they have."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fastspec.text.answers.events import Tool
from tests.helpers.chat_templates import PUBLISHED

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "parameters": NOTHING}}
TOOLS = (Tool("weather", PARAMETERS), Tool("time", NOTHING))
Call = tuple[str, dict[str, Any]]
PARIS: Call = ("weather", {"city": 'Paris, "Île"', "days": 2})
NOW: Call = ("time", {})


@dataclass(frozen=True)
class Written:
    """An answer of a model.

    Attributes:
        format: of calls, chosen from the template.
        template: chat template.
        prompt_end: how prompts of the template end.
        script: as the model writes it, up to its end.
        content, reasoning, calls: its parts.
        marks: that are one token each.
        special: True if these are special tokens.
        thinks: format of the reasoning.
        opened: True if the prompt opens the reasoning.
    """

    format: str
    template: str
    prompt_end: str
    script: str
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    marks: tuple[str, ...] = ()
    special: bool = False
    thinks: str = "none"
    opened: bool = False


_ARGUMENTS = json.dumps(PARIS[1], ensure_ascii=False)
_CHATML = "<|im_start|>assistant\n"
_TAGS = ("<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")
_QWEN3 = PUBLISHED["json calls"].text + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
_R1 = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PUBLISHED["text calls"].text
_FENCED = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>"
_PYTHON = 'weather(city="Paris, \\"Île\\"", days=2)'
_GLM = PUBLISHED["pairs of arguments"].text + "{% if false %}</think>{% endif %}"
_NAMED_BRACKETS = PUBLISHED["calls in brackets"].text.replace("[TOOL_CALLS] [", "[TOOL_CALLS]") + "{# [ARGS] #}"

WRITTEN: dict[str, Written] = {
    "hermes": Written(
        "hermes",
        PUBLISHED["json calls"].text,
        _CHATML,
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {_ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "I look.",
        calls=[PARIS, NOW],
        marks=_TAGS,
    ),
    "qwen3": Written(
        "hermes",
        _QWEN3,
        _CHATML,
        "<think>\nA <tool_call> is\nneeded.\n</think>\n\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {_ARGUMENTS}}}\n</tool_call>',
        reasoning="A <tool_call> is\nneeded.",
        calls=[PARIS],
        marks=(*_TAGS, *_THINK),
        thinks="think",
    ),
    "qwen3 that answers": Written(
        "hermes",
        _QWEN3,
        _CHATML,
        "<think>\nEasy.\n</think>\n\nIt rains, {even} in <Paris>.\n",
        "It rains, {even} in <Paris>.\n",
        "Easy.",
        marks=(*_TAGS, *_THINK),
        thinks="think",
    ),
    "qwen3_coder": Written(
        "qwen3_coder",
        PUBLISHED["xml calls"].text,
        _CHATML,
        'Now:\n<tool_call>\n<function=weather>\n<parameter=city>\nParis, "Île"\n</parameter>\n<parameter=days>\n2\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "Now:",
        calls=[PARIS, NOW],
        marks=_TAGS,
    ),
    "glm4": Written(
        "glm4",
        _GLM,
        "<|assistant|>",
        "\n<think>Look.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Paris, "Île"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>',
        reasoning="Look.",
        calls=[PARIS],
        marks=(*_TAGS, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        thinks="think",
    ),
    "llama3_json": Written(
        "llama3_json",
        PUBLISHED["headers and calls"].text,
        "<|end_header_id|>\n\n",
        f'<|python_tag|>{{"name": "weather", "parameters": {_ARGUMENTS}}}; {{"name": "time", "parameters": {{}}}}',
        calls=[PARIS, NOW],
        marks=("<|python_tag|>",),
        special=True,
    ),
    "llama3_json that answers": Written(
        "llama3_json",
        PUBLISHED["headers and calls"].text,
        "<|end_header_id|>\n\n",
        '{"name": "nobody", "parameters": {}} is no call.',
        '{"name": "nobody", "parameters": {}} is no call.',
    ),
    "pythonic": Written(
        "pythonic",
        PUBLISHED["headers and calls"].text + "{# [func_name1(params)] #}",
        "<|end_header_id|>\n\n",
        f"[{_PYTHON}, time()]",
        calls=[PARIS, NOW],
    ),
    "mistral": Written(
        "mistral",
        PUBLISHED["calls in brackets"].text,
        "[/INST]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]',
        calls=[PARIS, NOW],
        marks=("[TOOL_CALLS]",),
        special=True,
    ),
    "mistral with names": Written(
        "mistral",
        _NAMED_BRACKETS,
        "[/INST]",
        f"Yes.[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        "Yes.",
        calls=[PARIS, NOW],
        marks=("[TOOL_CALLS]", "[ARGS]"),
        special=True,
    ),
    "harmony": Written(
        "harmony",
        PUBLISHED["channels"].text,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>They ask for\nParis.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        reasoning="They ask for\nParis.",
        calls=[PARIS],
        marks=_CHANNELS,
        special=True,
        thinks="harmony",
    ),
    "harmony that answers": Written(
        "harmony",
        PUBLISHED["channels"].text,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
        "It rains.",
        "Easy.",
        marks=_CHANNELS,
        special=True,
        thinks="harmony",
    ),
    "deepseek_v3": Written(
        "deepseek_v3",
        _R1,
        "<｜Assistant｜><think>\n",
        f"I must look.\n</think>\n\nSo:<｜tool▁calls▁begin｜>{_FENCED}<｜tool▁calls▁end｜>",
        "So:",
        "I must look.",
        [PARIS],
        marks=(*_DEEPSEEK, *_THINK),
        thinks="think",
        opened=True,
    ),
    "deepseek_v3 with names": Written(
        "deepseek_v3",
        _R1.replace("```json", "").replace("```", ""),
        "<｜Assistant｜><think>\n",
        f"Look.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reasoning="Look.",
        calls=[PARIS, NOW],
        marks=(*_DEEPSEEK, *_THINK),
        thinks="think",
        opened=True,
    ),
    "gemma4": Written(
        "none",
        PUBLISHED["turns"].text + "{# <|channel>thought <channel|> #}",
        "model\n",
        "<|channel>thought\nHm.\n<channel|>It rains.",
        "It rains.",
        "Hm.",
        marks=("<|channel>", "<channel|>"),
        special=True,
        thinks="gemma4",
    ),
}
