"""A pair of tiny models with a tokenizer of bytes and a chat template, for tests of handles and of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastspec import FastSpecGenerator
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tokenizers import byte_tokenizer

END = 258
TEMPLATE = (
    "{% for message in messages %}{% if message.content[:5] == 'fail:' %}{{ 1 / 0 }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if how %}({{ how }}){% endif %}"
)


def small_pair(folder: Path, *, template: bool = True, marks: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Directories of (target, draft); greedy drafts are accepted now and then, and texts are noise without end.

    Args:
        folder: for them.
        template: False: they have no chat template.
        marks: texts that are one token each, beside the bytes.
    """
    sizes: dict[str, Any] = {"vocab_size": END + 1 + len(marks), "eos_token_id": END, "bos_token_id": None, "std": 0.12}
    pair = folder / "target", folder / "draft"
    for path, layers in zip(pair, (2, 1), strict=True):
        make_checkpoint(path, "llama2", seed=3, num_hidden_layers=layers, **sizes)
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(list(marks))
        tokenizer.chat_template = TEMPLATE if template else None
        tokenizer.save_pretrained(path)
    return pair


def opened(pair: tuple[Path, Path], **options: Any) -> FastSpecGenerator:
    return FastSpecGenerator(*pair, **{"max_length": 160, "device": "cpu", "progress": False, **options})
