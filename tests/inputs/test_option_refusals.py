"""Which options of transformers are accepted without effect, and which are refused by name: none is ignored."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitNormalization, LogitsProcessorList

from fastspec.errors import UnsupportedOption
from fastspec.inputs import options, table
from tests.helpers.options import resolve


@pytest.mark.parametrize("name", ["renormalize_logits"])
def test_renormalize_logits_is_accepted_because_it_changes_no_distribution(name: str) -> None:
    """Against transformers: its processor changes no distribution that a token is drawn from."""
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    processed = LogitNormalization()(torch.zeros(3, 1, dtype=torch.int64), scores)
    assert torch.allclose(processed.softmax(-1), scores.softmax(-1), atol=1e-6)
    for value in (True, False, None):
        assert resolve(seed=1, **{name: value}) == resolve(seed=1)


def test_unset_arguments_of_transformers_generate_are_accepted() -> None:
    """Wrappers around `generate` hand them on whether they are set or not."""
    for name in set(signature(GenerationMixin.generate).parameters) - {
        *("self", "inputs", "generation_config", "streamer", "kwargs"),
    }:
        assert resolve(seed=1, **{name: None}) == resolve(seed=1), name
    assert resolve(seed=1, logits_processor=LogitsProcessorList(), synced_gpus=False) == resolve(seed=1)
    for name, says in {"logits_processor": "use logit_bias", "stopping_criteria": "use stop_strings"}.items():
        with pytest.raises(UnsupportedOption, match=f"{name} is not supported; {says}"):
            resolve(**{name: [len]})


def test_use_cache_false_is_accepted() -> None:
    """Many checkpoints say use_cache=false, as it was in training."""
    wanted = resolve(seed=1)
    assert resolve(GenerationConfig(use_cache=False), seed=1) == resolve(use_cache=False, seed=1) == wanted


def test_use_mtp_in_a_checkpoints_config_is_accepted() -> None:
    """transformers keeps use_mtp of MiniMax-M2's config as a setting; drafts change no text."""
    assert resolve(GenerationConfig(use_mtp=True), seed=1) == resolve(seed=1)


def test_unknown_options_are_refused_by_name() -> None:
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


def test_every_field_of_the_installed_transformers_is_supported_or_refused_or_without_effect() -> None:
    """A new field of a newer transformers shows up here, not as a silently ignored option."""
    fields = set(vars(GenerationConfig())) | set(GenerationConfig()._get_default_generation_params())
    undecided = fields - set(options.SUPPORTED) - table.IGNORED - CHANGES.keys()
    assert not undecided


@pytest.mark.parametrize("name", [*CHANGES, "a_new_field"])
def test_a_field_that_would_change_the_output_is_refused(name: str) -> None:
    value = CHANGES.get(name, True)
    with pytest.raises(UnsupportedOption, match=name):
        resolve(**{name: value})


@pytest.mark.parametrize("name", ["typical_p", "forced_eos_token_id", "no_repeat_ngram_size"])
def test_such_a_field_in_the_checkpoints_config_is_refused(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, CHANGES[name])
    with pytest.raises(UnsupportedOption, match=name):
        resolve(config)


@pytest.mark.parametrize("name", sorted(table.OFF))
def test_values_that_switch_an_unsupported_option_off_are_accepted(name: str) -> None:
    for value in table.OFF[name]:
        resolve(**{name: value})
