"""Reads generation options, with the meaning that they have in transformers.

The table `OPTIONS` lists the supported options. Unknown keywords are refused, and unsupported options that would change
the output.

Order of precedence, highest first: keyword arguments, the user's `generation_config`, the checkpoint's
`generation_config`, the defaults of transformers. transformers' `GenerationConfig.update` merges them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from transformers import GenerationConfig

from fastspec.adaptive.controller import AUTO
from fastspec.errors import UnsupportedOption
from fastspec.inputs.row_options import COLUMNS, RowOptions, derive_seed, rows_of
from fastspec.inputs.table import (
    ADVICE,
    ARGUMENTS,
    IGNORED,
    LOGPROBS_MODES,
    MAX_RETURN_SEQUENCES,
    OFF,
    OPTIONS,
    RAW,
)
from fastspec.inputs.values import flag, is_array, is_list, listed, scalar, whole
from fastspec.state import MAX_STOP_IDS, MAX_TOP_LOGPROBS

__all__ = ["OWN", "PER_ROW", "SUPPORTED", "Options", "RowOptions", "derive_seed", "resolve"]

SUPPORTED = tuple(option.keyword for option in OPTIONS if option.in_transformers)
OWN = tuple(option.keyword for option in OPTIONS if not option.in_transformers)
# options that take one value, or a list with one value per prompt
PER_ROW = tuple(name for name in COLUMNS if name in SUPPORTED)
_ROW_FIELDS = {field.name for field in fields(RowOptions)}
# options of transformers that set fields of `RowOptions`
_OF_ROWS = tuple(option.keyword for option in OPTIONS if option.in_transformers and _ROW_FIELDS & {*option.sets})
# entries of a checkpoint's config that are not read: `to_dict` omits the first three; `use_mtp` is replaced by the
# generator's arguments
_UNSAVED = ("_commit_hash", "_original_object_hash", "_mask_length", "use_mtp")


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one call.

    Attributes:
        max_new_tokens: upper limit of new tokens of a row.
        stop_ids: token ids that end a row. May be empty.
        stop_strings: texts that end a row. May be empty.
        across_prompt: True if a stop string may begin in the prompt, as in transformers.
        pad_token_id: id that fills the output of rows that ended early.
        padding: the pad_token_id that the user or the checkpoint set. Prompts may be padded with it. None: not set.
        rows: options of each row: `copies` rows of the first prompt, then of the second, and so on.
        copies: number of rows per prompt (num_return_sequences).
        return_dict: True if `generate` returns a GenerateOutput, not a tensor.
        num_speculative_tokens: largest of the rows' limits of draft tokens per step. None: at least one row has no
            limit of its own.
        auto: True if at least one row has num_speculative_tokens="auto".
        seeded: True if the user gave a seed.
        top_logprobs: number of most probable ids to record with the log-probability of each new token. None: nothing is
            recorded.
        prompt_top_logprobs: number of most probable ids to record with the log-probability of each prompt token. None:
            nothing is recorded for prompts.
        processed_logprobs: True if at least one row records log-probabilities of the distribution from which it
            samples.
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
    prompt_top_logprobs: int | None = None
    padding: int | None = None
    across_prompt: bool = True
    auto: bool = False
    seeded: bool = False
    processed_logprobs: bool = False

    @property
    def plain(self) -> bool:
        """True if every row is greedy, and no row has an option that changes logits."""
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
        checkpoint: generation config of the target's checkpoint. None: it has none.
        given: generation config that the user passed. None: the user passed none.
        keywords: keyword arguments of the call.
        num_rows: number of prompts.
        prompt_length: padded length of the prompts, in tokens. `max_length` includes it, as in transformers.
        vocab_size: upper limit of token ids (exclusive).
        context: largest number of tokens of a row. It limits only the default of max_length.

    Raises:
        UnsupportedOption: an unsupported option has a value that would change the output.
        ValueError: a value out of range, or a list whose length is not the number of prompts.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise UnsupportedOption(
            f"generation_config must be a transformers GenerationConfig, got {type(given).__name__}"
        )
    keywords = dict(keywords)
    for name, advice in ARGUMENTS.items():
        value = keywords.pop(name, None)
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise UnsupportedOption(f"{name} is not supported; {advice}")
    own = {name: keywords.pop(name, None) for name in OWN}
    per_row = {name: keywords.pop(name) for name in PER_ROW if is_list(keywords.get(name))}
    merged = _merge(checkpoint, given, keywords)
    _refuse_unsupported(merged)
    do_sample = flag("do_sample", merged.do_sample)
    if not do_sample and {**keywords, **per_row}.get("temperature") is not None:
        warnings.warn("temperature has no effect, because do_sample is False (as in transformers)", stacklevel=6)
    values = own | {name: per_row.get(name, getattr(merged, name, None)) for name in _OF_ROWS}
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
    recorded = top_logprobs("logprobs", own["logprobs"], vocab_size)
    rows = _with_mode(rows, own["logprobs_mode"], recorded=recorded is not None)
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
        top_logprobs=recorded,
        prompt_top_logprobs=top_logprobs("prompt_logprobs", own["prompt_logprobs"], vocab_size),
        auto=_asks_for_auto(own["num_speculative_tokens"]),
        seeded=own["seed"] is not None,
        processed_logprobs=any(row.processed_logprobs for row in rows),
    )


def checked_mode(mode: Any) -> str:
    """Checks the option logprobs_mode, and returns it. None gives "raw".

    Raises:
        ValueError: the value is not one of LOGPROBS_MODES.
    """
    if mode is not None and (not isinstance(mode, str) or mode not in LOGPROBS_MODES):
        raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {mode!r}")
    return RAW if mode is None else mode


def _with_mode(rows: tuple[RowOptions, ...], mode: Any, *, recorded: bool) -> tuple[RowOptions, ...]:
    """Returns the rows' options, with `processed_logprobs` set to True if logprobs_mode is "processed".

    If no row samples or has an option that changes logits, all rows stay unchanged.

    Args:
        rows: options of the rows.
        mode: the option logprobs_mode. None: "raw".
        recorded: True if log-probabilities of new tokens are recorded.
    """
    if checked_mode(mode) == RAW:
        return rows
    if not recorded:
        raise ValueError(f"logprobs_mode={mode!r} needs logprobs, and nothing is recorded without; give logprobs=True")
    if grammar := next((row.grammar for row in rows if row.grammar), None):
        raise UnsupportedOption(
            f"logprobs_mode={mode!r} is not supported with {grammar.kind}: log-probabilities leave the masks of a "
            f"grammar out; leave out one of them"
        )
    if all(row.plain for row in rows):  # nothing changes the logits
        return rows
    return tuple(replace(row, processed_logprobs=True) for row in rows)


def _asks_for_auto(drafts: Any) -> bool:
    return any(isinstance(one, str) and one == AUTO for one in (listed(drafts) if is_list(drafts) else [drafts]))


def top_logprobs(name: str, value: Any, vocab_size: int) -> int | None:
    """Reads an option that records log-probabilities, such as `logprobs`.

    Args:
        name: name of the option, for the error.
        value: value of the option.
        vocab_size: number of token ids.

    Returns:
        The number of most probable ids to record with each token. False or None gives None: nothing is recorded. True
        gives 0: only the log-probability of the token itself is recorded.
    """
    value = scalar(value)
    if value is None or value is False:
        return None
    return 0 if value is True else whole(name, value, low=0, high=min(MAX_TOP_LOGPROBS, vocab_size))


def _copies(value: Any, do_sample: bool) -> int:
    copies = whole("num_return_sequences", 1 if value is None else value, low=1, high=MAX_RETURN_SEQUENCES)
    if copies > 1 and not do_sample:
        raise ValueError(f"num_return_sequences={copies} greedy rows would be equal; set do_sample=True, or use 1")
    return copies


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [] if value is None else listed(value) if is_list(value) else [value]
    if not all(isinstance(one, str) and one for one in strings):
        raise ValueError(f"stop_strings must be a non-empty text or a list of non-empty texts, got {value!r}")
    return tuple(strings)


@cache
def _names() -> frozenset[str]:
    """Returns the names of transformers' generation options."""
    return frozenset(vars(GenerationConfig()))


