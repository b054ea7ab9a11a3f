"""Chooses the formats in which a model writes tool calls and reasoning, by the text of its chat template."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fastspec.text.answers.deepseek import DeepSeek
from fastspec.text.answers.harmony import Harmony
from fastspec.text.answers.hermes import Hermes
from fastspec.text.answers.interface import ReasoningFormat, ToolFormat
from fastspec.text.answers.llama import LlamaJson, Pythonic
from fastspec.text.answers.mistral import Mistral
from fastspec.text.answers.tagged import Glm4, Qwen3Coder
from fastspec.text.answers.think import Between

NONE: Final = "none"  # name for no format
AUTO: Final = "auto"  # name for the format that the chat template shows

# name of a format -> function that makes it for a chat template
TOOL_FORMATS: Final[Mapping[str, Callable[[str], ToolFormat]]] = {
    Harmony.name: lambda template: Harmony(),
    DeepSeek.name: DeepSeek,
    Mistral.name: Mistral,
    Glm4.name: lambda template: Glm4(),
    Qwen3Coder.name: lambda template: Qwen3Coder(),
    Hermes.name: lambda template: Hermes(),
    Pythonic.name: lambda template: Pythonic(),
    LlamaJson.name: lambda template: LlamaJson(),
}
# name of a format -> texts; the first format is chosen for which the template has all texts
_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    Harmony.name: ("<|channel|>", "<|message|>"),
    DeepSeek.name: ("<｜tool▁call▁begin｜>",),
    Mistral.name: ("[TOOL_CALLS]",),
    Glm4.name: ("<arg_key>",),
    Qwen3Coder.name: ("<function=", "<parameter="),
    Hermes.name: ("<tool_call>",),
    Pythonic.name: ("[func_name1(",),
    LlamaJson.name: ('"parameters": ',),
}
REASONING_FORMATS: Final[Mapping[str, Callable[[], ReasoningFormat]]] = {
    Harmony.name: Harmony,
    "think": lambda: Between("think", "<think>", "</think>"),
    "gemma4": lambda: Between("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    "mistral": lambda: Between("mistral", "[THINK]", "[/THINK]"),
    "seed": lambda: Between("seed", "<seed:think>", "</seed:think>"),
    "kimi": lambda: Between("kimi", "◁think▷", "◁/think▷"),
}
# name of a format -> texts; the first format is chosen for which the template has at least one
_REASONS: Final[Mapping[str, tuple[str, ...]]] = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<channel|>", "<|channel>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>",),
    "kimi": ("◁think▷",),
}


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Formats in which a model writes tool calls and reasoning.

    Attributes:
        tools: format of tool calls. None: no text is read as a call.
        reasoning: format of reasoning. None: no text is read as reasoning.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


def formats_of(template: str, *, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
    """Chooses the formats in which a model writes tool calls and reasoning.

    Args:
        template: Jinja text of the model's chat template.
        tools: name of a format of tool calls, or MODULE:CLASS for a subclass of `ToolFormat`. AUTO chooses by the
            template. NONE: no text is read as a call.
        reasoning: name of a format of reasoning, AUTO or NONE.

    Raises:
        ValueError: no format has that name, or the class cannot be used.
    """
    if tools == AUTO:
        tools = next((name for name, texts in _SHOWN.items() if all(text in template for text in texts)), NONE)
    if reasoning == AUTO:
        channels = all(text in template for text in _SHOWN[Harmony.name])
        reads = (name for name, texts in _REASONS.items() if any(text in template for text in texts))
        reasoning = Harmony.name if channels else next(reads, NONE)
    if reasoning not in (NONE, *REASONING_FORMATS):
        raise ValueError(f"no reasoning format {reasoning!r}; there are {', '.join((AUTO, NONE, *REASONING_FORMATS))}")
    return AnswerFormats(_tool_format(tools, template), None if reasoning == NONE else REASONING_FORMATS[reasoning]())


def _tool_format(name: str, template: str) -> ToolFormat | None:
    if name == NONE:
        return None
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name](template)
    module, colon, kind = name.partition(":")
    if not colon:
        raise ValueError(
            f"no format of tool calls {name!r}; there are {', '.join((AUTO, NONE, *TOOL_FORMATS))}, and MODULE:CLASS "
            "for one of your own"
        )
    try:
        made = getattr(importlib.import_module(module), kind)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name!r} could not be created: {error}; give MODULE:CLASS, where CLASS() takes no arguments"
        ) from None
    if not isinstance(made, ToolFormat):
        raise ValueError(f"{name!r} must be a subclass of fastspec.text.answers.interface.ToolFormat")
    return made
