"""Speculative decoding inside transformers: `model.generate(ids, custom_generate=generate, draft=draft, ...)`.

The first call makes a `FastSpecGenerator` from the model, which copies the weights. It is stored in an attribute of the
model, and later calls use it again. Weights that have changed since, for example in training, are copied again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastspec.errors import UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.output import GenerateOutput

_LEAST_ROOM: Final = 512  # least `max_length` of a generator, if the model's context is so long
_ATTRIBUTE: Final = "_fastspec"
# arguments that `generate` of transformers prepares for the model; none of them changes the text
_UNREAD: Final = frozenset(["attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"])
_CACHES: Final = ("cache", "past_key_values")


class _Kept:
    """Generator that belongs to a model, with the state of the weights that it has copied.

    The object is an attribute of the model. A copy of the model gets a new, empty one.

    Attributes:
        generator: the generator. None before the first call.
        options: arguments with which the generator was made.
        draft: its draft model.
        seen: "target" or "draft" -> result of `_state_of` for this model when its weights were copied last.
    """

    def __init__(self) -> None:
        self.generator: FastSpecGenerator | None = None
        self.options: dict[str, Any] = {}
        self.draft: nn.Module | None = None
        self.seen: dict[str, tuple[Any, ...]] = {}

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[Callable[[], _Kept], tuple[()]]:
        return _Kept, ()


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft: Any = None,
    assistant_model: Any = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    generator_options: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generates text in place of the decoding loop of transformers. Pass this function as `custom_generate`.

    Args:
        model: a loaded model of transformers.
        input_ids, logits_processor, stopping_criteria, generation_config: prepared by `generate` of transformers.
        draft: the draft; see `FastSpecGenerator`. None: no draft.
        assistant_model: another name of `draft`. None if transformers does not pass it on.
        streamer: object that gets the new tokens. None if transformers does not pass it on.
        synced_gpus: must be False.
        generator_options: arguments of `FastSpecGenerator`. By default dtype and device are the model's, and
            max_batch_size and max_length are enough for the call. max_length is at least 512 if the model allows it.
        **model_kwargs: prepared by `generate` of transformers.

    Returns:
        What `generate` of transformers returns, without scores: ids [B, T + new], or with `return_dict_in_generate` an
        output object.

    Raises:
        UnsupportedOption: an option, a processor or a criterion that fastspec does not have. The message names it.
        ValueError, InvalidLogits: see `FastSpecGenerator.generate`.
    """
    if draft is not None and assistant_model is not None and draft is not assistant_model:
        raise UnsupportedOption("draft and assistant_model are two names of one argument; give one of them")
    if synced_gpus:
        raise UnsupportedOption("synced_gpus=True is not supported: generate on each process by itself")
    _check_arguments(model_kwargs, input_ids)
    _check_lists(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    total = int(generation_config.max_length)
    gen = _generator_of(
        model, draft if draft is not None else assistant_model, len(input_ids), total, generator_options
    )
    config = copy.deepcopy(generation_config)
    config.num_return_sequences = 1  # transformers has repeated the prompts
    config.max_new_tokens, config.max_length = total - input_ids.shape[1], None
    config.return_dict_in_generate = True
    mask = model_kwargs.get("attention_mask")
    output = gen.generate(
        input_ids,
        torch.ones_like(input_ids) if mask is None else mask,
        config,
        None if streamer is None else _WithoutPrompt(streamer),
    )
    assert isinstance(output, GenerateOutput)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=output.sequences)  # type: ignore[arg-type]
    return output.sequences


class _WithoutPrompt(BaseStreamer):
    """Streamer that passes new tokens on to the user's streamer. It leaves out the prompt, which is there already.

    Args:
        streamer: the user's streamer.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer, self._begun = streamer, False

    def put(self, value: Tensor) -> None:
        """Passes new tokens on to the user's streamer. Ignores the first call, which has the prompt.

        Args:
            value: token ids of the prompt (first call) or of new tokens.
        """
        if self._begun:
            self._streamer.put(value)
        self._begun = True

    def end(self) -> None:
        """Ends the user's stream."""
        self._streamer.end()


