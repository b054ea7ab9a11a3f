"""Batches as Ray hands them to `Generate`, without Ray: what is refused, and that nothing of a batch is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastspec import demo_pair
from fastspec.integrations.ray import Generate


@pytest.fixture(scope="module")
def generate() -> Iterator[Generate]:
    made = Generate(
        *map(str, demo_pair()),
        options={"max_new_tokens": 3},
        generator_options={"device": "cpu", "max_length": 64, "max_batch_size": 2},
    )
    yield made
    made._generator.close()


def column(*values: Any) -> Any:
    made = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        made[index] = value
    return made


def test_texts_and_ids_are_continued(generate: Generate) -> None:
    out = generate({"prompt": column("import", np.asarray([5, 6]), [7]), "logprobs": column(1, 2, 3)})
    assert [len(ids) for ids in out["generated_ids"]] == [3, 3, 3]
    assert out["logprobs"].tolist() == [1, 2, 3], "a column of the caller's, for none were asked for"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"abc", "column 'prompt' holds bytes; wanted texts, or lists of token ids"),
        (None, "column 'prompt' holds NoneType"),
        (3, "column 'prompt' holds int"),
        (np.asarray([5.7, 6.2]), "token id"),
        ([5, None], "token id"),
    ],
)
def test_a_prompt_that_is_none_is_refused(generate: Generate, prompt: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        generate({"prompt": column("import", prompt)})


@pytest.mark.parametrize("name", ["generated_text", "new_tokens"])
def test_a_column_of_the_batch_is_not_replaced(generate: Generate, name: str) -> None:
    with pytest.raises(ValueError, match=f"a batch has columns {name}, which the results would replace"):
        generate({"prompt": column("import"), name: column("mine")})
