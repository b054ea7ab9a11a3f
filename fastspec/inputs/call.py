"""Reads the prompts and options of one call of `generate`, `stream`, `submit` or `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedTokenizerBase

from fastspec.errors import UnsupportedOption
from fastspec.inputs.options import Options, resolve
from fastspec.inputs.prompts import RawPrompts, read
from fastspec.inputs.values import is_list, listed

# number of stack levels from `RawPrompts.prompts` to the user's line, for the place of a warning
_CALLER = 6


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Arguments of a call, as the user passed them.

    Attributes:
        input_ids, attention_mask, generation_config: arguments of `generate`.
        keywords: all other keyword arguments. `inputs` and `tokenizer` are read first, and removed from it.
    """

    input_ids: Any
    attention_mask: Any
    generation_config: GenerationConfig | None
    keywords: dict[str, Any]

    def prompts(self) -> RawPrompts:
        """Reads the prompts from `input_ids`, or from transformers' other name for them, `inputs`."""
        inputs = self.keywords.pop("inputs", None)
        if inputs is not None and self.input_ids is not None:
            raise ValueError("prompts are given twice, as input_ids and as inputs; leave one out")
        return read(self.input_ids if inputs is None else inputs, self.attention_mask)

    @property
    def unlimited(self) -> bool:
        """True if neither the keywords nor the generation config set max_new_tokens or max_length."""
        names = ("max_new_tokens", "max_length")
        return all(self.keywords.get(name, getattr(self.generation_config, name, None)) is None for name in names)


@dataclass(frozen=True, slots=True)
class CallInputs:
    """Checked prompts and options of a call.

    Attributes:
        prompts: token ids of each prompt, without padding.
        options: options of the call and of each of its rows (one row per output sequence).
        raw: the prompts with the user's padding.
        tokenizer: tokenizer for stop strings and grammars. None: the call passed none, and it has neither stop strings
            nor grammars or the checkpoint has no tokenizer.
    """

    prompts: list[list[int]]
    options: Options
    raw: RawPrompts
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the target that limit a call.

    Attributes:
        vocab_size: upper limit of token ids (exclusive).
        context: largest number of tokens that the model supports.
        max_length: largest number of tokens of prompt and output for which the generator has memory.
        generation_config: default options of the checkpoint. None: it has none.
        tokenizer: function that loads the checkpoint's tokenizer. It returns None if the checkpoint has none.
    """

    vocab_size: int
    context: int
    max_length: int
    generation_config: GenerationConfig | None
    tokenizer: Callable[[], PreTrainedTokenizerBase | None]


def read_call(arguments: CallArguments, model: ModelLimits, default_new_tokens: int | None = None) -> CallInputs:
    """Reads and checks the arguments of a call. Does not use the device.

    Args:
        arguments: arguments of the call. Its `keywords` are changed in place.
        model: limits of the target.
        default_new_tokens: max_new_tokens for a call that sets no limit. It is reduced if the prompts leave less room
            within `max_length`. None: the default of transformers applies.

    Raises:
        ValueError, UnsupportedOption: a prompt or option is refused, see `generate`.
    """
    keywords, raw = arguments.keywords, arguments.prompts()
    tokenizer = _checked_tokenizer(keywords.pop("tokenizer", None))
    if default_new_tokens is not None and arguments.unlimited:
        keywords["max_new_tokens"] = max(1, min(default_new_tokens, model.max_length - raw.width))
    if _has_text(keywords.get("predictions")):
        keywords["predictions"] = _as_ids(keywords["predictions"], tokenizer or model.tokenizer())
    chosen = resolve(
        model.generation_config,
        arguments.generation_config,
        keywords,
        num_rows=len(raw.rows),
        prompt_length=raw.width,
        vocab_size=model.vocab_size,
        context=min(model.context, model.max_length),
    )
    if tokenizer is None and (chosen.stop_strings or any(row.grammar for row in chosen.rows)):
        tokenizer = model.tokenizer()
    prompts = raw.prompts(model.vocab_size, chosen.padding, chosen.stop_ids, stacklevel=_CALLER)
    return CallInputs(prompts, chosen, raw, tokenizer)


def _has_text(predictions: Any) -> bool:
    return isinstance(predictions, str) or (
        is_list(predictions) and any(isinstance(one, str) for one in listed(predictions))
    )


def _as_ids(predictions: Any, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Encodes the texts of the option `predictions` without special tokens. Other entries stay unchanged.

    Raises:
        ValueError: `tokenizer` is None.
    """
    if tokenizer is None:
        raise ValueError(
            "predictions need a tokenizer where they are texts, and the target's checkpoint brings none; pass "
            "tokenizer=..., or token ids"
        )
    if not isinstance(predictions, str):
        return [_as_ids(one, tokenizer) if isinstance(one, str) else one for one in listed(predictions)]
    return tokenizer(predictions, add_special_tokens=False)["input_ids"]


def _checked_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase | None:
    """Checks the option `tokenizer` of a call, and returns it. None: not given.

    Raises:
        ValueError: the object is not a tokenizer.
    """
    if tokenizer is not None and not all(hasattr(tokenizer, name) for name in ("decode", "convert_ids_to_tokens")):
        inner = "; pass its .tokenizer" if hasattr(tokenizer, "tokenizer") else ""
        raise ValueError(f"tokenizer must be one of transformers' tokenizers, got {type(tokenizer).__name__}{inner}")
    return cast("PreTrainedTokenizerBase | None", tokenizer)


def check_streamer(streamer: object, rows: int) -> None:
    """Raises UnsupportedOption for a streamer without `put` and `end`, or for a streamer in a call of several rows."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise UnsupportedOption(f"streamer needs put() and end(), as in transformers; got {type(streamer).__name__}")
    if streamer is not None and rows != 1:
        raise UnsupportedOption(f"a streamer takes one prompt, got {rows}; use stream() for a batch")


def one_prompt(ids: Any) -> Any:
    """Wraps a plain list of ids as a batch of one. Returns anything else unchanged."""
    return [ids] if isinstance(ids, list | tuple | range) and not any(is_list(one) for one in ids) else ids
