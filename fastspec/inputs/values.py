"""Checks values of options: single values, lists with one value per prompt, and token ids. Errors name the option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastspec.errors import UnsupportedOption


def is_array(value: Any) -> bool:
    """True for a tensor, a NumPy array, or another object with `__array__`, such as a column of a data frame.

    False for a NumPy scalar.
    """
    return isinstance(value, torch.Tensor) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def is_list(value: Any) -> bool:
    """True for a sequence other than text, and for an array with at least one dimension."""
    if is_array(value):
        return bool(value.ndim if isinstance(value, torch.Tensor) else np.ndim(value))
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def listed(value: Any) -> list[Any]:
    """Converts an object for which `is_list` is true to a list. Array elements become Python numbers."""
    if not is_array(value):
        return list(value)
    values: list[Any] = value.tolist() if isinstance(value, torch.Tensor) else np.asarray(value).tolist()
    return values


def scalar(value: Any) -> Any:
    """Converts an array of one value or a NumPy scalar to a Python number. Returns anything else unchanged."""
    if isinstance(value, np.bool_ | np.integer | np.floating):  # item() does not convert some wide floats
        return (bool if isinstance(value, np.bool_) else int if isinstance(value, np.integer) else float)(value)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if is_array(value):
        array = np.asarray(value)
        return scalar(array.reshape(())[()]) if array.size == 1 else value
    return value


def column(name: str, value: Any, num_rows: int) -> list[Any]:
    """Returns a list with one value per prompt: repeats a single value, and checks the length of a list.

    Args:
        name: name of the option, for the error.
        value: a single value, or a list.
        num_rows: number of prompts.
    """
    return per_row(name, listed(value), num_rows) if is_list(value) else [value] * num_rows


def per_row(name: str, values: list[Any], num_rows: int, of: str = "prompts") -> list[Any]:
    """Returns `values` if there are `num_rows` of them.

    Args:
        name: name of the option, for the error.
        values: the values.
        num_rows: required number of values.
        of: noun for the error, such as "prompts": the things that have one value each.

    Raises:
        ValueError: the number of values is not `num_rows`.
    """
    if len(values) != num_rows:
        raise ValueError(f"{name} has {len(values)} values for {num_rows} {of}; give one value, or one per prompt")
    return values


def whole(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Checks that a value is a whole number in low..high, and returns it as an int. `high` None: no upper limit.

    Raises:
        ValueError: the check fails. The message begins with `name`.
    """
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be a whole number {limit}, got {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """Checks that a value is a bool or None, and returns it as a bool. None gives False.

    Raises:
        ValueError: the check fails. The message begins with `name`.
    """
    value = scalar(value)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def real(name: str, value: Any, default: float, *, low: float, high: float = math.inf) -> float:
    """Checks that a value is a finite number in low..high, and returns it as a float. None gives the default.

    Raises:
        ValueError: the check fails. The message begins with `name`.
    """
    value = scalar(value)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value == math.inf:
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be a number {limit}, got {value!r}")
    return float(value)


def token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Checks a list or set of token ids below vocab_size. Returns each id once, ascending. None gives ()."""
    if value is None:
        return ()
    if not is_list(value) and not isinstance(value, set | frozenset):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(sorted({whole(f"{name}: an id", one, low=0, high=vocab_size - 1) for one in listed(value)}))


def id_columns(name: str, value: Any, num_rows: int, vocab_size: int) -> list[tuple[int, ...] | None]:
    """Returns the token ids of each prompt, ascending and each once. An entry is None if its prompt has no list.

    `value` is one list for all prompts, or a list with one list (or None) per prompt.
    """
    if value is None:
        return [None] * num_rows
    if is_list(value) and any(is_list(one) or one is None for one in listed(value)):
        rows = per_row(name, listed(value), num_rows)
        return [None if row is None else token_ids(name, row, vocab_size) for row in rows]
    return [token_ids(name, value, vocab_size)] * num_rows


def id_sequences(name: str, value: Any, num_rows: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Returns the sequence of token ids of each prompt, in the given order. An entry is () if its prompt has no list.

    `value` is one list for all prompts, or a list with one list (or None) per prompt.
    """
    if value is None:
        return [()] * num_rows
    if not is_list(value):
        raise ValueError(f"{name} must be a text or a list of token ids, or one per prompt, got {value!r}")
    rows = listed(value)
    if any(is_list(one) or one is None for one in rows):
        return [_sequence(name, row, vocab_size) for row in per_row(name, rows, num_rows)]
    return [_sequence(name, rows, vocab_size)] * num_rows


def _sequence(name: str, row: Any, vocab_size: int) -> tuple[int, ...]:
    if row is not None and not is_list(row):
        raise ValueError(f"{name} must be a text or a list of token ids, or one per prompt, got {row!r} for one")
    return tuple(
        whole(f"{name}: an id", one, low=0, high=vocab_size - 1) for one in ([] if row is None else listed(row))
    )


def texts(name: str, value: Any, num_rows: int) -> list[str | None]:
    """Returns the text, or None, of each prompt. `value` is one text for all prompts, or a list with one per prompt."""
    rows = column(name, value, num_rows)
    for one in rows:
        if one is not None and not (isinstance(one, str) and one):
            raise ValueError(f"{name} must be a non-empty text, or one per prompt, got {one!r}")
    return rows


def single_words(name: str, value: Any, num_rows: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Reads transformers' `bad_words_ids`: [[id], [id], ...], or a list with one such list (or None) per prompt.

    Returns:
        The ids of each prompt, ascending and each once.

    Raises:
        UnsupportedOption: an inner list has several ids.
    """
    if value is None:
        return [()] * num_rows
    if not is_list(value) or not all(one is None or is_list(one) for one in listed(value)):
        raise ValueError(f"{name} must be a list of lists of token ids, got {value!r}")
    words = listed(value)
    if any(one is None or any(is_list(two) for two in listed(one)) for one in words):
        rows = per_row(name, words, num_rows)
    else:
        rows = [words] * num_rows
    return [token_ids(name, [_only(name, word) for word in row or ()], vocab_size) for row in rows]


def _only(name: str, word: Any) -> Any:
    ids = listed(word) if is_list(word) else []
    if not ids:
        raise ValueError(f"{name} must hold non-empty lists of token ids, got {word!r}")
    if len(ids) > 1:
        raise UnsupportedOption(
            f"{name} holds {ids!r}, a sequence of {len(ids)} ids; only single ids are supported: give lists "
            "of one id each, or end the text with stop_strings"
        )
    return ids[0]


def biases(name: str, value: Any, num_rows: int, vocab_size: int) -> list[dict[int, float]]:
    """Reads one dict from ids to biases for all prompts, or a list with one dict (or None) per prompt.

    Returns:
        A dict for each prompt.
    """
    rows = [value] * num_rows if value is None or isinstance(value, Mapping) else column(name, value, num_rows)
    return [_bias(name, row, vocab_size) for row in rows]


def _bias(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict from token id to bias, or one per prompt, got {value!r}")
    return {whole(f"{name}: an id", key, low=0, high=vocab_size - 1): _shift(name, bias) for key, bias in value.items()}


def _shift(name: str, value: Any) -> float:
    """Checks the bias of one token id, a number or -inf, and returns it as a float. `name` is the option's."""
    if value is None:
        raise ValueError(f"{name} must map ids to numbers (or -inf), got None for one; leave that id out")
    return -math.inf if scalar(value) == -math.inf else real(name, value, 0.0, low=-1e30, high=1e30)


def sequence_biases(name: str, value: Any, vocab_size: int) -> dict[int, float]:
    """Reads transformers' `sequence_bias`, [[[id], bias], ...] or {(id,): bias}. Returns biases by id."""
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, Mapping) else listed(value) if is_list(value) else value
    if not is_list(pairs) or not all(is_list(pair) and len(pair) == 2 and is_list(pair[0]) for pair in pairs):
        raise ValueError(f"{name} must be a list of [[id], bias] or a dict from (id,) to bias, got {value!r}")
    return _bias(name, {_only(name, word): bias for word, bias in pairs}, vocab_size)
