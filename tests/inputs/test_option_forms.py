"""Options given as numbers of numpy and torch, as columns or as arrays mean what plain Python values mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from fastspec.errors import UnsupportedOption
from fastspec.grammar.spec import KINDS
from fastspec.inputs import options
from fastspec.inputs.options import derive_seed
from tests.helpers.options import resolve

# a sample of every option that takes numbers, ids or flags
SAMPLES: dict[str, Any] = {
    "max_new_tokens": 6,
    "max_length": 30,
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_length": 12,
    "min_new_tokens": 3,
    "num_return_sequences": 2,
    "eos_token_id": 5,
    "pad_token_id": 2,
    "return_dict_in_generate": True,
    "seed": 11,
    "num_speculative_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "stop_across_prompt": False,
}


LISTS: dict[str, Any] = {
    "eos_token_id": [2, 5],
    "suppress_tokens": [2, 5],
    "allowed_token_ids": [2, 5],
    "bad_words_ids": [[2], [5]],
    "stop_strings": ["a", "b"],
}


MAPPINGS: dict[str, Any] = {"logit_bias": {3: 0.5, 4: -0.5}, "sequence_bias": {(3,): 0.5}}


class Column:
    """Stands for a column of a data frame: an array by NumPy's protocol, and no sequence."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.values, dtype=dtype)


SCALARS = {
    "numpy": lambda value: np.asarray(value)[()],
    "small numpy": lambda value: np.asarray(value, dtype={int: "int16", float: "float16"}.get(type(value)))[()],
    "wide numpy": lambda value: np.longdouble(value) if isinstance(value, float) else np.asarray(value)[()],
    "0-d array": np.asarray,
    "0-d tensor": torch.tensor,
    "array of one": lambda value: np.asarray([value]),
    "tensor of one": lambda value: torch.tensor([value]),
}


COLUMNS: dict[str, Any] = {
    "array": np.asarray,
    "tensor": torch.tensor,
    "column": Column,
    "numpy scalars": lambda values: list(np.asarray(values)),
    "0-d tensors": lambda values: [torch.tensor(value) for value in values],
}


def test_tensors_of_one_number_are_taken_as_that_number() -> None:
    chosen = resolve(
        do_sample=torch.tensor(True),
        temperature=torch.tensor(0.5),
        top_k=torch.tensor(3),
        seed=torch.tensor(5),
        pad_token_id=torch.tensor(2),
        max_new_tokens=torch.tensor(4),
    )
    assert chosen.rows[0].temperature == 0.5
    assert chosen.rows[0].top_k == 3
    assert chosen.rows[0].seed == derive_seed(5, 0, 0)
    assert (chosen.pad_token_id, chosen.max_new_tokens) == (2, 4)


def test_every_option_has_a_sample_here() -> None:
    texts = {*KINDS, "predictions", "session", "tokenizer", "logprobs_mode"}
    assert {*options.SUPPORTED, *options.OWN} == SAMPLES.keys() | LISTS.keys() | MAPPINGS.keys() | texts


@pytest.mark.parametrize("form", SCALARS)
@pytest.mark.parametrize("name", SAMPLES)
def test_scalars_of_numpy_and_torch_are_taken_as_numbers(name: str, form: str) -> None:
    if name == "seed" and form.endswith("of one"):
        return  # of a list every row takes its own, as it is
    others = {"do_sample": True, "seed": 1, **({} if name == "max_length" else {"max_new_tokens": 9})}
    assert resolve(**others | {name: SCALARS[form](SAMPLES[name])}) == resolve(**others | {name: SAMPLES[name]})


@pytest.mark.parametrize("form", COLUMNS)
@pytest.mark.parametrize("name", [*options.PER_ROW, "presence_penalty", "frequency_penalty", "num_speculative_tokens"])
def test_columns_are_taken_as_one_value_per_prompt(name: str, form: str) -> None:
    values = [SAMPLES[name], SAMPLES[name]]
    others = {"num_rows": 2, "do_sample": True, "seed": 1}
    assert resolve(**others, **{name: COLUMNS[form](values)}) == resolve(**others, **{name: values})


@pytest.mark.parametrize("form", ["array", "column", "numpy scalars", "tensor"])
@pytest.mark.parametrize("name", LISTS)
def test_arrays_are_taken_as_lists(name: str, form: str) -> None:
    if form == "tensor" and name == "stop_strings":
        return  # no tensor holds text
    assert resolve(seed=1, **{name: COLUMNS[form](LISTS[name])}) == resolve(seed=1, **{name: LISTS[name]})


def test_seeds_biases_and_config_fields_may_be_arrays() -> None:
    assert resolve(num_rows=2, seed=np.array([3, -4])) == resolve(num_rows=2, seed=[3, -4])
    number = np.asarray([0.5], dtype=np.float32)[0]
    assert resolve(seed=1, logit_bias={np.int64(3): number}) == resolve(seed=1, logit_bias={3: 0.5})
    assert resolve(seed=1, sequence_bias=[[np.array([3]), number]]) == resolve(seed=1, sequence_bias=[[[3], 0.5]])
    rows = np.array([[2, 5], [3, 4]])
    assert resolve(num_rows=2, seed=1, allowed_token_ids=rows) == resolve(
        num_rows=2, seed=1, allowed_token_ids=rows.tolist()
    )
    config = GenerationConfig(eos_token_id=[4])
    config.eos_token_id, config.max_new_tokens = np.array([4, 6]), np.int64(3)
    assert (resolve(given=config).stop_ids, resolve(given=config).max_new_tokens) == ((4, 6), 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_new_tokens": np.float32(2.5)}, "max_new_tokens must be a whole number at least 1, got 2.5"),
        ({"max_new_tokens": np.array([2, 3])}, "max_new_tokens must be a whole number"),
        ({"top_k": np.bool_(True)}, "top_k must be a whole number"),
        ({"temperature": np.float64("nan")}, "temperature must be a number"),
        ({"num_beams": np.int64(2)}, "num_beams"),
        ({"num_beams": np.array([1, 1])}, "num_beams"),
    ],
    ids=str,
)
def test_scalars_of_numpy_are_checked_like_numbers(bad: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UnsupportedOption), match=message):
        resolve(do_sample=True, **bad)
