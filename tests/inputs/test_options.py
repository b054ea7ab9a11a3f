"""What options mean: merged as transformers merges them, with its defaults, ranges and stop ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from fastspec.grammar.spec import GrammarSpec
from fastspec.inputs.options import derive_seed
from tests.helpers.checkpoints import make_model
from tests.helpers.options import VOCAB, resolve


def test_defaults_are_transformers_defaults() -> None:
    chosen = resolve()
    assert chosen.max_new_tokens == 20
    assert chosen.rows[0].temperature == 0.0  # do_sample is off by default
    assert chosen.stop_ids == ()
    assert not chosen.return_dict


def test_transformers_default_top_k_applies_to_sampling() -> None:
    row = resolve(do_sample=True).rows[0]
    assert (row.temperature, row.top_k, row.top_p, row.min_p) == (1.0, 50, 1.0, 0.0)
    assert resolve(do_sample=True, top_k=0).rows[0].top_k == 0


def test_keywords_beat_the_config_and_the_config_beats_the_checkpoint() -> None:
    checkpoint = GenerationConfig(eos_token_id=[5, 6], temperature=0.6, top_p=0.9, do_sample=True, pad_token_id=9)
    given = GenerationConfig(temperature=0.7, max_new_tokens=3)
    chosen = resolve(checkpoint, given, temperature=0.8)
    assert chosen.rows[0].temperature == 0.8
    assert chosen.rows[0].top_p == 0.9
    assert chosen.max_new_tokens == 3
    assert chosen.stop_ids == (5, 6)
    assert chosen.pad_token_id == 9
    assert resolve(checkpoint, given).rows[0].temperature == 0.7
    assert given.top_p is None, "the caller's config is not written to"


@pytest.mark.parametrize(
    ("checkpoint", "given", "keywords"),
    [
        ({}, None, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [5, 6]}, None, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.7}, {}),
        ({"temperature": 0.6, "do_sample": True}, {"top_k": 7, "min_p": 0.1}, {"temperature": 0.9, "eos_token_id": 3}),
        ({"eos_token_id": 4, "pad_token_id": 2}, {"do_sample": True}, {"top_p": 0.5, "max_new_tokens": 9}),
    ],
    ids=str,
)
def test_merging_equals_transformers_own(
    checkpoint: dict[str, Any], given: dict[str, Any] | None, keywords: dict[str, Any]
) -> None:
    model = make_model("llama2")
    model.generation_config = GenerationConfig(**checkpoint)
    theirs, _ = model._prepare_generation_config(None if given is None else GenerationConfig(**given), **keywords)
    ours = resolve(GenerationConfig(**checkpoint), None if given is None else GenerationConfig(**given), **keywords)
    row = ours.rows[0]
    if theirs.do_sample:
        assert (row.temperature, row.top_k, row.top_p) == (theirs.temperature, theirs.top_k, theirs.top_p)
        assert row.min_p == (theirs.min_p or 0.0)
    else:
        assert row.temperature == 0.0
    eos = theirs.eos_token_id
    assert ours.stop_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))


def test_max_new_tokens_and_max_length_give_the_number_of_new_tokens() -> None:
    assert resolve(max_new_tokens=7).max_new_tokens == 7
    assert resolve(max_length=30).max_new_tokens == 20
    assert resolve(max_length=30, max_new_tokens=2).max_new_tokens == 2
    assert resolve(prompt_length=500, context=512).max_new_tokens == 12
    with pytest.raises(ValueError, match="no room after a prompt of 10"):
        resolve(max_length=10)
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="max_new_tokens"):
            resolve(max_new_tokens=bad)


def test_stop_ids_are_one_id_a_list_or_none_and_are_checked() -> None:
    assert resolve(eos_token_id=None).stop_ids == ()
    assert resolve(GenerationConfig(eos_token_id=4), eos_token_id=None).stop_ids == ()
    assert resolve(eos_token_id=4).stop_ids == (4,)
    assert resolve(eos_token_id=torch.tensor([4, 5])).stop_ids == (4, 5)
    for bad in (-1, VOCAB, [3, VOCAB], 1.5):
        with pytest.raises(ValueError, match="eos_token_id"):
            resolve(eos_token_id=bad)
    with pytest.raises(ValueError, match="at most 64"):
        resolve(eos_token_id=list(range(65)))


def test_padding_falls_back_to_the_first_stop_id() -> None:
    assert resolve(eos_token_id=[8, 9]).pad_token_id == 8
    assert resolve().pad_token_id == 0


def test_sampling_options_take_one_value_per_prompt() -> None:
    chosen = resolve(num_rows=3, do_sample=True, temperature=[0.0, 0.5, 1.0], top_k=torch.tensor([0, 4, 5]), top_p=0.9)
    assert [row.temperature for row in chosen.rows] == [0.0, 0.5, 1.0]
    assert [row.top_k for row in chosen.rows] == [0, 4, 5]
    assert [row.top_p for row in chosen.rows] == [0.9] * 3
    assert not chosen.plain
    with pytest.raises(ValueError, match="temperature has 2 values for 3 prompts"):
        resolve(num_rows=3, do_sample=True, temperature=[1.0, 2.0])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -3},
        {"min_p": 2},
        {"top_k": 1.5},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        resolve(do_sample=True, **bad)


def test_do_sample_must_be_a_bool() -> None:
    for bad in ("no", 1, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="do_sample must be True or False"):
            resolve(do_sample=bad)


def test_a_grammar_is_given_for_all_prompts_or_one_for_each() -> None:
    schema, other = {"type": "object"}, GrammarSpec("regex", "a")
    whole = GrammarSpec("json_schema", '{"type": "object"}')
    assert [row.grammar for row in resolve(num_rows=2, json_schema=schema).rows] == [whole, whole]
    mixed = resolve(num_rows=3, json_schema=[schema, None, None], regex=[None, "a", None])
    assert [row.grammar for row in mixed.rows] == [whole, other, None]
    assert mixed.plain, "masks change no kind of sampler"


def test_a_min_length_beyond_the_maximum_is_refused_under_its_own_name() -> None:
    assert resolve(min_length=12, max_new_tokens=2).rows[0].min_new_tokens == 2
    for limits in ({"max_new_tokens": 2}, {"max_length": 12}):
        with pytest.raises(
            ValueError, match="min_length=13 is more than the 10 tokens of the prompt and the 2 new"
        ) as e:
            resolve(min_length=13, **limits)
        assert "min_new_tokens" not in str(e.value)


def test_only_rows_that_take_the_largest_logit_unchanged_have_the_greedy_sampler() -> None:
    """Only rows that take the largest logit as it is run the greedy kind; everything else is the full one."""
    assert resolve().plain
    assert resolve(do_sample=True, temperature=0, top_k=3, top_p=0.5, min_p=0.1).plain
    assert resolve(repetition_penalty=1.0, presence_penalty=0, logit_bias={}, min_new_tokens=0).plain
    assert resolve(num_speculative_tokens=[0]).plain
    for full in (
        {"do_sample": True},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"sequence_bias": [[[3], 1.0]]},
        {"allowed_token_ids": [3]},
        {"bad_words_ids": [[3]]},
        {"suppress_tokens": [3]},
        {"min_new_tokens": 1},
        {"min_length": 11},
    ):
        assert not resolve(**full).plain, full
    assert not resolve(num_rows=2, logit_bias=[None, {3: 1.0}]).plain


def test_temperature_without_do_sample_warns_that_it_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="no effect"):
        assert resolve(temperature=0.5).rows[0].temperature == 0.0


def test_every_row_gets_a_seed_of_its_own_from_seed_or_from_torch() -> None:
    chosen = resolve(num_rows=3, do_sample=True, seed=7)
    assert [row.seed for row in chosen.rows] == [derive_seed(7, index, 0) for index in range(3)]
    assert len({row.seed for row in chosen.rows}) == 3
    assert [row.seed for row in resolve(num_rows=2, seed=[3, -4]).rows] == [3, -4]
    torch.manual_seed(5)
    first = resolve(do_sample=True).rows[0].seed
    assert resolve(do_sample=True).rows[0].seed != first
    torch.manual_seed(5)
    assert resolve(do_sample=True).rows[0].seed == first
    seeds = {derive_seed(base, prompt, 0) for base in range(50) for prompt in range(50)}
    assert len(seeds) == 2500
