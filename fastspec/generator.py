"""FastSpecGenerator: a target model, a draft model, and `generate`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from fastspec import inputs, options
from fastspec.errors import UnsupportedOption
from fastspec.kernels.reference import UNTILED, Tiling
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.kv_cache.pages import PageTable
from fastspec.loop import DecodeLoop, Engine, Request
from fastspec.memory import FREE_SHARE, Layout, MemoryPlan, free_bytes
from fastspec.models.decoder import Decoder
from fastspec.models.sources import Checkpoint, load_tokenizer, resolve
from fastspec.models.spec import ModelSpec
from fastspec.models.vocab import shared_vocab
from fastspec.models.weights import load_weights
from fastspec.options import Options
from fastspec.output import GenerateOutput, Stats
from fastspec.proposers.base import FILTERED, GREEDY, SAMPLED
from fastspec.proposers.draft_model import DraftModel
from fastspec.state import DecodeState
from fastspec.step import Parts

MAX_DRAFTS = 16
# Rows of every product of a step: 8 cover k + 1 = 5..8 of one row at the price of five on a CPU; on a GPU a pass
# waits for the weights, so padding to 64 costs little and lets a batch of 8 x 8 rows read them once.
_DECODE_TILING = {"cpu": Tiling(rows=8, queries=8), "cuda": Tiling(rows=64, queries=8)}
_CHUNK = {"cpu": 64, "cuda": 256}  # prompt tokens per prefill pass

Source = str | os.PathLike[str] | PreTrainedModel


class FastSpecGenerator:
    """Generates text of a target model, faster with a draft model's help, and with the target's exact law.

    Args:
        target: a local directory, a Hugging Face Hub id, or a loaded transformers model.
        draft: the same, with the target's tokenizer; None decodes without drafts.
        num_speculative_tokens: k, drafts per step (0..16); 0 decodes plainly.
        max_batch_size: prompts decoded at once; further ones wait for a free place.
        max_length: tokens of prompt and output per row, up to the target's context. Default: the smaller of the
            models' contexts, and what fits in 90% of the free memory; it is printed. A row that outgrows the draft's
            context goes on without drafts.
        page_size: positions per K/V cache page.
        dtype: of weights and cache, for both models. Default: each checkpoint's own on CUDA, float32 on a CPU.
        device: default: the live target model's, else CUDA where there is one.
        target_revision, draft_revision: branch, tag or commit of a Hub id.
        release_source: free the tensors of live modules while they are copied; they are unusable afterwards.
        exact: a row's result does not depend on k, its place or its neighbours, to the bit (docs/numerics.md).
            False lets matrix products take any shape, which may be faster.
        progress: show progress bars and the chosen max_length on stderr.

    Raises:
        UnsupportedModel, CheckpointError: from loading; nothing is kept.
        ValueError: a size out of range, or a draft with another tokenizer.
        MemoryError: the plan does not fit; the message names what does.
    """

    def __init__(
        self,
        target: Source,
        draft: Source | None = None,
        *,
        num_speculative_tokens: int = 4,
        max_batch_size: int = 8,
        max_length: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        target_revision: str | None = None,
        draft_revision: str | None = None,
        release_source: bool = False,
        exact: bool = True,
        progress: bool = True,
    ) -> None:
        _check_range("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
        _check_range("max_batch_size", max_batch_size, 1, 1024)
        _check_range("page_size", page_size, 1, 4096)
        self._lock = threading.Lock()
        self._target = resolve(target, role="target", revision=target_revision)
        self._draft = None if draft is None else resolve(draft, role="draft", revision=draft_revision)
        self.device = _device(device, self._target)
        self.num_speculative_tokens = num_speculative_tokens if self._draft else 0
        common = shared_vocab(self._target, self._draft) if self._draft else 0
        layout = Layout(
            batch=max_batch_size,
            max_drafts=self.num_speculative_tokens,
            page_size=page_size,
            target=self._target.spec,
            target_dtype=_dtype(dtype, self._target.spec, self.device),
            draft=self._draft.spec if self._draft else None,
            draft_dtype=_dtype(dtype, (self._draft or self._target).spec, self.device),
        )
        self.max_length = _max_length(max_length, layout, self.device, progress)
        self.memory_plan: MemoryPlan = layout.plan(self.max_length)
        tiling = _DECODE_TILING[self.device.type] if exact else UNTILED
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._engine: Engine | None = self._build(layout, common, tiling, release_source, progress)

    def _build(self, layout: Layout, common: int, tiling: Tiling, release_source: bool, progress: bool) -> Engine:
        """Loads weights and allocates every buffer."""

        def decoder(checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
            spec = checkpoint.spec
            weights = load_weights(
                checkpoint, dtype=dtype, device=self.device, progress=progress, release_source=release_source
            )
            cache = PagedKVCache.allocate(
                spec.num_layers,
                layout.num_pages(self.max_length),
                layout.page_size,
                spec.num_kv_heads,
                spec.head_dim,
                dtype=dtype,
                device=self.device,
            )
            return Decoder(spec, weights, cache, layout.pages_per_row(self.max_length) * layout.page_size)

        target = decoder(self._target, layout.target_dtype)
        proposer = None
        if self._draft:
            draft = decoder(self._draft, layout.draft_dtype)
            proposer = DraftModel(draft, layout.page_size, common, self._draft.spec.max_length)
        state = DecodeState.allocate(
            batch=layout.batch,
            max_drafts=layout.max_drafts,
            max_length=self.max_length,
            pages_per_row=layout.pages_per_row(self.max_length),
            vocab_size=layout.target.vocab_size,
            device=self.device,
        )
        return Engine(
            parts=Parts(target, proposer, layout.page_size),
            state=state,
            pages=PageTable(layout.num_pages(self.max_length), layout.page_size),
            max_drafts=layout.max_drafts,
            decode_tiling=tiling,
            chunk=_CHUNK[self.device.type],
        )

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits; prompts hold ids below it."""
        return self._target.spec.vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer, loaded on first use; None when the checkpoint brings none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._target)
        return self._tokenizer

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **keywords: Any,
    ) -> Tensor | GenerateOutput:
        """Continues every prompt.

        Args:
            input_ids: LongTensor [B, T] (left padding marked by the mask), a 1-D tensor, or a list of lists of ids.
            attention_mask: like input_ids, 0 for left padding and 1 for the prompt.
            generation_config: a transformers GenerationConfig; keywords come on top of it.
            streamer: gets the prompt, then the tokens of each step, then end(); for one prompt.
            **keywords: generation options (README lists them), `seed`, and `num_speculative_tokens` to draft fewer
                than the generator was made for.

        Returns:
            LongTensor [B, T + new] on the prompts' device, padded after a row's end; or a GenerateOutput when
            return_dict_in_generate is set.

        Raises:
            ValueError: a bad prompt or option value, named with its place; nothing was launched.
            UnsupportedOption: an option outside the supported list.
            RuntimeError: the generator is closed, or in use by another call.
        """
        requests, chosen = self._prepare(input_ids, attention_mask, generation_config, keywords)
        if streamer is not None and len(requests) != 1:
            raise UnsupportedOption(f"a streamer takes one prompt, got {len(requests)}; use stream() for a batch")
        if streamer is not None:
            streamer.put(torch.tensor([requests[0].prompt]))
        start = time.perf_counter()
        for emitted in self._run(requests, chosen):
            if streamer is not None and emitted.get(0):
                streamer.put(torch.tensor(emitted[0]))
        if streamer is not None:
            streamer.end()
        k = self._drafts(chosen)
        stats = Stats.of(tuple(request.stats() for request in requests), k, time.perf_counter() - start)
        return _output(requests, chosen, stats, input_ids)

    def stream(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        **keywords: Any,
    ) -> Iterator[dict[int, list[int]]]:
        """Like `generate`, but yields after each step the new tokens of every prompt that got some, by its index.

        Leaving the iteration early ends the call; the generator stays usable.
        """
        requests, chosen = self._prepare(input_ids, attention_mask, generation_config, keywords)
        return self._run(requests, chosen)

    def _prepare(
        self,
        input_ids: Any,
        attention_mask: Any,
        generation_config: GenerationConfig | None,
        keywords: dict[str, Any],
    ) -> tuple[list[Request], Options]:
        """Checks a call and turns it into requests; touches no device memory."""
        self._open_engine()
        spec = self._target.spec
        prompts = inputs.prompts_of(input_ids, attention_mask, spec.vocab_size)
        chosen = options.resolve(
            self._target.generation_config,
            generation_config,
            keywords,
            num_rows=len(prompts),
            prompt_length=_padded_length(input_ids, prompts),
            vocab_size=spec.vocab_size,
            context=min(spec.max_length, self.max_length),
        )
        self._drafts(chosen)
        for index, prompt in enumerate(prompts):
            if len(prompt) + chosen.max_new_tokens > self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; with {chosen.max_new_tokens} new ones that is more than "
                    f"max_length={self.max_length}. Shorten one of them, or make the generator with a larger max_length"
                )
        requests = [
            Request(prompt, chosen.max_new_tokens, row) for prompt, row in zip(prompts, chosen.rows, strict=True)
        ]
        return requests, chosen

    def _drafts(self, chosen: Options) -> int:
        """Drafts per step of this call."""
        asked = chosen.num_speculative_tokens
        if asked is None:
            return self.num_speculative_tokens
        if asked > self.num_speculative_tokens:
            made = "without a draft" if self._draft is None else f"for at most {self.num_speculative_tokens}"
            raise ValueError(
                f"num_speculative_tokens={asked}, but the generator was made {made}; "
                "make it with a draft and a larger num_speculative_tokens"
            )
        return asked

    def _run(self, requests: list[Request], chosen: Options) -> Iterator[dict[int, list[int]]]:
        """Runs requests to their end under the lock."""
        engine = self._open_engine()
        sampler = GREEDY if not chosen.sampled else FILTERED if chosen.filtered else SAMPLED
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; wait for it, or make one per thread")
        try:
            choose_k = self._choose_k(chosen)
            yield from DecodeLoop(engine, requests, chosen.stop_ids, sampler, choose_k, chosen.top_logprobs)
        finally:
            self._lock.release()

    def _choose_k(self, chosen: Options) -> Callable[[int], int]:
        """Drafts for each step, from the number of steps made before it."""
        k = self._drafts(chosen)
        return lambda steps_made: k

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this generator is closed; make a new one")
        return self._engine

    def close(self) -> None:
        """Frees weights, caches and buffers. Closing twice is fine; any other use afterwards is an error.

        Raises:
            RuntimeError: a call is still running.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; close it after that call")
        try:
            self._engine = None
        finally:
            self._lock.release()

    def __enter__(self) -> FastSpecGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_range(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number between {low} and {high}, got {value!r}")


def _device(device: torch.device | str | None, target: Checkpoint) -> torch.device:
    if device is None and target.module is not None:
        chosen = next(target.module.parameters()).device
    else:
        chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type not in _DECODE_TILING:
        raise ValueError(f"device {chosen} is not supported; use one of {', '.join(_DECODE_TILING)}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _dtype(dtype: torch.dtype | str | None, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if dtype is None:
        return spec.dtype if device.type == "cuda" else torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return cast("torch.dtype", named)


def _max_length(asked: int | None, layout: Layout, device: torch.device, progress: bool) -> int:
    # by default both models can take in a whole row; when asked for more, rows go on without drafts
    context = layout.target.max_length
    preferred = min(context, layout.draft.max_length) if layout.draft else context
    free = int(free_bytes(device) * FREE_SHARE)
    if asked is not None:
        _check_range("max_length", asked, 2, context)
        if layout.plan(asked).total > free:
            fits = layout.largest_length(context, free)
            raise MemoryError(
                f"max_length={asked} with max_batch_size={layout.batch} needs {layout.plan(asked)}, but "
                f"{free / 2**30:.3f} GiB may be taken on {device}; the largest max_length that fits is {fits}"
            )
        return asked
    fits = layout.largest_length(preferred, free)
    if fits < 2:
        raise MemoryError(
            f"the models need {layout.plan(2)}, but {free / 2**30:.3f} GiB may be taken on {device}; "
            "lower max_batch_size, or use smaller models"
        )
    if progress:
        why = "the models' context" if fits == preferred else "what fits in 90% of the free memory"
        tqdm.write(f"fastspec: max_length = {fits} ({why}); {layout.plan(fits)}", file=sys.stderr)
    return fits


def _padded_length(input_ids: Any, prompts: list[list[int]]) -> int:
    return input_ids.shape[-1] if isinstance(input_ids, Tensor) else max(len(prompt) for prompt in prompts)


def _output(requests: list[Request], chosen: Options, stats: Stats, input_ids: Any) -> Tensor | GenerateOutput:
    width = _padded_length(input_ids, [request.prompt for request in requests])
    longest = max(len(request.new_tokens) for request in requests)
    rows = []
    for index, request in enumerate(requests):
        padding = [chosen.pad_token_id] * (width - len(request.prompt))
        if isinstance(input_ids, Tensor):  # the caller's own padding ids are kept
            padding = (input_ids if input_ids.dim() == 2 else input_ids[None])[index].tolist()[: len(padding)]
        tail = [chosen.pad_token_id] * (longest - len(request.new_tokens))
        rows.append(padding + request.prompt + request.new_tokens + tail)
    device = input_ids.device if isinstance(input_ids, Tensor) else None
    sequences = torch.tensor(rows, dtype=torch.int64, device=device)
    if not chosen.return_dict:
        return sequences
    return GenerateOutput(
        sequences,
        [request.new_tokens for request in requests],
        [cast("str", request.finish_reason) for request in requests],
        stats,
        None if chosen.top_logprobs is None else [request.logprobs for request in requests],
        None if chosen.top_logprobs is None else [request.top_logprobs for request in requests],
    )
