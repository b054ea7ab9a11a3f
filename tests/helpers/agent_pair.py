"""A scripted pair for agents: it thinks and calls a tool, and after the tool's result it answers.

`python -m tests.helpers.agent_pair FOLDER` writes it for `fastspec serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.helpers.chat_templates import PUBLISHED
from tests.helpers.scripted import scripted_pair

REASONING: Final = "They ask."
BEFORE: Final = "I look."
ARGUMENTS: Final = '{"city":"Paris","unit":"C"}'
AFTER: Final = "Rain comes."
MARKS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL: Final = f'<tool_call>\n{{"name": "Weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
# a prompt that ends with a tool's result has an end of its own, so that another script follows
TEMPLATE: Final = (
    PUBLISHED["json calls"].text
    + "{% if add_generation_prompt and messages[-1].role == 'tool' %}<think></think>\n\n{% endif %}"
)


def agent_pair(folder: Path, *, reasons: bool = True) -> tuple[Path, Path]:
    """Directories of (target, draft).

    Args:
        folder: for them.
        reasons: True if the model thinks before its call.
    """
    before = f"<think>\n{REASONING}\n</think>\n\n{BEFORE}\n" if reasons else f"{BEFORE}\n"
    return scripted_pair(
        folder,
        TEMPLATE,
        before + CALL,
        "<|im_start|>assistant\n",
        others={"<think></think>\n\n": AFTER},
        marks=MARKS,
        special=False,
        pieces=False,
    )


if __name__ == "__main__":
    print(*agent_pair(Path(sys.argv[1])))
