"""Generation options: what transformers means by them, or an error that names them. A closed list.

Effective values come from the checkpoint's generation config, then the caller's `generation_config`, then
keywords, merged by transformers' own `GenerationConfig.update` and completed by its own defaults.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from transformers import GenerationConfig

from fastspec.adaptive.controller import AUTO
from fastspec.errors import UnsupportedOption
from fastspec.grammar.spec import KINDS
from fastspec.inputs.row_options import NUMBERS, RowOptions, derive_seed, rows_of
from fastspec.inputs.values import flag, is_array, is_list, listed, scalar, whole
from fastspec.state import MAX_STOP_IDS, MAX_TOP_LOGPROBS

__all__ = ["OWN", "PER_ROW", "SUPPORTED", "Options", "RowOptions", "derive_seed", "resolve"]

_SHARED_NUMBERS = tuple(each.name for each in NUMBERS if each.in_transformers)
SUPPORTED = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    *_SHARED_NUMBERS,
    "sequence_bias",
    "bad_words_ids",
    "suppress_tokens",
    "min_length",
    "min_new_tokens",
    "stop_strings",
    "num_return_sequences",
    "eos_token_id",
    "pad_token_id",
    "return_dict_in_generate",
)
# ours, besides the fields of GenerationConfig
OWN = (
    "seed",
    "num_speculative_tokens",
    "logprobs",
    *(each.name for each in NUMBERS if not each.in_transformers),
    "logit_bias",
    "allowed_token_ids",
    "stop_across_prompt",
    *KINDS,
)
# one value, or one per prompt; of ids and biases likewise, but their one value is a list or a dict
PER_ROW = (*_SHARED_NUMBERS, "min_new_tokens")
_IDS = ("sequence_bias", "bad_words_ids", "suppress_tokens")
MAX_RETURN_SEQUENCES = 2**16
# entries of a config that are not read: those that its `to_dict` leaves out, and whether a checkpoint's own drafter is
# used, which changes no text, and which the generator's arguments say here
_UNSAVED = ("_commit_hash", "_original_object_hash", "_mask_length", "use_mtp")

# fields without any effect on what plain decoding returns
_NO_EFFECT = frozenset(
    [
        "_commit_hash",
        "_from_model_config",
        "transformers_version",
        "bos_token_id",
        "decoder_start_token_id",
        "early_stopping",
        "length_penalty",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        "use_cache",  # without one transformers computes the same text more slowly; many checkpoints say false
        "compile_config",
        "disable_compile",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "continuous_batching_config",
        "low_memory",
        "renormalize_logits",  # a distribution is normalised whatever is added to all its logits
    ]
)
# the values of the other fields that mean "off"; anything else is refused
_OFF: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "cache_implementation": (None, "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window"),
    "typical_p": (None, 1.0),
    "top_h": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
}
# arguments of transformers' `generate` that are no fields of its config, and what there is in their place
_ARGUMENTS: Mapping[str, str] = {
    "logits_processor": "use logit_bias, allowed_token_ids, penalties, or a regex or grammar",
    "stopping_criteria": "use stop_strings or eos_token_id, or leave the iteration over stream()",
    "prefix_allowed_tokens_fn": "use allowed_token_ids, or a regex or grammar",
    "assistant_model": "the draft is the generator's: FastSpecGenerator(target, draft)",
    "synced_gpus": "leave it out",
    "negative_prompt_ids": "leave it out",
    "negative_prompt_attention_mask": "leave it out",
    "custom_generate": "leave it out",
    "use_model_defaults": "give the options that are to hold",
    "position_ids": "positions follow from attention_mask",
    "inputs_embeds": "give token ids",
    "past_key_values": "prompts that begin alike are read once, see prefix_cache",
}
_ADVICE: Mapping[str, str] = {
    "max_time": "stop the iteration over stream() when the time is up",
    "prompt_lookup_num_tokens": "pass a draft model",
    "assistant_early_exit": "pass a draft model",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one call.

    Attributes:
        max_new_tokens: new tokens per row at most.
        stop_ids: ids that end a row; empty for none.
        stop_strings: texts that end a row; empty for none.
        across_prompt: they may begin in the prompt, as in transformers.
        pad_token_id: fills rows that ended early.
        padding: the pad_token_id that the caller or the checkpoint names, which may fill prompts too; None: neither.
        rows: `copies` per prompt, one prompt's after the other.
        copies: num_return_sequences.
        return_dict: return a GenerateOutput instead of a tensor.
        num_speculative_tokens: drafts per step asked for, the most of all rows; None for the generator's.
        auto: some row asks for "auto".
        seeded: the caller gave a seed.
        top_logprobs: record the emitted tokens' log-probabilities, and this many alternatives; None: neither.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    pad_token_id: int
    rows: tuple[RowOptions, ...]
    copies: int
    return_dict: bool
    num_speculative_tokens: int | None
    top_logprobs: int | None
    padding: int | None = None
    across_prompt: bool = True
    auto: bool = False
    seeded: bool = False

    @property
    def plain(self) -> bool:
        """Whether every row takes the model's largest logit, as it is."""
        return all(row.plain for row in self.rows)


