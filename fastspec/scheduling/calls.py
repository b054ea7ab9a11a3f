"""What a call brings in and hands back: prompts and options become requests, requests become its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fastspec.errors import InvalidLogits, UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.inputs.options import Options, resolve
from fastspec.inputs.prompts import RawPrompts, read
from fastspec.inputs.values import is_list
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.output import GenerateOutput, Stats
from fastspec.scheduling.requests import Request
from fastspec.text.stop_strings import StopWatch

_NAMED = 8  # rows that an error names
_CALLER = 6  # frames up: prompts(), prepare(), the session's, the generator's two


@dataclass(frozen=True, slots=True)
class CallArguments:
    """What a user passes to `generate`, `stream` or `calibrate`."""

    input_ids: Any
    attention_mask: Any
    generation_config: GenerationConfig | None
    keywords: dict[str, Any]

    def prompts(self) -> RawPrompts:
        """The prompts; transformers' name for them, `inputs`, is accepted."""
        inputs = self.keywords.pop("inputs", None)
        if inputs is not None and self.input_ids is not None:
            raise ValueError("prompts are given twice, as input_ids and as inputs; leave one out")
        return read(self.input_ids if inputs is None else inputs, self.attention_mask)

    @property
    def unlimited(self) -> bool:
        """Whether neither keywords nor config say how many tokens there may be."""
        names = ("max_new_tokens", "max_length")
        return all(self.keywords.get(name, getattr(self.generation_config, name, None)) is None for name in names)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that was checked.

    Attributes:
        requests: one for every row.
        options: of the call.
        prompts: as the caller passed them.
    """

    requests: list[Request]
    options: Options
    prompts: RawPrompts


def prepare(
    target: Checkpoint,
    arguments: CallArguments,
    max_length: int,
    tokenizer_of: Callable[[], PreTrainedTokenizerBase | None],
    default_new_tokens: int | None = None,
    grammars: Grammars | None = None,
) -> PreparedCall:
    """Checks a call and turns it into requests.

    Args:
        target: the model.
        arguments: as the caller passed them; their keywords are taken apart.
        max_length: tokens of prompt and output that a row may have.
        tokenizer_of: loads the target's tokenizer, where stop strings need one and the call brings none.
        default_new_tokens: new tokens where the call sets no limit, if there is room for them; None: transformers'
            default.
        grammars: of the target's vocabulary; None: none is asked for.

    Raises:
        ValueError, UnsupportedOption: as in `generate`.
    """
    keywords, spec, raw = arguments.keywords, target.spec, arguments.prompts()
    tokenizer = _checked_tokenizer(keywords.pop("tokenizer", None))
    if default_new_tokens is not None and arguments.unlimited:
        keywords["max_new_tokens"] = max(1, min(default_new_tokens, max_length - raw.width))
    chosen = resolve(
        target.generation_config,
        arguments.generation_config,
        keywords,
        num_rows=len(raw.rows),
        prompt_length=raw.width,
        vocab_size=spec.vocab_size,
        context=min(spec.max_length, max_length),
    )
    if tokenizer is None and (chosen.stop_strings or any(row.grammar for row in chosen.rows)):
        tokenizer = tokenizer_of()
    # the warning is the caller's of `generate`
    prompts = raw.prompts(spec.vocab_size, chosen.padding, chosen.stop_ids, stacklevel=_CALLER)
    return PreparedCall(requests_of(prompts, chosen, tokenizer, max_length, grammars), chosen, raw)


def _checked_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a call, where it brings one.

    Raises:
        ValueError: an object that is none.
    """
    if tokenizer is not None and not all(hasattr(tokenizer, name) for name in ("decode", "convert_ids_to_tokens")):
        inner = "; pass its .tokenizer" if hasattr(tokenizer, "tokenizer") else ""
        raise ValueError(f"tokenizer must be one of transformers' tokenizers, got {type(tokenizer).__name__}{inner}")
    return cast("PreTrainedTokenizerBase | None", tokenizer)


