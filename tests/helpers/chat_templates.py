"""Chat templates in the manner of published ones, written anew: how they read content, tool calls and tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A template and what it reads.

    Attributes:
        text: the template.
        content: "text", "parts" or "both": forms of content that it writes, of user messages.
        arguments: "mapping", "text" or "both" of a tool call; None: it writes no tool calls.
        tools: it writes tools.
        system, tool: it writes messages of these roles.
        null: a tool call's content may be None.
        system_text: the content of system messages is a text, whatever `content` says.
    """

    text: str
    content: str = "text"
    arguments: str | None = None
    tools: bool = False
    system: bool = True
    tool: bool = False
    null: bool = True
    system_text: bool = False


_START = "{% for message in messages %}"
_CHATML = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_PARTS = "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}"
_BOTH = "{% if message['content'] is string %}{{ message['content'] }}{% else %}" + _PARTS + "{% endif %}"
_INST = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set head = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ (head if loop.first else '') + message['content'] | trim }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
_TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _START
    + "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_TURNS_OF_PARTS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
    "{% set head = messages[0]['content'] + '\n\n' %}{% else %}{% set head = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ head if loop.first else '' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% elif message['content'] is iterable %}"
    "{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
_HEADERS = (
    "{{ bos_token }}" + _START + "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_HEADERS_TOOLS = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    + _START
    + "{% if message.role == 'tool' or message.role == 'ipython' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{% if message.content is mapping or (message.content is iterable and message.content is not string) %}"
    "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>"
    "{% elif 'tool_calls' in message %}{% if not message.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def _json_calls(arguments: str, content: str = "{{ message.content or '' }}") -> str:
    return (
        "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
        + _START
        + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{% elif message.tool_calls %}<|im_start|>assistant\n" + content + "{% for tool_call in message.tool_calls %}"
        "{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
        '\n<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": '
        + arguments
        + "}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}" + _ASK
    )


_XML_CALLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}<function><name>{{ tool.function.name }}</name></function>{% endfor %}</tools><|im_end|>\n{% endif %}"
    + _START
    + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>\n"
    "{% elif message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant\n"
    "{% if message.content is defined and message.content is string and message.content | trim | length > 0 %}{{ message.content | trim }}\n{% endif %}"
    "{% for tool_call in message.tool_calls %}<tool_call>\n<function={{ tool_call.function.name }}>\n"
    "{% for name, value in tool_call.function.arguments | items %}<parameter={{ name }}>\n{{ value | string if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASK
)
_TEXT_CALLS = (
    "{{ bos_token }}"
    + _START
    + "{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}{% elif message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' and 'tool_calls' in message %}<｜Assistant｜>"
    "{% for tool in message['tool_calls'] %}<｜tool▁call▁begin｜>{{ tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{% elif message['role'] == 'tool' %}<｜tool▁output▁begin｜>{{ message['content'] }}<｜tool▁output▁end｜>"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜>{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_BRACKETS = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + _START
    + "{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]{% elif message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'] }}[/SYSTEM_PROMPT]"
    "{% elif message['tool_calls'] is defined and message['tool_calls'] is not none %}[TOOL_CALLS] ["
    "{% for call in message['tool_calls'] %}{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif message['role'] == 'tool' %}[TOOL_RESULTS] {\"content\": {{ message['content'] }}, \"call_id\": \"{{ message['tool_call_id'] }}\"}[/TOOL_RESULTS]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>namespace functions {{ '{' }}{% for tool in tools %}type {{ tool.function.name }} = any;{% endfor %}{{ '}' }}<|end|>{% endif %}"
    + _START
    + "{% if message.role == 'assistant' and message.tool_calls %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif message.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ message.content | tojson }}<|end|>"
    "{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if message.role == 'system' else message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
_ARG_PAIRS = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}{% endif %}"
    "{% macro visible(content) %}{% if content is string %}{{ content }}{% elif content is iterable and content is not mapping %}"
    "{% for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}{% elif item is string %}{{ item }}{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}"
    + _START
    + "{% if message.role == 'user' %}<|user|>\n{{ visible(message.content) }}{% elif message.role == 'assistant' %}<|assistant|>\n{{ visible(message.content) if message.content }}"
    "{% for tc in message.tool_calls or [] %}<tool_call>{{ tc.function.name }}{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% elif message.role == 'tool' %}<|observation|><tool_response>{{ visible(message.content) }}</tool_response>{% else %}<|system|>\n{{ visible(message.content) }}{% endif %}{% endfor %}<|assistant|>"
)


