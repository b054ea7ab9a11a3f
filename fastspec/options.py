"""Generation options: what transformers means by them, or an error that names them. A closed list.

Effective values come from the checkpoint's generation config, then the caller's `generation_config`, then
keywords, merged by transformers' own `GenerationConfig.update` and completed by its own defaults.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from fastspec.errors import UnsupportedOption
from fastspec.state import MAX_STOP_IDS, MAX_TOP_LOGPROBS

SUPPORTED = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "eos_token_id",
    "pad_token_id",
    "return_dict_in_generate",
)
OWN = ("seed", "num_speculative_tokens", "logprobs")  # ours, besides the fields of GenerationConfig
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
PER_ROW = ("temperature", "top_k", "top_p", "min_p", "seed")  # one value, or one per prompt

# fields without any effect on what plain decoding returns
_NO_EFFECT = frozenset(
    [
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
        "compile_config",
        "disable_compile",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "continuous_batching_config",
        "low_memory",
    ]
)
# the values of the other fields that mean "off"; anything else is refused
_OFF: Mapping[str, tuple[Any, ...]] = {
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "hybrid"),
    "typical_p": (None, 1.0),
    "top_h": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
}
_ADVICE: Mapping[str, str] = {
    "stop_strings": "stop at token ids with eos_token_id, or cut the text after generating",
    "num_return_sequences": "repeat the prompt in the batch",
    "max_time": "stop the iteration over stream() when the time is up",
    "prompt_lookup_num_tokens": "pass a draft model",
    "assistant_early_exit": "pass a draft model",
}


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of one prompt. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one call.

    Attributes:
        max_new_tokens: new tokens per row at most.
        stop_ids: ids that end a row; empty for none.
        pad_token_id: fills rows that ended early.
        rows: one per prompt.
        return_dict: return a GenerateOutput instead of a tensor.
        num_speculative_tokens: drafts per step asked for, None for the generator's.
        top_logprobs: record the emitted tokens' log-probabilities, and this many alternatives; None: neither.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_token_id: int
    rows: tuple[RowOptions, ...]
    return_dict: bool
    num_speculative_tokens: int | None
    top_logprobs: int | None

    @property
    def sampled(self) -> bool:
        """Whether some row draws at random."""
        return any(row.temperature > 0 for row in self.rows)

    @property
    def filtered(self) -> bool:
        """Whether some random row narrows its law by top-k, top-p or min-p."""
        return any(row.temperature > 0 and (row.top_k > 0 or row.top_p < 1 or row.min_p > 0) for row in self.rows)


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
    own = {name: keywords.pop(name, None) for name in OWN}
    per_row = {name: keywords.pop(name) for name in PER_ROW[:-1] if _is_list(keywords.get(name))}
    merged = _merge(checkpoint, given, keywords)
    _refuse_unsupported(merged)
    do_sample = _flag("do_sample", merged.do_sample)
    asked = {**keywords, **per_row}
    if not do_sample and asked.get("temperature") is not None:
        warnings.warn("temperature has no effect: do_sample is False, as transformers reads it", stacklevel=4)
    values = {name: per_row.get(name, getattr(merged, name)) for name in PER_ROW[:-1]}
    return Options(
        max_new_tokens=_max_new_tokens(checkpoint, given, merged, keywords, prompt_length, context),
        stop_ids=(stop_ids := _stop_ids(merged.eos_token_id, vocab_size)),
        pad_token_id=_pad_id(merged.pad_token_id, stop_ids, vocab_size),
        rows=_rows(values, own["seed"], num_rows, do_sample),
        return_dict=_flag("return_dict_in_generate", merged.return_dict_in_generate),
        num_speculative_tokens=None
        if (k := own["num_speculative_tokens"]) is None
        else _whole("num_speculative_tokens", k, low=0),
        top_logprobs=_top_logprobs(own["logprobs"], vocab_size),
    )


def _top_logprobs(value: Any, vocab_size: int) -> int | None:
    """`logprobs`: False or None records nothing, True the emitted tokens', n also the n most probable."""
    if value is None or value is False:
        return None
    return 0 if value is True else _whole("logprobs", value, low=0, high=min(MAX_TOP_LOGPROBS, vocab_size))


def _is_list(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, Sequence) and not isinstance(value, str)