def _merge(
    checkpoint: GenerationConfig | None, given: GenerationConfig | None, keywords: Mapping[str, Any]
) -> GenerationConfig:
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()
    if checkpoint is not None:
        entries = {name: value for name, value in vars(checkpoint).items() if name not in _UNSAVED}
        # allow_custom_entries: entries unknown to transformers are ignored
        merged.update(**entries, defaults_only=True, allow_custom_entries=True)
    merged.update(**merged._get_default_generation_params(), defaults_only=True)
    known = _names() | set(merged._get_default_generation_params())
    for name in keywords:
        if name not in known:
            near = get_close_matches(name, (*SUPPORTED, *OWN), 1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise UnsupportedOption(f"unknown option {name!r}{meant} supported: {', '.join((*SUPPORTED, *OWN))}")
    # not by update(), which would refuse combinations that are checked here (such as temperature without sampling)
    for name, value in keywords.items():
        setattr(merged, name, value)
    return merged


def _refuse_unsupported(merged: GenerationConfig) -> None:
    neutral = merged._get_default_generation_params()
    for name, value in vars(merged).items():
        if name in SUPPORTED or name in IGNORED:
            continue
        if name not in _names() and name not in neutral:
            continue  # transformers also ignores custom entries of a checkpoint's file
        off = OFF.get(name, (None, False, neutral.get(name)))
        if any(value is accepted for accepted in off):
            continue
        given = scalar(value)
        if is_array(given) or not any(given is accepted or given == accepted for accepted in off):
            advice = ADVICE.get(name, f"leave {name} unset")
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
        # as in transformers, whose default max_length counts new tokens and is cut to the model's context
        return max(1, min(int(merged.max_length), context - prompt_length))
    total = whole("max_length", merged.max_length, low=1)
    if total <= prompt_length:
        raise ValueError(
            f"max_length={total} leaves no room after a prompt of {prompt_length} tokens; "
            "raise it, or give max_new_tokens"
        )
    return total - prompt_length


def _beyond_prompt(min_length: Any, prompt_length: int, max_new_tokens: int) -> int:
    """Converts `min_length`, which includes the padded prompt as in transformers, to a number of new tokens."""
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
    if value is None or (isinstance(value, int) and value == -1):  # some checkpoints write -1 for "none"
        return None
    return whole("pad_token_id", value, low=0, high=vocab_size - 1)
