"""Options: merged as transformers merges them, acted on or refused, field by field."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitNormalization, LogitsProcessorList

from fastspec.errors import UnsupportedOption
from fastspec.grammar.spec import KINDS, GrammarSpec
from fastspec.inputs import options
from fastspec.inputs.options import Options, derive_seed
from tests.helpers.checkpoints import make_model

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


def test_lengths() -> None:
    assert resolve(max_new_tokens=7).max_new_tokens == 7
    assert resolve(max_length=30).max_new_tokens == 20
    assert resolve(max_length=30, max_new_tokens=2).max_new_tokens == 2
    assert resolve(prompt_length=500, context=512).max_new_tokens == 12
    with pytest.raises(ValueError, match="no room after a prompt of 10"):
        resolve(max_length=10)
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="max_new_tokens"):
            resolve(max_new_tokens=bad)


def test_stop_ids() -> None:
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


def test_one_value_per_row() -> None:
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
def test_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        resolve(do_sample=True, **bad)


def test_do_sample_is_a_flag() -> None:
    for bad in ("no", 1, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="do_sample must be True or False"):
            resolve(do_sample=bad)


def test_tensors_of_one_number_are_numbers() -> None:
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


def test_every_option_has_a_sample() -> None:
    assert {*options.SUPPORTED, *options.OWN} == SAMPLES.keys() | LISTS.keys() | MAPPINGS.keys() | {*KINDS}


def test_a_grammar_for_all_prompts_or_one_for_each() -> None:
    schema, other = {"type": "object"}, GrammarSpec("regex", "a")
    whole = GrammarSpec("json_schema", '{"type": "object"}')
    assert [row.grammar for row in resolve(num_rows=2, json_schema=schema).rows] == [whole, whole]
    mixed = resolve(num_rows=3, json_schema=[schema, None, None], regex=[None, "a", None])
    assert [row.grammar for row in mixed.rows] == [whole, other, None]
    assert mixed.plain, "masks change no kind of sampler"


@pytest.mark.parametrize("form", SCALARS)
@pytest.mark.parametrize("name", SAMPLES)
def test_what_arrays_hold_is_taken_as_a_number(name: str, form: str) -> None:
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


def test_seeds_and_biases_in_arrays() -> None:
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
def test_what_arrays_hold_is_checked(bad: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, UnsupportedOption), match=message):
        resolve(do_sample=True, **bad)


def test_a_min_length_that_cannot_be_is_named_as_such() -> None:
    assert resolve(min_length=12, max_new_tokens=2).rows[0].min_new_tokens == 2
    for limits in ({"max_new_tokens": 2}, {"max_length": 12}):
        with pytest.raises(
            ValueError, match="min_length=13 is more than the 10 tokens of the prompt and the 2 new"
        ) as e:
            resolve(min_length=13, **limits)
        assert "min_new_tokens" not in str(e.value)


@pytest.mark.parametrize("name", ["renormalize_logits"])
def test_what_no_distribution_shows_is_taken(name: str) -> None:
    """Against transformers: its processor changes no distribution that a token is drawn from."""
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    processed = LogitNormalization()(torch.zeros(3, 1, dtype=torch.int64), scores)
    assert torch.allclose(processed.softmax(-1), scores.softmax(-1), atol=1e-6)
    for value in (True, False, None):
        assert resolve(seed=1, **{name: value}) == resolve(seed=1)


def test_arguments_of_theirs_that_ask_for_nothing_are_taken() -> None:
    """Wrappers around `generate` hand them on whether they are set or not."""
    for name in set(signature(GenerationMixin.generate).parameters) - {
        *("self", "inputs", "generation_config", "streamer", "kwargs"),
    }:
        assert resolve(seed=1, **{name: None}) == resolve(seed=1), name
    assert resolve(seed=1, logits_processor=LogitsProcessorList(), synced_gpus=False) == resolve(seed=1)
    for name, says in {"logits_processor": "use logit_bias", "stopping_criteria": "use stop_strings"}.items():
        with pytest.raises(UnsupportedOption, match=f"{name} is not supported; {says}"):
            resolve(**{name: [len]})


def test_sampler_kinds() -> None:
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


def test_temperature_without_sampling_is_said() -> None:
    with pytest.warns(UserWarning, match="no effect"):
        assert resolve(temperature=0.5).rows[0].temperature == 0.0


def test_seeds() -> None:
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


def test_a_cache_that_is_turned_off_changes_no_text() -> None:
    """Many checkpoints say use_cache=false, as it was in training."""
    wanted = resolve(seed=1)
    assert resolve(GenerationConfig(use_cache=False), seed=1) == resolve(use_cache=False, seed=1) == wanted


def test_a_checkpoint_that_says_that_it_has_a_drafter_is_read_as_any_other() -> None:
    """transformers keeps use_mtp of MiniMax-M2's config as a setting; drafts change no text."""
    assert resolve(GenerationConfig(use_mtp=True), seed=1) == resolve(seed=1)


def test_unknown_options_are_named() -> None:
    for name in (
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "inputs_embeds",
        "temprature",
    ):
        with pytest.raises(UnsupportedOption, match=name):
            resolve(**{name: object()})
    with pytest.raises(UnsupportedOption, match="GenerationConfig"):
        resolve(given={"max_new_tokens": 3})  # type: ignore[arg-type]


# a value of each field that changes what plain transformers decoding returns, or how
CHANGES: dict[str, Any] = {
    "max_time": 1.0,
    "num_beams": 2,
    "use_mtp": True,
    "cache_implementation": "quantized",
    "top_h": 0.4,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (1, 1.1),
    "begin_suppress_tokens": [3],
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "encoder_no_repeat_ngram_size": 2,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "x",
    "penalty_alpha": 0.5,
    "dola_layers": "high",
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
}


def test_every_field_of_the_installed_transformers_is_decided() -> None:
    """A new field of a newer transformers shows up here, not as a silently ignored option."""
    fields = set(vars(GenerationConfig())) | set(GenerationConfig()._get_default_generation_params())
    undecided = fields - set(options.SUPPORTED) - options._NO_EFFECT - CHANGES.keys()
    assert not undecided


@pytest.mark.parametrize("name", [*CHANGES, "a_new_field"])
def test_a_field_that_would_change_the_output_is_refused(name: str) -> None:
    value = CHANGES.get(name, True)
    with pytest.raises(UnsupportedOption, match=name):
        resolve(**{name: value})


@pytest.mark.parametrize("name", ["typical_p", "forced_eos_token_id", "no_repeat_ngram_size"])
def test_and_also_when_it_comes_from_the_checkpoint(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, CHANGES[name])
    with pytest.raises(UnsupportedOption, match=name):
        resolve(config)


@pytest.mark.parametrize("name", sorted(options._OFF))
def test_off_values_pass(name: str) -> None:
    for value in options._OFF[name]:
        resolve(**{name: value})