def resolve(
    checkpoint: GenerationConfig | None,
    given: GenerationConfig | None,
    keywords: Mapping[str, Any],
    *,
    num_rows: int,
    prompt_length: int,
    vocab_size: int,
    context: int,
) -> Options:
    """Merges and checks the options of one call.

    Args:
        checkpoint: the target's own generation config.
        given: the caller's config, or None.
        keywords: the caller's keywords.
        num_rows: prompts in the call.
        prompt_length: padded prompt length, from which `max_length` counts as in transformers.
        vocab_size: of the target; stop and pad ids must lie below it.
        context: the target's max_position_embeddings; only the default length is cut to it.

    Raises:
        UnsupportedOption: a field outside the supported list is set to something that would change the output.
        ValueError: a value out of range, or per-row values that do not match the number of prompts.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise UnsupportedOption(
            f"generation_config must be a transformers GenerationConfig, got {type(given).__name__}"
        )
    keywords = dict(keywords)
    for name, advice in _ARGUMENTS.items():
        value = keywords.pop(name, None)
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise UnsupportedOption(f"{name} is not supported; {advice}")
    own = {name: keywords.pop(name, None) for name in OWN}
    per_row = {name: keywords.pop(name) for name in PER_ROW if is_list(keywords.get(name))}
    merged = _merge(checkpoint, given, keywords)
    _refuse_unsupported(merged)
    do_sample = flag("do_sample", merged.do_sample)
    if not do_sample and {**keywords, **per_row}.get("temperature") is not None:
        warnings.warn("temperature has no effect: do_sample is False, as transformers reads it", stacklevel=6)
    values = own | {name: per_row.get(name, getattr(merged, name, None)) for name in (*PER_ROW, *_IDS)}
    max_new_tokens = _max_new_tokens(checkpoint, given, merged, keywords, prompt_length, context)
    if values["min_new_tokens"] is None and merged.min_length is not None:
        values["min_new_tokens"] = _beyond_prompt(merged.min_length, prompt_length, max_new_tokens)
    stop_ids = _stop_ids(merged.eos_token_id, vocab_size)
    copies = _copies(merged.num_return_sequences, do_sample)
    rows = rows_of(
        values,
        num_rows=num_rows,
        copies=copies,
        vocab_size=vocab_size,
        stop_ids=stop_ids,
        do_sample=do_sample,
        max_new_tokens=max_new_tokens,
    )
    pad = _pad_id(merged.pad_token_id, vocab_size)
    limits = [row.draft_limit for row in rows if row.draft_limit is not None]
    return Options(
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        stop_strings=_stop_strings(merged.stop_strings),
        pad_token_id=pad if pad is not None else stop_ids[0] if stop_ids else 0,
        padding=pad,
        across_prompt=own["stop_across_prompt"] is None or flag("stop_across_prompt", own["stop_across_prompt"]),
        rows=rows,
        copies=copies,
        return_dict=flag("return_dict_in_generate", merged.return_dict_in_generate),
        num_speculative_tokens=max(limits) if len(limits) == len(rows) else None,
        top_logprobs=_top_logprobs(own["logprobs"], vocab_size),
        auto=_asks_for_auto(own["num_speculative_tokens"]),
        seeded=own["seed"] is not None,
    )


def _asks_for_auto(drafts: Any) -> bool:
    return any(isinstance(one, str) and one == AUTO for one in (listed(drafts) if is_list(drafts) else [drafts]))


def _top_logprobs(value: Any, vocab_size: int) -> int | None:
    """`logprobs`: False or None records nothing, True the emitted tokens', n also the n most probable."""
    value = scalar(value)
    if value is None or value is False:
        return None
    return 0 if value is True else whole("logprobs", value, low=0, high=min(MAX_TOP_LOGPROBS, vocab_size))