def _marks(user: str, assistant: str, system: str = "{{ message['content'] }}\n", end: str = "\n") -> str:
    return (
        _START
        + "{% if message['role'] == 'system' %}"
        + system
        + "{% elif message['role'] == 'user' %}"
        + user
        + " {{ message['content'] }}"
        + end
        + "{% elif message['role'] == 'assistant' %}"
        + assistant
        + " {{ message['content'] }}{{ eos_token }}"
        + end
        + "{% endif %}{% endfor %}"
        + assistant
    )


CALLS = {"tools": True, "tool": True}
PUBLISHED = {
    "chatml": Published(_START + _CHATML + _ASK, tool=True),
    "chatml default system": Published(
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        + _START
        + _CHATML
        + _ASK,
        tool=True,
    ),
    "json calls": Published(_json_calls("{{ tool_call.arguments | tojson }}"), arguments="mapping", **CALLS),
    "json calls of both": Published(
        _json_calls("{{ tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}"),
        arguments="both",
        **CALLS,
    ),
    "json calls that add to the content": Published(
        _json_calls("{{ tool_call.arguments | tojson }}", "{{ message.content + '' }}"),
        arguments="mapping",
        null=False,
        **CALLS,
    ),
    "xml calls": Published(_XML_CALLS, arguments="mapping", **CALLS),
    "text calls": Published(_TEXT_CALLS, arguments="text", tool=True),
    "calls in brackets": Published(_BRACKETS, arguments="both", **CALLS),
    "channels": Published(_CHANNELS, arguments="mapping", **CALLS),
    "pairs of arguments": Published(_ARG_PAIRS, content="both", arguments="mapping", **CALLS),
    "headers": Published(_HEADERS, tool=True),
    "headers and calls": Published(_HEADERS_TOOLS, arguments="mapping", **CALLS),
    "headers of parts": Published(
        "{{ bos_token }}"
        + _START
        + "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        + _BOTH
        + "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
        content="both",
        tool=True,
    ),
    "parts alone": Published(
        _START + "{{ message['role'] | capitalize }}: " + _PARTS + "<end>\n{% endfor %}Assistant:",
        content="parts",
        tool=True,
    ),
    "parts, system as text": Published(
        _START
        + "{% if message['role'] == 'system' %}{{ message['content'] }}\n{% else %}{{ message['role'] }}: "
        + _PARTS
        + "\n{% endif %}{% endfor %}assistant:",
        content="parts",
        tool=True,
        system_text=True,
    ),
    "parts with images first": Published(
        _START
        + "<|im_start|>{{ message['role'] }}\n{% for c in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
        "{% for c in message['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
        + _ASK,
        content="parts",
        tool=True,
    ),
    "both": Published(
        _START + "<|im_start|>{{ message['role'] }}\n" + _BOTH + "<|im_end|>\n{% endfor %}" + _ASK,
        content="both",
        tool=True,
    ),
    "inst": Published(_INST),
    "inst without system": Published(
        "{{ bos_token }}"
        + _START
        + "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
        system=False,
        tool=True,
    ),
    "turns": Published(_TURNS, system=False, tool=True),
    "turns of both": Published(_TURNS_OF_PARTS, content="both", tool=True),
    "role in a mark": Published(
        _START + "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}<|assistant|>",
        tool=True,
    ),
    "role in a mark, lines": Published(
        _START + "<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n{% endfor %}<|assistant|>\n", tool=True
    ),
    "user and assistant": Published(_marks("USER:", "ASSISTANT:", end=" ")),
    "human and assistant": Published(_marks("### Human:", "### Assistant:")),
    "instruction": Published(_marks("### Instruction:\n", "### Response:\n", end="\n\n")),
    "user first": Published(_marks("GPT4 User:", "GPT4 Assistant:", end="<|end_of_turn|>")),
    "start of role": Published(
        _START
        + "<|start_of_role|>{{ message['role'] }}<|end_of_role|>{{ message['content'] }}<|end_of_text|>\n{% endfor %}<|start_of_role|>assistant<|end_of_role|>",
        tool=True,
    ),
    "turn tokens": Published(
        "{{ bos_token }}"
        + _START
        + "<|START_OF_TURN_TOKEN|>{% if message['role'] == 'user' %}<|USER_TOKEN|>{% elif message['role'] == 'system' %}<|SYSTEM_TOKEN|>{% else %}<|CHATBOT_TOKEN|>{% endif %}"
        "{{ message['content'].strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        tool=True,
    ),
    "bracketed roles": Published(
        _START + "[|{{ message['role'] }}|]{{ message['content'] }}[|endofturn|]\n{% endfor %}[|assistant|]", tool=True
    ),
}