def _check_arguments(given: Mapping[str, Any], input_ids: Tensor) -> None:
    """Refuses arguments for the model that would change its text, and caches that have tokens already.

    Args:
        given: arguments that `generate` of transformers prepared for the model.
        input_ids: ids [B, T] of the prompts.
    """
    for name in _CACHES:
        cache = given.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise UnsupportedOption(f"{name} holds tokens already; leave it out: prompts are read whole")
    others = sorted(name for name, value in given.items() if value is not None and name not in (*_CACHES, *_UNREAD))
    if others:
        raise UnsupportedOption(f"{', '.join(others)}: arguments of the model are not supported; leave them out")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if positions is not None:
        ones = torch.ones_like(input_ids) if mask is None else mask
        wanted = (ones.cumsum(-1) - 1).masked_fill(ones == 0, 0)
        if not torch.equal(positions.masked_fill(ones == 0, 0), wanted):
            raise UnsupportedOption("position_ids are not those of attention_mask; leave them out")


def _check_lists(
    model: Any,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuses logits processors and stopping criteria of the user, which fastspec does not run.

    Those that transformers itself makes from the config are accepted, because fastspec has the same options.
    """
    own = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=input_ids.device,
        model_kwargs=model_kwargs,
    )
    _compare(
        "logits_processor", processors, own, "logit_bias, allowed_token_ids and grammars of fastspec's own generate"
    )
    if config.stop_strings is None:  # otherwise making the criterion again would need the user's tokenizer
        own = model._get_stopping_criteria(generation_config=config, stopping_criteria=StoppingCriteriaList())
        _compare("stopping_criteria", criteria, own, "eos_token_id or stop_strings")


def _compare(name: str, given: list[Any], own: list[Any], instead: str) -> None:
    known = [_described(each) for each in own]
    for each in given:
        if _described(each) not in known:
            raise UnsupportedOption(f"{name}: {type(each).__name__} is not supported here; use {instead}")


def _described(part: Any) -> tuple[object, str]:
    """Returns (class, fields as text) of a logits processor or stopping criterion. Equal parts do the same."""
    return type(part), repr(sorted(vars(part).items(), key=lambda item: item[0]))


def _generator_of(model: Any, draft: Any, rows: int, tokens: int, given: Mapping[str, Any] | None) -> FastSpecGenerator:
    """Returns the generator that is stored in an attribute of the model, with the present weights.

    Makes a new one if there is none, or if it does not fit the call.

    Args:
        model: the target.
        draft: the draft.
        rows: number of prompts.
        tokens: tokens of the longest prompt with its answer.
        given: the user's arguments of `FastSpecGenerator`.
    """
    kept: _Kept = vars(model).setdefault(_ATTRIBUTE, _Kept())
    asked = dict(given or {})
    made, options = kept.generator, kept.options
    fits = (
        made is not None
        and kept.draft is draft
        and kept.options.get("asked") == asked
        and tokens <= made.max_length
        and ("max_batch_size" in asked or rows <= options["rows"])
    )
    if not fits:
        if made is not None:
            kept.generator = None
            made.close()
        wide = max(rows, options.get("rows", 1))
        context = int(getattr(model.config, "max_position_embeddings", None) or tokens)
        room = max(_LEAST_ROOM, options.get("tokens", 0), 1 << (tokens - 1).bit_length())
        sizes = {"max_batch_size": wide, "max_length": max(tokens, min(room, context)), "dtype": model.dtype}
        kept.generator = FastSpecGenerator(model, draft, **{"progress": False, **sizes, **asked})
        kept.options, kept.draft = {"asked": asked, "rows": wide, "tokens": room}, draft
        kept.seen = {"target": _state_of(model), "draft": _state_of(draft)}
        return kept.generator
    assert made is not None, "it fits"
    for role, module in (("target", model), ("draft", draft)):
        now = _state_of(module)
        if kept.seen[role] != now:
            made.update_weights(module, model=role)  # type: ignore[arg-type]
            kept.seen[role] = now
    return made


def _state_of(module: Any) -> tuple[Any, ...]:
    """Returns (address, number of changes in place that torch counted) for each parameter of a live model.

    If a later call returns the same, the weights have not changed. Returns () for a draft that is not a module.
    """
    if not isinstance(module, nn.Module):
        return ()
    return tuple((each.data_ptr(), -1 if each.is_inference() else each._version) for each in module.parameters())