def _copies(value: Any, do_sample: bool) -> int:
    copies = whole("num_return_sequences", 1 if value is None else value, low=1, high=MAX_RETURN_SEQUENCES)
    if copies > 1 and not do_sample:
        raise ValueError(
            f"num_return_sequences={copies} greedy rows would all be the same; set do_sample=True, or leave it at 1"
        )
    return copies


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [] if value is None else listed(value) if is_list(value) else [value]
    if not all(isinstance(one, str) and one for one in strings):
        raise ValueError(f"stop_strings must be a non-empty text or a list of such, got {value!r}")
    return tuple(strings)


@cache
def _names() -> frozenset[str]:
    """Options that transformers knows."""
    return frozenset(vars(GenerationConfig()))


def _merge(
    checkpoint: GenerationConfig | None, given: GenerationConfig | None, keywords: Mapping[str, Any]
) -> GenerationConfig:
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()
    if checkpoint is not None:
        entries = {name: value for name, value in vars(checkpoint).items() if name not in _UNSAVED}
        merged.update(**entries, defaults_only=True, allow_custom_entries=True)  # its values are read alone
    merged.update(**merged._get_default_generation_params(), defaults_only=True)
    known = _names() | set(merged._get_default_generation_params())
    for name in keywords:
        if name not in known:
            near = get_close_matches(name, (*SUPPORTED, *OWN), 1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise UnsupportedOption(f"unknown option {name!r}{meant} supported: {', '.join((*SUPPORTED, *OWN))}")
    # set one by one: update() would validate combinations (temperature without sampling) that are checked here
    for name, value in keywords.items():
        setattr(merged, name, value)
    return merged


def _refuse_unsupported(merged: GenerationConfig) -> None:
    neutral = merged._get_default_generation_params()
    for name, value in vars(merged).items():
        if name in SUPPORTED or name in _NO_EFFECT:
            continue
        if name not in _names() and name not in neutral:
            continue  # a custom entry of a checkpoint's file, which transformers ignores too
        off = _OFF.get(name, (None, False, neutral.get(name)))
        if any(value is accepted for accepted in off):
            continue
        given = scalar(value)
        if is_array(given) or not any(given is accepted or given == accepted for accepted in off):
            advice = _ADVICE.get(name, f"leave {name} unset")
            raise UnsupportedOption(
                f"option {name}={value!r} is not supported; {advice}. Supported: {', '.join((*SUPPORTED, *OWN))}"
            )


def _max_new_tokens(
    checkpoint: GenerationConfig | None,
    given: GenerationConfig | None,
    merged: GenerationConfig,
    keywords: Mapping[str, Any],
    prompt_length: int,
    context: int,
) -> int:
    if merged.max_new_tokens is not None:
        return whole("max_new_tokens", merged.max_new_tokens, low=1)
    configs = [config for config in (given, checkpoint) if config is not None]
    if keywords.get("max_length") is None and all(config.max_length is None for config in configs):
        # transformers' default: its default max_length counts new tokens, cut to the model's context
        return max(1, min(int(merged.max_length), context - prompt_length))
    total = whole("max_length", merged.max_length, low=1)
    if total <= prompt_length:
        raise ValueError(
            f"max_length={total} leaves no room after a prompt of {prompt_length} tokens; "
            "raise it, or give max_new_tokens"
        )
    return total - prompt_length


def _beyond_prompt(min_length: Any, prompt_length: int, max_new_tokens: int) -> int:
    """New tokens that `min_length` asks for: it counts the padded prompt, as in transformers."""
    least = whole("min_length", min_length, low=0)
    if least > prompt_length + max_new_tokens:
        raise ValueError(
            f"min_length={least} is more than the {prompt_length} tokens of the prompt and the {max_new_tokens} new "
            "ones at most; lower it, or raise max_new_tokens"
        )
    return max(0, least - prompt_length)


def _stop_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else listed(value) if is_list(value) else [value]
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"got {len(ids)} stop ids in eos_token_id, at most {MAX_STOP_IDS} are supported")
    return tuple(whole("eos_token_id", one, low=0, high=vocab_size - 1) for one in ids)


def _pad_id(value: Any, vocab_size: int) -> int | None:
    value = scalar(value)
    if value is None or (isinstance(value, int) and value == -1):  # which some checkpoints write for "none"
        return None
    return whole("pad_token_id", value, low=0, high=vocab_size - 1)
