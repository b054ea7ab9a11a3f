"""Converts conversations to token ids with a checkpoint's chat template.

Templates differ in the forms of a message that they can render. Content may be a text or a list of parts. The
arguments of a tool call may be a mapping or JSON text. `ChatTemplate` finds out by rendering short trial conversations,
and then gives the template the form that it can render. A part of a message that the template would leave out is an
error.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = "dict[str, Any]"

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# fields of OpenAI's messages; those in the second row are accepted even if the template does not read them
_FIELDS: Final = {
    *("role", "content", "tool_calls", "tool_call_id"),
    *("name", "reasoning_content", "reasoning", "thinking", "refusal", "annotations"),
}
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")  # names of an earlier answer's reasoning
_MARK: Final = "fastspecmark"  # a word that no template writes by itself
_OTHER: Final = "fastspecword"
_CALL_ID: Final = "abcdef123"  # nine letters and digits, as Mistral's templates ask
_TRIAL_TOOL: Final[Message] = {
    "type": "function",
    "function": {
        "name": _OTHER,
        "description": _OTHER,
        "parameters": {"type": "object", "properties": {_OTHER: {"type": "string", "description": _OTHER}}},
    },
}
_SHOWN: Final = 80  # characters of a value that an error message repeats


class ConversationError(ValueError):
    """Raised for a conversation that the chat template cannot render. The message names the part and the next step."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """Forms of a message's content that a chat template can render, for one role.

    Attributes:
        text: True if the template renders content that is a text.
        parts: True if the template renders content that is a list of parts.
        failed: True if every trial raised an error, so that nothing is known about the template.
    """

    text: bool
    parts: bool
    failed: bool = False

    def of(self, content: str | list[Message]) -> str | list[Message]:
        """Returns `content` in a form that the template renders."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.parts and not self.text else content
        return content if self.parts else "".join(part["text"] for part in content)


@dataclass(frozen=True, slots=True)
class CallForm:
    """Forms of an assistant's tool calls that a chat template can render.

    Attributes:
        mapping: True if the template renders arguments that are a mapping.
        text: True if the template renders arguments that are JSON text.
        empty: True if missing content beside calls must be "" and not None. For None the template fails or writes
            "None".
    """

    mapping: bool
    text: bool
    empty: bool


