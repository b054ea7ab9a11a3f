"""`resolve` of `fastspec.inputs.options`, with a vocabulary, a prompt and a context that tests share."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from fastspec.inputs import options
from fastspec.inputs.options import Options

VOCAB = 1000


def resolve(
    checkpoint: GenerationConfig | None = None,
    given: GenerationConfig | None = None,
    num_rows: int = 1,
    prompt_length: int = 10,
    context: int = 512,
    **keywords: Any,
) -> Options:
    return options.resolve(
        checkpoint,
        given,
        keywords,
        num_rows=num_rows,
        prompt_length=prompt_length,
        vocab_size=VOCAB,
        context=context,
    )