def check_streamer(streamer: object, rows: int) -> None:
    """Raises UnsupportedOption for an object that is no streamer, or for a streamer with several rows."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise UnsupportedOption(f"streamer needs put() and end(), as in transformers; got {type(streamer).__name__}")
    if streamer is not None and rows != 1:
        raise UnsupportedOption(f"a streamer takes one prompt, got {rows}; use stream() for a batch")


def one_prompt(ids: Any) -> Any:
    """Ids of one prompt as `read` takes them: a plain list of ids is one row."""
    return [ids] if isinstance(ids, list | tuple | range) and not any(is_list(one) for one in ids) else ids


def requests_of(
    prompts: list[list[int]],
    chosen: Options,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    grammars: Grammars | None = None,
) -> list[Request]:
    """A request for every row: a prompt's `chosen.copies` one after the other.

    Args:
        prompts: checked.
        chosen: options of the call.
        tokenizer: for stop strings and grammars.
        max_length: tokens of prompt and output that a row may have.
        grammars: of the target's vocabulary; None: no row follows one.

    Raises:
        ValueError: a row would be too long, stop strings or a grammar lack a tokenizer, or a grammar cannot be used.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) + chosen.max_new_tokens > max_length:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {chosen.max_new_tokens} new ones that is more than "
                f"max_length={max_length}. Shorten one of them, or make the generator with a larger max_length"
            )
    if chosen.stop_strings and tokenizer is None:
        raise ValueError(
            "stop_strings need a tokenizer, and the target's checkpoint brings none; pass tokenizer=..., or stop at "
            "token ids with eos_token_id"
        )
    requests = []
    for index, row in enumerate(chosen.rows):
        prompt = prompts[index // chosen.copies]
        watch = None
        if chosen.stop_strings and tokenizer:
            watch = StopWatch(tokenizer, chosen.stop_strings, prompt, across_prompt=chosen.across_prompt)
        grammar = None
        if row.grammar is not None and grammars is not None:
            grammar = grammars.row(row.grammar, tokenizer, prompt, chosen.stop_ids)
        requests.append(Request(prompt, chosen.max_new_tokens, row, watch, grammar))
    return requests


def check_valid(requests: list[Request], copies: int) -> None:
    """Raises InvalidLogits where a row has failed."""
    failed = [(index, request.invalid_at) for index, request in enumerate(requests) if request.invalid_at is not None]
    if not failed:
        return
    named = [_place(index, position, copies) for index, position in failed[:_NAMED]]
    more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    raise InvalidLogits(
        f"no token could be chosen for {'; '.join(named)}{more}: the target's logits there are NaN or infinite, or "
        "leave no token that the options allow. The other rows are whole (this error's `output`). Check the weights, "
        "take a wider dtype (float16 overflows early), or loosen allowed_token_ids, biases, min_new_tokens and the "
        "grammar"
    )


def _place(index: int, position: int, copies: int) -> str:
    row = f"prompt {index // copies}" + (f", sequence {index % copies}" if copies > 1 else "")
    return f"{row}, position {position}"


def output_of(call: PreparedCall, stats: Stats) -> GenerateOutput:
    """Everything that a call has made; what the caller did not ask for is None."""
    requests, chosen = call.requests, call.options
    recorded = chosen.top_logprobs is not None
    return GenerateOutput(
        _sequences(requests, chosen, call.prompts),
        [request.new_tokens for request in requests],
        [cast("str", request.finish_reason) for request in requests],
        stats,
        [request.logprobs for request in requests] if recorded else None,
        [request.top_logprobs for request in requests] if recorded else None,
        [request.watch.text for request in requests if isinstance(request.watch, StopWatch)]
        if chosen.stop_strings
        else None,
    )


def _sequences(requests: list[Request], chosen: Options, raw: RawPrompts) -> Tensor:
    """Prompts, left-padded, and new tokens: LongTensor [B, T + new] where the caller's prompts are."""
    width, longest = raw.width, max(len(request.new_tokens) for request in requests)
    rows = []
    for index, request in enumerate(requests):
        row = raw.rows[index // chosen.copies]  # the caller's own padding ids are kept
        tail = [chosen.pad_token_id] * (longest - len(request.new_tokens))
        rows.append([chosen.pad_token_id] * (width - len(row)) + row + request.new_tokens + tail)
    return torch.tensor(rows, dtype=torch.int64, device=raw.device)