class ChatTemplate:
    """Renders conversations by the chat template of a tokenizer.

    Args:
        tokenizer: the checkpoint's tokenizer. It has one chat template, several by name, or none.

    Attributes:
        tokenizer: the argument.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._contents: dict[tuple[str, str], ContentForm] = {}  # by template and role
        self._calls: dict[str, CallForm] = {}
        self._tools: dict[str, bool] = {}

    @property
    def exists(self) -> bool:
        """True if the checkpoint has a chat template."""
        return bool(self.tokenizer.chat_template)

    def text(self, *, tools: list[Message] | None = None) -> str:
        """Returns the Jinja text of the template for conversations with these tools.

        Returns an empty text if there is no template. `tools` may be None: no tools.
        """
        return str(self.tokenizer.get_chat_template(tools=tools)) if self.exists else ""

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[Message] | None = None,
        sanitize: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation, for a model that writes the assistant's next message.

        Args:
            messages: mappings with `role` and `content`, as in OpenAI's protocol.
            tools: JSON schemas of functions, as in OpenAI's protocol.
            sanitize: True encodes control tokens in messages and tools as plain text. See `sanitize_control_tokens` in
                transformers.
            variables: additional variables of the template.
            add_generation_prompt: True ends the ids with the header of a new message of the assistant.
            continue_final_message: True leaves the last message open, so that new text continues it.

        Raises:
            ConversationError: the template cannot render the conversation, or would leave a part of it out.
        """
        template = self.text(tools=tools)
        given = [self._message(template, index, dict(message)) for index, message in enumerate(messages)]
        if tools and not self._writes_tools(template):
            raise ConversationError("the chat template does not write tools into the prompt; leave tools out")
        options: dict[str, Any] = dict(variables or {})
        if sanitize:
            options["sanitize_control_tokens"] = True
            if "sanitize_control_tokens" not in inspect.signature(self.tokenizer.apply_chat_template).parameters:
                raise ConversationError("sanitize_control_tokens needs a newer transformers: upgrade it")
        offered: Any = tools  # transformers also takes functions, so its type is another list
        try:
            made: Any = self.tokenizer.apply_chat_template(
                given,
                tools=offered,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=True,
                **options,
            )
        except Exception as error:  # a template is the checkpoint's program: it may fail in any way
            raise ConversationError(f"the chat template refuses these messages: {_told(error)}") from error
        return list(made["input_ids"])

    def _message(self, template: str, index: int, message: Message) -> Message:
        """Returns message number `index` of a conversation in the form that the template renders.

        Raises:
            ConversationError: the message is invalid, or the template would leave a part of it out.
        """
        place = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise ConversationError(f"{place}.role must be one of {', '.join(ROLES)}, got {role!r}")
        message = {name: value for name, value in message.items() if value is not None or name == "content"}
        for name in message.keys() - _FIELDS:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConversationError(
                    f"{place}.{name} is not supported, and the chat template does not read it; leave it out"
                )
        message = _with_reasoning(template, message)
        calls = message.get("tool_calls")
        if calls:
            form = self._call_form(template)
            message["tool_calls"] = [
                _call(form, f"{place}.tool_calls[{number}]", call) for number, call in enumerate(_list(place, calls))
            ]
        content = message.get("content")
        if content is None:
            if not calls:
                raise ConversationError(f"{place}.content must be a text, got None")
            return message | {"content": "" if self._call_form(template).empty else None}
        content, known = _content(place, content), role
        shown = self._content_form(template, role)
        if role == "developer" and not (shown.text or shown.parts):  # OpenAI's newer name of the system role
            known = "system"
            shown = self._content_form(template, known)
        if content and not (shown.text or shown.parts or shown.failed):
            raise ConversationError(f"{place}: the chat template writes no messages of role {role}; leave it out")
        return message | {"role": known, "content": shown.of(content)}

    def _content_form(self, template: str, role: str) -> ContentForm:
        if (template, role) not in self._contents:
            text = self._shows(template, role, _MARK)
            parts = self._shows(template, role, [{"type": "text", "text": _MARK}])
            self._contents[template, role] = ContentForm(bool(text), bool(parts), text is None and parts is None)
        return self._contents[template, role]

    def _shows(self, template: str, role: str, content: str | list[Message]) -> bool | None:
        """Returns True if the template renders `content`, which contains _MARK, in a message of this role.

        Returns False if the template leaves it out, or prints a list of parts in Python's notation. Returns None if
        every trial conversation raised an error.
        """
        shown = None
        for conversation in _with_content(role, content):
            text = self._rendered(template, conversation)
            if text is not None:
                if _MARK in text and not re.search(r"""['"](type|text)['"]""", _around(text)):
                    return True
                shown = False
        return shown

    def _call_form(self, template: str) -> CallForm:
        if template not in self._calls:
            mapping, text = {_MARK: _OTHER}, json.dumps({_MARK: _OTHER})
            null = [self._rendered_call(template, arguments, None) for arguments in (mapping, text)]
            bare = [self._rendered_call(template, arguments, "") for arguments in (mapping, text)]
            of_mapping, of_text = (one or other or "" for one, other in zip(null, bare, strict=True))
            fails = not any(null) or any("None" in text for text in null if text)
            self._calls[template] = CallForm(
                mapping=_MARK in of_mapping and f"'{_MARK}'" not in of_mapping,
                text=_MARK in of_text and f'\\"{_MARK}' not in of_text,
                empty=fails and any(text and "None" not in text for text in bare),
            )
        return self._calls[template]

    def _rendered_call(self, template: str, arguments: Any, content: str | None) -> str | None:
        """Renders a trial conversation with a tool call.

        Returns None if the template raises an error or leaves the call out.

        Args:
            template: Jinja text of the template.
            arguments: arguments of the call, which contain _MARK.
            content: content of the message with the call.
        """
        call = _trial_call(arguments)
        asked: Message = {"role": "user", "content": _OTHER}
        called: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer: Message = {"role": "tool", "tool_call_id": _CALL_ID, "content": "1"}
        for conversation in ([asked, called, answer], [asked, called]):
            text = self._rendered(template, conversation)
            if text is not None and _MARK in text:
                return text
        return None

    def _writes_tools(self, template: str) -> bool:
        """True if tools change the rendered prompt, or if the trial conversation raised an error."""
        if template not in self._tools:
            plain: list[Message] = [{"role": "user", "content": self._content_form(template, "user").of(_OTHER)}]
            without, having = self._rendered(template, plain), self._rendered(template, plain, [_TRIAL_TOOL])
            self._tools[template] = without is None or having is None or without != having
        return self._tools[template]

    def _rendered(self, template: str, conversation: list[Message], tools: list[Message] | None = None) -> str | None:
        """Renders a trial conversation as text. Returns None if the template raises an error."""
        offered: Any = tools
        try:
            text: Any = self.tokenizer.apply_chat_template(
                conversation, tools=offered, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # noqa: BLE001  # as in `ids`
            return None
        return str(text)


def _with_reasoning(template: str, message: Message) -> Message:
    """Renames the reasoning field of an assistant's message to the field name that the template reads.

    A message with both content and tool calls is returned unchanged: gpt-oss's template refuses `thinking` there.
    """
    given = [name for name in _REASONING if name in message]
    reads = [name for name in _REASONING if re.search(rf"(?:\.|\[['\"]|get\(['\"]){name}\b", template)]
    if not given or not reads or set(given) & set(reads) or (message.get("content") and message.get("tool_calls")):
        return message
    return {name: value for name, value in message.items() if name not in given} | {reads[0]: message[given[0]]}


def _trial_call(arguments: Mapping[str, str] | str) -> Message:
    """Returns a tool call for a trial conversation."""
    return {"id": _CALL_ID, "type": "function", "function": {"name": _OTHER, "arguments": arguments}}


def _with_content(role: str, content: str | list[Message]) -> list[list[Message]]:
    """Returns trial conversations that contain a message with this role and content.

    They are several, because a template may refuse some orders of roles. Other user and system messages have content
    of the same type, a text or a list of parts.
    """
    word: Any = _OTHER if isinstance(content, str) else [{"type": "text", "text": _OTHER}]
    user, marked = {"role": "user", "content": word}, {"role": role, "content": content}
    if role == "user":
        return [[marked], [{"role": "system", "content": word}, marked]]
    if role == "assistant":
        return [[user, marked], [user, marked, user]]
    if role == "tool":
        told = marked | {"tool_call_id": _CALL_ID, "name": _OTHER}
        forms = ({_OTHER: _OTHER}, json.dumps({_OTHER: _OTHER}))
        calls = [
            {"role": "assistant", "content": each, "tool_calls": [_trial_call(arguments)]}
            for arguments in forms
            for each in (None, "")
        ]
        return [*([user, called, told] for called in calls), [user, told]]
    return [[marked, user], [marked, {"role": "user", "content": _OTHER}]]


def _around(text: str) -> str:
    """Returns the trial content (_MARK) with the 30 characters before and after it in the rendered text.

    If the template printed a list of parts instead of rendering it, the result contains the keys of the parts.
    """
    at = text.index(_MARK)
    return text[max(0, at - 30) : at + len(_MARK) + 30]


def _content(place: str, content: Any) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"{place}.content must be a text, got {str(content)[:_SHOWN]!r}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise ConversationError(
                f"{place}.content may have parts of type text alone, got {str(kind)[:_SHOWN]!r}; leave that part out"
            )
        if not isinstance(part.get("text"), str):
            raise ConversationError(f"{place}.content: the text of each part must be a text")
    return [{"type": "text", "text": part["text"]} for part in content]


def _list(place: str, calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise ConversationError(f"{place}.tool_calls must be a list, got {str(calls)[:_SHOWN]!r}")
    return calls


def _call(form: CallForm, place: str, call: Any) -> Message:
    """Returns a tool call whose arguments have the form that the template renders.

    Args:
        form: forms of calls that the template renders.
        place: path of the call in the request, for error messages.
        call: the call that the client sent.

    Raises:
        ConversationError: the call is invalid, or the template renders no calls.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{place} must have a function with a name and arguments, got {str(call)[:_SHOWN]!r}")
    if not (form.mapping or form.text):
        raise ConversationError(f"{place}: the chat template writes no tool calls; leave tool_calls out")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ConversationError(f"{place}.function.arguments must be JSON text: {error}") from None
    else:
        read = {} if arguments is None else arguments
    if not isinstance(read, dict):
        raise ConversationError(f"{place}.function.arguments must be a JSON object, got {str(arguments)[:_SHOWN]!r}")
    as_text = arguments if isinstance(arguments, str) and arguments else json.dumps(read, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": read if form.mapping else as_text}}


def _told(error: Exception) -> str:
    from jinja2 import TemplateError

    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
