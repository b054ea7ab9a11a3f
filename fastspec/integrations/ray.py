"""Continues many prompts on many machines with Ray Data: a class for `Dataset.map_batches`. Needs Ray.

A replica is one process with one generator, on one GPU or on CPUs. Ray starts the replicas, sends them batches and
shows progress. If a replica dies, Ray sends its batch to another one. Replicas do not communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastspec.errors import InvalidLogits, UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.inputs.table import OPTIONS
from fastspec.inputs.values import is_list, listed
from fastspec.output import GenerateOutput

Columns = dict[str, Any]
_ADDED = frozenset(
    ["generated_text", "generated_ids", "finish_reason", "new_tokens", "target_steps", "drafted", "accepted"]
)


class Generate:
    """Continues the prompt in every row of a batch. For `ray.data.Dataset.map_batches`, batch format "numpy".

    Calling the object adds these columns, with one value per row: `generated_text` (if there is a tokenizer),
    `generated_ids` (the new tokens), `finish_reason`, and four numbers. These are `new_tokens`, `target_steps` (decode
    steps), `drafted` (draft tokens) and `accepted` (accepted draft tokens). The finish reason is "stop", "length", or
    "error" if logits were invalid. With the option `logprobs` it also adds `logprobs` of the new tokens.

    Args:
        target, draft: directories or Hub ids that every machine can read.
        prompt_column: name of the column with prompts, which are texts or lists of token ids.
        option_columns: names of columns with generation options for each row. A column has the name of its option,
            such as `seed` or `temperature`.
        options: generation options for all rows.
        generator_options: arguments of `FastSpecGenerator`. `max_batch_size` should be the size of Ray's batches, or a
            divisor of it.

    Raises:
        UnsupportedOption: an option that `generate` does not have, or one that is given twice.
        KeyError: a batch lacks one of these columns.
        ValueError: a batch already has a column with the name of an added one, or a prompt is neither text nor ids.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        *,
        prompt_column: str = "prompt",
        option_columns: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        generator_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._prompts, self._columns, self._options = prompt_column, tuple(option_columns), dict(options or {})
        _check(self._columns, self._options)
        self._generator = FastSpecGenerator(target, draft, **{"progress": False, **(generator_options or {})})

    def __call__(self, batch: Columns) -> Columns:
        """Continues the prompts of a batch, and returns the batch with the columns of results."""
        missing = [name for name in (self._prompts, *self._columns) if name not in batch]
        if missing:
            raise KeyError(f"a batch has no column {missing}; it has {list(batch)}")
        self._check_free(batch)
        prompts = [self._ids(prompt) for prompt in batch[self._prompts]]
        of_rows = {name: [_plain(value) for value in batch[name]] for name in self._columns}
        output = self._generate(prompts, {**self._options, **of_rows})
        added: Columns = {
            "generated_ids": _objects([np.asarray(tokens, dtype=np.int64) for tokens in output.new_tokens]),
            "finish_reason": np.asarray(output.finish_reasons),
            "new_tokens": np.asarray([row.emitted for row in output.stats.rows]),
            "target_steps": np.asarray([row.steps for row in output.stats.rows]),
            "drafted": np.asarray([row.drafted for row in output.stats.rows]),
            "accepted": np.asarray([row.accepted for row in output.stats.rows]),
        }
        if output.logprobs is not None:
            added["logprobs"] = _objects([np.asarray(values, dtype=np.float32) for values in output.logprobs])
        if self._generator.has_tokenizer:
            decoded = (self._generator.tokenizer.decode(ids, skip_special_tokens=True) for ids in output.new_tokens)
            added["generated_text"] = _objects(output.texts or list(decoded))
        return {**batch, **added}

    def _check_free(self, batch: Columns) -> None:
        """Refuses a batch that already has a column with the name of a result."""
        added = _ADDED if self._options.get("logprobs") in (None, False) else {*_ADDED, "logprobs"}
        if taken := sorted(added & batch.keys()):
            raise ValueError(
                f"a batch has columns {', '.join(taken)}, which the results would replace; rename them (rename_columns)"
            )

    def _generate(self, prompts: list[list[int]], options: dict[str, Any]) -> GenerateOutput:
        """Continues all prompts. Invalid logits end only their own row, and not the whole batch."""
        found: object
        try:
            found = self._generator.generate(prompts, return_dict_in_generate=True, **options)
        except InvalidLogits as error:
            found = error.output
        assert isinstance(found, GenerateOutput)
        return found

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            if not is_list(prompt):
                raise ValueError(
                    f"column {self._prompts!r} holds {type(prompt).__name__}; wanted texts, or lists of token ids"
                )
            return listed(prompt)
        if not self._generator.has_tokenizer:
            raise ValueError("the target has no tokenizer; give prompts as lists of token ids")
        ids: list[int] = self._generator.tokenizer(prompt)["input_ids"]
        return ids


def _check(columns: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Refuses options that `generate` does not have or that are given twice, before a model is loaded.

    Args:
        columns: names of columns with options for each row.
        options: options for all rows.
    """
    known = {option.keyword for option in OPTIONS} - {"return_dict_in_generate", "num_return_sequences"}
    if unknown := sorted({*options} - known):
        raise UnsupportedOption(
            f"options {', '.join(unknown)} are not known, wanted some of {', '.join(sorted(known))}"
        )
    of_rows = {option.keyword for option in OPTIONS if option.per_row}
    if unknown := sorted({*columns} - of_rows):
        raise UnsupportedOption(
            f"option_columns {', '.join(unknown)}: no row has such an option of its own, wanted some of "
            f"{', '.join(sorted(of_rows))}"
        )
    if twice := sorted({*columns} & {*options}):
        raise UnsupportedOption(f"{', '.join(twice)}: given for all rows and as a column; leave one out")


def _plain(value: Any) -> Any:
    """Converts a NumPy value of a column to a Python value. Returns other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _objects(values: Sequence[Any]) -> Any:
    """Makes a column of objects, one for each row. NumPy alone would make a matrix from lists of equal length."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