def _scalar(value: Any) -> Any:
    """The number in a tensor of one; anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _merge(
    checkpoint: GenerationConfig | None, given: GenerationConfig | None, keywords: Mapping[str, Any]
) -> GenerationConfig:
    merged = copy.deepcopy(given) if given is not None else GenerationConfig()
    if checkpoint is not None:
        merged.update(**checkpoint.to_dict(), defaults_only=True, allow_custom_entries=True)
    merged.update(**merged._get_default_generation_params(), defaults_only=True)
    known = set(vars(GenerationConfig())) | set(merged._get_default_generation_params())
    for name in keywords:
        if name not in known:
            raise UnsupportedOption(f"unknown option {name!r}; supported: {', '.join((*SUPPORTED, *OWN))}")
    # set one by one: update() would validate combinations (temperature without sampling) that are checked here
    for name, value in keywords.items():
        setattr(merged, name, value)
    return merged


def _refuse_unsupported(merged: GenerationConfig) -> None:
    neutral = merged._get_default_generation_params()
    for name, value in vars(merged).items():
        if name in SUPPORTED or name in _NO_EFFECT:
            continue
        if name not in vars(GenerationConfig()) and name not in neutral:
            continue  # a custom entry of a checkpoint's file, which transformers ignores too
        off = _OFF.get(name, (None, False, neutral.get(name)))
        given = _scalar(value)
        if isinstance(given, torch.Tensor) or not any(given is accepted or given == accepted for accepted in off):
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
        return _whole("max_new_tokens", merged.max_new_tokens, low=1)
    configs = [config for config in (given, checkpoint) if config is not None]
    if keywords.get("max_length") is None and all(config.max_length is None for config in configs):
        # transformers' default: its default max_length counts new tokens, cut to the model's context
        return max(1, min(int(merged.max_length), context - prompt_length))
    total = _whole("max_length", merged.max_length, low=1)
    if total <= prompt_length:
        raise ValueError(
            f"max_length={total} leaves no room after a prompt of {prompt_length} tokens; "
            "raise it, or give max_new_tokens"
        )
    return total - prompt_length


def _stop_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    listed = [] if value is None else list(value) if isinstance(value, Sequence) else [value]
    if len(listed) > MAX_STOP_IDS:
        raise ValueError(f"got {len(listed)} stop ids in eos_token_id, at most {MAX_STOP_IDS} are supported")
    return tuple(_whole("eos_token_id", one, low=0, high=vocab_size - 1) for one in listed)


def _pad_id(value: Any, stop_ids: tuple[int, ...], vocab_size: int) -> int:
    value = _scalar(value)
    # some checkpoints write -1 for "none"
    if value is None or (isinstance(value, int) and value == -1):
        return stop_ids[0] if stop_ids else 0
    return _whole("pad_token_id", value, low=0, high=vocab_size - 1)


def _rows(values: Mapping[str, Any], seed: Any, num_rows: int, do_sample: bool) -> tuple[RowOptions, ...]:
    columns = {name: _column(name, value, num_rows) for name, value in values.items()}
    seeds = _seeds(seed, num_rows)
    return tuple(
        RowOptions(
            temperature=_temperature(columns["temperature"][i]) if do_sample else 0.0,
            top_k=_whole("top_k", 0 if (top_k := columns["top_k"][i]) is None else top_k, low=0, high=2**31 - 1),
            top_p=_real("top_p", columns["top_p"][i], 1.0, low=0.0, high=1.0),
            min_p=_real("min_p", columns["min_p"][i], 0.0, low=0.0, high=1.0),
            seed=seeds[i],
        )
        for i in range(num_rows)
    )


def _temperature(value: Any) -> float:
    """0 is greedy; between it and the least temperature, logits divided by it would leave fp32."""
    number = _real("temperature", value, 1.0, low=0.0, high=MAX_TEMPERATURE)
    if 0 < number < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}, got {value!r}"
        )
    return number


def _column(name: str, value: Any, num_rows: int) -> list[Any]:
    if not _is_list(value):
        return [value] * num_rows
    listed = value.tolist() if isinstance(value, torch.Tensor) else list(value)
    if len(listed) != num_rows:
        raise ValueError(f"{name} has {len(listed)} values for {num_rows} prompts; give one value, or one per prompt")
    return listed


def _seeds(seed: Any, num_rows: int) -> list[int]:
    """The caller's seeds, or one per row derived from (seed, prompt index)."""
    if _is_list(seed):
        return [_whole("seed", one, low=-(2**63), high=2**63 - 1) for one in _column("seed", seed, num_rows)]
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()).item())  # torch's CPU generator: torch.manual_seed repeats a call
    base = _whole("seed", seed, low=-(2**63), high=2**63 - 1)
    return [derive_seed(base, prompt_index, 0) for prompt_index in range(num_rows)]


def derive_seed(seed: int, prompt_index: int, return_index: int) -> int:
    """A signed 64-bit row seed from (seed, prompt index, return index): SplitMix64 finalisers in a chain."""
    state = seed % 2**64
    for word in (prompt_index, return_index):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state


def _whole(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be a whole number {limit}, got {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    value = _scalar(value)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _real(name: str, value: Any, default: float, *, low: float, high: float = math.inf) -> float:
    value = _scalar(value)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value == math.inf:
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be a number {limit}, got {value!r}")
    return float(value)
