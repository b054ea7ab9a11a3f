"""`FastSpecGenerator`: generates text of a target model with speculative decoding."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakSet

import torch
from torch import Tensor

from fastspec.adaptive.controller import AUTO
from fastspec.config import PREFILL_BUDGET, Config, PlanOptions, Source
from fastspec.distributed.following import (
    Leader,
    Reader,
    RequestNumbers,
    check_submits,
    check_tokenizer_is_stored,
    follow,
)
from fastspec.distributed.rank_settings import agreed_warmup
from fastspec.distributed.ranks import Ranks
from fastspec.engine.arguments import checked_arguments
from fastspec.engine.build import build
from fastspec.engine.engine import Engine
from fastspec.engine.explain import explain
from fastspec.engine.memory import MemoryPlan, release_unused
from fastspec.engine.settings import announce
from fastspec.engine.sleep import Asleep, lay_down, models_of
from fastspec.engine.warmup import compilers_for, filling, warm_up_for
from fastspec.engine.weight_updates import ModelWeights, Update, by_role, checked, restored
from fastspec.errors import InvalidLogits, UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.graphs.addresses import code_layouts
from fastspec.inputs.call import CallArguments, ModelLimits, check_streamer, one_prompt, read_call
from fastspec.inputs.scored import ScoreInputs, ScoreMode, read_scored
from fastspec.inputs.table import GenerateOptions, ScoreOptions
from fastspec.inputs.values import id_sequences
from fastspec.models.checkpoints.pair import warn_of_small
from fastspec.models.checkpoints.resolve import load_tokenizer
from fastspec.models.checkpoints.updates import NewWeights
from fastspec.models.heads.weights import PendingHead
from fastspec.models.vocab import SharedVocab, shared_vocab
from fastspec.output import GenerateOutput, ScoreOutput, Stats
from fastspec.proposers.interface import Proposer
from fastspec.proposers.suffix import Suffix
from fastspec.sampling.rules import BLOCK, Verification, announce_synthetic, synthetic_name
from fastspec.scheduling.advice import advice_on_drafts
from fastspec.scheduling.calibrate import CALIBRATION_TOKENS, Calibration, calibrate
from fastspec.scheduling.draft_length import DraftChoice, DraftPlan
from fastspec.scheduling.format_trial import trial_of
from fastspec.scheduling.handle import Delivery, Handle, OfOneProcess
from fastspec.scheduling.loop import Emitted, Loop, MakeReady
from fastspec.scheduling.requests import (
    PreparedCall,
    check_texts,
    corpora_of,
    output_of,
    requests_of,
    score_output_of,
)
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from fastspec.torch_settings import shielded

if TYPE_CHECKING:  # transformers' models are heavy to import, and a directory needs none of them
    from transformers import GenerationConfig, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer
    from typing_extensions import Unpack


class FastSpecGenerator(OfOneProcess):
    """Generates text of a target model by speculative decoding, with exactly the distribution of the target.

    Args:
        target: a local directory, a Hugging Face Hub id, or a loaded transformers model.
        draft: a smaller model, a learned drafter, or "mtp" (the target's own MTP layer). With another tokenizer than
            the target's, a model drafts only the tokens that both have. None: no draft model.
        proposer: `NGram()` (lookup in the request's own tokens, before the draft model is asked), `Suffix()` (lookup in
            predictions, corpora and earlier answers as well, docs/guides/repeats.md), or your own `Proposer`.
        verification: rule that accepts sampled draft tokens: "block" (accepts the most), "rejection", or "coupled" (the
            text depends on the seed, not on the draft tokens), see docs/numerics.md. `SyntheticAcceptance` is for
            benchmarks only.
        num_speculative_tokens: k, number of draft tokens per decode step, 0..16. 0: decoding without draft tokens.
            On a CPU with `NGram` or `Suffix` and no draft model, 0..32.
            "auto" chooses k during decoding, by measured tokens per second, up to 8, or 16 without a draft model
            (docs/guides).
        max_batch_size: number of requests that are decoded at once. Further requests wait for a free batch slot.
        max_length: largest number of tokens of prompt and output together, up to the target's context. Default: the
            smaller of the models' contexts, or less if 90% of the free memory holds less. Requests longer than the
            draft's context continue without draft tokens.
        page_size: number of positions per KV cache page.
        dtype: dtype of weights and KV cache of both models. Default: each checkpoint's dtype on CUDA, float32 on a CPU.
        device: default: the device of a loaded target model, else CUDA if available.
        target_revision, draft_revision: branch, tag or commit of a Hub id.
        target_quantization, draft_quantization: format to which weights are quantised while they are loaded: "fp8",
            "int8" or "int4". Weights that are stored quantised stay as they are. A quantised draft never changes the
            text, a quantised target does. "auto" takes the draft's fastest format by an estimate; `calibrate` measures
            it (docs/guides/quantised.md).
        kv_dtype: "fp8" stores K and V in 8 bits (e4m3), half the memory. A pair sets target and draft separately. An
            fp8 KV cache of the target changes the text, equally with and without draft tokens (docs/guides/memory.md).
            None: the models' dtype.
        feature_layers: layer boundaries of the target whose hidden states a learned drafter reads. Default: from the
            drafter's config (docs/guides/heads.md).
        draft_vocab: token ids that a head or "mtp" may draft. Token ids outside this list are never drafted. The text
            is the same (docs/guides/heads.md).
        release_source: True frees the tensors of loaded models while they are copied. These models are unusable
            afterwards.
        prefix_cache: True keeps KV cache pages of earlier prompts until a request needs the space. A prompt that begins
            like an earlier one is computed only from the first difference, with bit-identical text. Needs no extra
            memory (docs/guides/chat.md).
        prefill_budget: number of prompt tokens that are prefilled between two decode steps of running requests (at
            least one pass). None: a whole prompt is prefilled at once, and running requests wait.
        exact: True makes a request's result bit-identical for every k, batch slot and set of other requests
            (docs/numerics.md). False lets matrix products take any shape, which may be faster.
        graphs: True captures each kind of decode step as one CUDA graph and replays it. False launches every operation
            from the host. Default: True on CUDA with Triton.
        compile: True runs both models through torch.compile instead of fastspec's own fused kernels; needs exact=False.
        nvtx: True marks steps and their phases for a profiler.
        progress: True shows progress bars on stderr, and before them the chosen max_length and the memory. A function
            is called with each of these lines instead, and no bars are shown.
        tensor_parallel: number of processes, each with its own GPU, that share the target: 1, 2, 4 or 8. "auto": all
            processes that torchrun started. Each process makes the same generator and the same calls
            (docs/guides/several-gpus.md).
        draft_tensor_parallel: "split" divides the draft among these processes. "replicated" copies it to each of them.
            Default: the faster of the two, by an estimate.

    Raises:
        UnsupportedModel, CheckpointError: loading failed; nothing is kept.
        ValueError: a size out of range, a draft that shares no token with the target, or an object that is no
            Proposer.
        MemoryError: the plan does not fit; the message says which settings would fit.
    """

    @shielded()
    def __init__(
        self,
        target: Source,
        draft: Source | None = None,
        *,
        proposer: Proposer | None = None,
        verification: Verification = BLOCK,
        num_speculative_tokens: int | str = 4,
        max_batch_size: int = 8,
        max_length: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        target_revision: str | None = None,
        draft_revision: str | None = None,
        target_quantization: str | None = None,
        draft_quantization: str | None = AUTO,
        kv_dtype: str | Sequence[str | None] | None = None,
        feature_layers: Sequence[int] | None = None,
        draft_vocab: Sequence[int] | None = None,
        release_source: bool = False,
        prefix_cache: bool = True,
        prefill_budget: int | None = PREFILL_BUDGET,
        exact: bool = True,
        graphs: bool | None = None,
        compile: bool = False,
        nvtx: bool = False,
        progress: bool | Callable[[str], object] = True,
        tensor_parallel: int | str | None = None,
        draft_tensor_parallel: str | None = None,
    ) -> None:
        self._ranks = ranks = Ranks.of(tensor_parallel, draft_tensor_parallel)
        config = Config(
            proposer=proposer,
            verification=verification,
            num_speculative_tokens=num_speculative_tokens,
            max_batch_size=max_batch_size,
            max_length=max_length,
            page_size=page_size,
            dtype=dtype,
            device=device,
            target_revision=target_revision,
            draft_revision=draft_revision,
            target_quantization=target_quantization,
            draft_quantization=draft_quantization,
            kv_dtype=kv_dtype,
            feature_layers=feature_layers,
            draft_vocab=draft_vocab,
            release_source=release_source,
            prefix_cache=prefix_cache,
            prefill_budget=prefill_budget,
            exact=exact,
            graphs=graphs,
            compile=compile,
            nvtx=nvtx,
            tensor_parallel=tensor_parallel,
            draft_tensor_parallel=draft_tensor_parallel,
            progress=progress if ranks.first else False,
        )
        with compilers_for(target, device, graphs, ranks.world.rank, ranks.size) as compilers:  # it may take longest
            self._target, self._draft, self._settings = checked_arguments(target, draft, config, ranks)
            announce_synthetic(verification)
            if ranks.first:
                warn_of_small(self._target)
            if config.progress:
                announce(self._settings, self._target, self._draft, config.progress)
            self.device, self.max_length = self._settings.device, self._settings.max_length
            self.memory_plan: MemoryPlan = self._settings.memory
            auto, layout = self._settings.auto, self._settings.layout
            self._drafting = DraftPlan(auto, layout.max_drafts, self._settings.verification)
            self.num_speculative_tokens = self._drafting.default
            self._shared_vocab = shared_vocab(self._target, self._draft) if self._draft else SharedVocab(0)
            self._tokenizer: PreTrainedTokenizerBase | None = None
            self._grammars = Grammars(self.vocab_size)
            engine, weights = build(
                self._settings, self._target, self._draft, shared_vocab=self._shared_vocab, ranks=ranks
            )
            self._trial = trial_of(self._draft, layout.draft_dtype, released=release_source, ranks=ranks.size)
            self._weights = by_role(weights)
            self._head = next((each for each in weights if isinstance(each, PendingHead)), None)
            self._asleep: Asleep | None = None
            self._updates = 0
            self._layouts = dict[str, dict[int, tuple[object, ...]]]()  # of quantised weights, as steps were captured
            self._half = set[str]()  # models whose weights are part old, part new, because an update has failed
            self._numbers = RequestNumbers()
            make_ready = partial(warm_up_for, progress=config.bars, loaded=ranks.world.wait_for_all)
            self._streams: WeakSet[Generator[Emitted, None, None]] = WeakSet()  # iterations of calls, ended or not
            self._loop = _loop_of(engine, make_ready, self.max_length, ranks, self._numbers)
            with filling(weights, self.device) as loaded:
                self._warm_up(self._drafting.for_warmup(None, GREEDY), 0, loaded, compilers)

    @classmethod
    def plan(cls, target: Source, draft: Source | None = None, **options: Unpack[PlanOptions]) -> MemoryPlan:
        """Computes the memory that a generator with these arguments needs. Loads and allocates nothing.

        Args:
            target, draft, **options: arguments of the constructor that affect memory.

        Raises:
            TypeError: an argument that does not affect memory was given.
            MemoryError: the plan does not fit; the message says which settings would fit.
        """
        if others := sorted(options.keys() - PlanOptions.__annotations__.keys()):
            raise TypeError(f"plan() got an unexpected keyword argument {others[0]!r}, which takes no memory")
        return checked_arguments(target, draft, Config(**options), Ranks.alone())[2].memory

    @property
    def vocab_size(self) -> int:
        """Number of logits of the target. Token ids of prompts must be below it."""
        return self._target.spec.vocab_size

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Default options of calls, from the target's checkpoint. None: the checkpoint has none."""
        return self._target.generation_config

    @property
    def prediction_tokens(self) -> int:
        """Largest number of tokens per prompt in the option `predictions`. 0: the proposer does not use predictions."""
        return self._settings.layout.prediction_tokens

    @property
    def remembers(self) -> str | None:
        """Argument `remember` of the `Suffix` proposer. None: draft tokens never come from earlier answers."""
        proposer = self._settings.config.proposer
        return proposer.remember if isinstance(proposer, Suffix) else None

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache pages that running requests use, 0 to 1.

        Pages that only the prefix cache uses count as free.
        """
        if self._asleep is not None:
            return 0.0
        pages = self._open().engine.pages
        usable = pages.num_pages - 1
        return (usable - pages.num_free - pages.num_idle) / usable

    @property
    def has_tokenizer(self) -> bool:
        """True if the target's checkpoint has a tokenizer, which is loaded on first use."""
        return self._stored_tokenizer() is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded on first use.

        Raises:
            ValueError: the checkpoint has no tokenizer; see `has_tokenizer`.
        """
        tokenizer = self._stored_tokenizer()
        if tokenizer is None:
            raise ValueError("the target brings no tokenizer; put its tokenizer.json beside its config.json")
        return tokenizer

    def _stored_tokenizer(self) -> PreTrainedTokenizerBase | None:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._target)
        return self._tokenizer

    @overload
    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        *,
        return_dict_in_generate: Literal[True],
        **keywords: Unpack[GenerateOptions],
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: None = None,
        streamer: BaseStreamer | None = None,
        *,
        return_dict_in_generate: Literal[False] | None = None,
        **keywords: Unpack[GenerateOptions],
    ) -> Tensor: ...

    @overload
    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        *,
        return_dict_in_generate: bool | None = None,
        **keywords: Unpack[GenerateOptions],
    ) -> Tensor | GenerateOutput: ...

    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **keywords: Any,
    ) -> Tensor | GenerateOutput:
        """Continues every prompt.

        Args:
            input_ids: LongTensor [B, T] (left padding marked by the mask), a 1-D tensor, an array, a list of lists of
                ids, or the result of a tokenizer. `inputs` is another name for it, as in transformers.
            attention_mask: in the shape of input_ids, 0 for left padding and 1 for the prompt. Default: pad_token_id on
                the left of a tensor or an array is padding, unless it is a stop id too.
            generation_config: a transformers GenerationConfig; keywords take precedence.
            streamer: receives the prompt, then the tokens of each step, then a call of end(). For one prompt only.
            **keywords: generation options, most of them one value or one per prompt: docs/options.md lists all.

        Returns:
            LongTensor [B, T + new] on the prompts' device, right-padded; a GenerateOutput with return_dict_in_generate.

        Raises:
            ValueError: a prompt or option value is invalid; the message names it. Nothing was launched.
            UnsupportedOption: an option is not supported.
            InvalidLogits: the target gave NaN or infinite logits, or the options left no token. It is raised when the
                other sequences are complete. The error's `output` contains them.
            RuntimeError: the generator is closed, or a step failed.
        """
        call = self._prepare(CallArguments(input_ids, attention_mask, generation_config, keywords))
        requests = call.requests
        check_streamer(streamer, len(requests))
        if streamer is not None:
            streamer.put(torch.tensor([requests[0].prompt], device="cpu"))
        loop, start = self._open(), time.perf_counter()
        try:
            # an error of one rank, the streamer's too, ends a call that all ranks make
            with nullcontext() if loop.leads else self._ranks.guarded("generating"):
                for emitted in self._run(call):
                    if streamer is not None and emitted.get(0):
                        streamer.put(torch.tensor(emitted[0], device="cpu"))
        except InvalidLogits as error:
            error.output = output_of(call, self._stats(call, start, time.perf_counter()))
            raise
        if streamer is not None:
            streamer.end()
        stats = self._stats(call, start, time.perf_counter())
        free = all(request.grammar is None for request in requests)  # a grammar drafts without a pass
        if free and (advice := advice_on_drafts(stats, self._settings, loop, self._drafting)):
            warnings.warn(advice, stacklevel=2)
        output = output_of(call, stats)
        return output if call.options.return_dict else output.sequences

    def stream(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        **keywords: Unpack[GenerateOptions],
    ) -> Iterator[dict[int, list[int]]]:
        """Continues every prompt as `generate` does. After each step, yields {index of a prompt: its new tokens}.

        Prompts without new tokens are left out. With num_return_sequences, the index is that of a sequence, and the
        sequences of a prompt follow each other. If the iteration is left early, the call ends, and the generator stays
        usable. InvalidLogits is raised when the other sequences are complete.
        """
        arguments = CallArguments(input_ids, attention_mask, generation_config, {**keywords})
        return self._run(self._prepare(arguments))

    def submit(
        self, prompt_ids: Any, generation_config: GenerationConfig | None = None, **keywords: Unpack[GenerateOptions]
    ) -> Handle:
        """Continues one prompt, beside running calls and other handles.

        `submit` may be called from any thread at any time.

        All requests are decoded in one batch, by a thread of the generator that runs from the first `submit` on. The
        text of a request does not depend on the other requests. Requests wait for a free batch slot and free KV cache
        pages, first come, first served.

        Args:
            prompt_ids: ids of one prompt: a list, a 1-D tensor or array, or any form that `generate` takes.
            generation_config, **keywords: see `generate`.

        Returns:
            A Handle. Iterate over it for the tokens, call `result()`, or `await` it; `cancel()` ends it.

        Raises:
            ValueError, UnsupportedOption: see `generate`; or there are several prompts, or several texts of one.
            OutOfPages: the request needs more pages than the KV cache has.
            RuntimeError: the generator is closed, or several ranks are in a call that all of them make.
            RankFailed: another rank has failed.
        """
        loop = self._open()
        check_submits(self._ranks, loop)
        arguments = CallArguments(one_prompt(prompt_ids), None, generation_config, {**keywords})
        call = self._prepare(arguments, submitted=True)
        if (rows := len(call.requests)) != 1:
            raise UnsupportedOption(f"submit takes one prompt and one text of it, got {rows}; submit each")
        delivery = Delivery(call.requests)
        loop.join(call, delivery)

        def stats() -> Stats:
            return self._stats(call, delivery.started, delivery.ended or time.perf_counter())

        return Handle(call, delivery, lambda: loop.leave(call.requests), stats)

    def score(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        lengths: int | Sequence[int | None] | Tensor | None = None,
        top_logprobs: int = 0,
        prompt_logprobs: bool = True,
        logprobs_mode: str | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreOutput:
        """Computes the log-probabilities of given tokens. Other calls and handles continue meanwhile.

        Answers are scored by the same steps as in `generate`. So with `exact=True` their log-probabilities equal those
        that `generate` recorded for the same prompt and tokens, bit for bit. Prompts are scored by prefill passes.

        Args:
            input_ids, attention_mask: sequences, each a prompt and its answer, in any form that `generate` takes.
            lengths: number of prompt tokens of each sequence: one number for all, or one per sequence. None: the whole
                sequence is its prompt.
            top_logprobs: number of most probable ids to record at each token, up to 20.
            prompt_logprobs: True to score the prompts, too. With False prompts may come from the prefix cache.
            logprobs_mode: "raw" (default): all tokens are scored by the target's unprocessed logits. "processed":
                answers are scored under the distribution from which `generate` samples with these options. Prompts are
                scored as with "raw".
            generation_config, **options: sampling options of `generate`, for "processed" only.

        Raises:
            ValueError: a row or value is invalid, or the options ban a given token. Nothing was launched.
            UnsupportedOption: `score` does not have this option.
            InvalidLogits: the target gave NaN or infinite logits.
            RuntimeError: the generator is closed, or a step failed.
        """
        loop, start = self._open(), time.perf_counter()

        def make() -> tuple[ScoreInputs, PreparedCall]:
            """Checks the arguments, and makes a request for each sequence that has tokens to score."""
            found = read_scored(
                input_ids,
                attention_mask,
                lengths,
                top_logprobs,
                prompts=prompt_logprobs,
                vocab_size=self.vocab_size,
                max_length=self.max_length,
                mode=ScoreMode(logprobs_mode, self.generation_config, generation_config, options),
            )
            prompts = [row.tokens[: row.fed] for row in found.scored]
            requests = requests_of(prompts, found.options, None, self.max_length, self._grammars)
            choice = self._drafting.for_call(found.options)
            return found, PreparedCall(requests, found.options, found.raw, choice)

        alone = self._ranks.size == 1 or loop.leads
        inputs, call = (
            make() if alone else self._ranks.agreed_call(make, lambda made: (made[1].requests, made[1].options))
        )
        with nullcontext() if loop.leads else self._ranks.guarded("scoring"):
            for _ in self._run(call):
                pass
        return score_output_of(inputs.rows, call, self._stats(call, start, time.perf_counter()))

    def follow(self) -> None:
        """Repeats the steps of rank 0 on this rank, until rank 0 closes its generator. All other ranks call it.

        With `tensor_parallel` only rank 0 calls `submit`, and after that only rank 0 calls `generate` and `stream`.

        Raises:
            UnsupportedOption: there are no other ranks, or this is rank 0.
            RankFailed: a rank has failed; end all processes.
            RuntimeError: the generator is closed, or a call is running on this rank.
        """
        reader = Reader(self.max_length, self._drafting.for_call, self._stored_tokenizer, self._grammars)
        follow(self._ranks, self._open(), reader, self._numbers)

    def abort(self) -> None:
        """Cancels all requests. They keep their output tokens, and get the finish reason "cancelled".

        Handles have ended when this returns. A call in another thread ends with its next step.
        """
        self._open().abort()

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._loop.paused

    @property
    def weight_version(self) -> int | str:
        """Version of the target's weights: 0 as loaded, later the version given to `update_weights`."""
        self._loop.check_open()
        return self._loop.scheduler.weight_version

    def pause(self, *, abort: bool = False) -> None:
        """Holds or rejects new calls, and waits until all running calls and handles have ended.

        It is useful around `update_weights`, for example. Until `resume`, requests of `submit` are held, and
        `generate`, `stream` and `score` raise an error. An iteration of `stream` that is not read to its end must be
        closed.

        Args:
            abort: True to cancel the running requests, which keep their output tokens. False to wait for their end.
        """
        self._loop.pause(abort=abort)

    def resume(self) -> None:
        """Starts the requests that were held since `pause`, in the order of their arrival."""
        self._open().resume()

    def reset_prefix_cache(self) -> None:
        """Drops K/V and recurrent states of earlier prompts, so that no later prompt reuses them.

        `update_weights` does this itself.

        Raises:
            RuntimeError: a call or a handle is running, or the generator is closed.
        """
        with self._open().alone() as scheduler:
            scheduler.forget_prompts()

    def calibrate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        generation_config: GenerationConfig | None = None,
        **keywords: Unpack[GenerateOptions],
    ) -> Calibration:
        """Measures decoding of these prompts with every number of draft tokens, and finds what limits the speedup.

        The numbers are those from which "auto" chooses, including 0. Missing steps are captured first. "auto" uses the
        measurements later. If draft_quantization="auto" has quantised the draft, the first call also measures the draft
        with its original weights, and keeps the faster format.

        Args:
            input_ids, attention_mask, generation_config, **keywords: see `generate`. max_new_tokens is by default 64,
                or as many as `max_length` permits if that is less.

        Returns:
            A Calibration. Its str() is a table with the best number of draft tokens.

        Raises:
            ValueError: a prompt or option is invalid, nothing drafts, or the texts end before a step could be timed.
        """
        loop = self._open()
        arguments = CallArguments(input_ids, attention_mask, generation_config, {**keywords})
        call = self._prepare(arguments, CALIBRATION_TOKENS)
        requests, stop_ids = call.requests, call.options.stop_ids
        choice = self._drafting.for_calibration(call.options)
        with loop.alone() as scheduler, self._ranks.guarded("calibrating"):
            if self._trial is not None:
                self._trial.run(scheduler, requests, choice, stop_ids, loop.make_ready, self._drafting)
            loop.make_ready(requests, choice)
            found = calibrate(scheduler, requests, stop_ids, choice)
        return replace(found, draft_format=self._draft_format)

    @shielded()
    def update_weights(
        self,
        values: NewWeights,
        *,
        model: Literal["target", "draft"] = "target",
        version: int | str | None = None,
    ) -> None:
        """Replaces the weights of a model in place, so that captured CUDA graphs stay valid.

        All values are checked before the first one is copied. Afterwards results equal those of a new generator with
        the new checkpoint. K/V and recurrent states of earlier prompts are dropped. Tensors may be on any device. With
        `tensor_parallel` every rank makes this call with whole tensors, and copies its slices.

        Args:
            values: a directory, a Hub id, a loaded model, a state_dict, or (name, tensor) pairs by the names of the
                checkpoint. A state_dict or pairs may hold a part of the tensors; the others keep their values. A
                hosted model takes the names of transformers' module, too. All pairs are read before anything changes.
                Instead of a tensor, a pair may hold the result of `torch.multiprocessing.reductions.reduce_tensor` in
                another process (CUDA IPC).
            model: "target", or "draft" for a draft model or a learned drafter. A learned drafter needs all its tensors,
                by the names of its checkpoint. MTP layers use the names of the target's checkpoint.
            version: name of the target's new weights, for `Stats.weight_version`. None: the number of updates that the
                target has had.

        Raises:
            CheckpointError: the model has no tensor of that name, shape or dtype. Nothing has changed.
            UnsupportedOption: the draft is a head with draft_vocab, a hosted model that is stored quantised was given
                single tensors, or another rank was given other names.
            ValueError: `model` is neither of the two, or a version was given for the draft.
            RuntimeError: a call or a handle is running, or the generator is closed.
        """
        self._loop.check_open()
        self._check_awake()
        weights = self._updatable(model, version)

        def make() -> Update:
            """Checks the new values."""
            update = checked(values, weights)
            if model in self._half and not update.whole:
                raise RuntimeError(f"{self._half_changed()}; this update holds a part of them")
            return update

        with self._loop.alone() as scheduler:
            update, _ = self._ranks.agreed(
                make, lambda made: {"names": sorted(made.names), "model": model, "version": version}
            )
            engine = scheduler.engine
            engine.runner.wait_for_caller()
            self._half.add(model)
            captured = self._layouts.setdefault(model, code_layouts([weights.weights]))
            with self._ranks.guarded("updating weights"), engine.runner.on_stream():
                update.copy()
                engine.finish()
            layouts = code_layouts([weights.weights])
            _, moved = self._ranks.agreed(lambda: layouts != captured, lambda made: {}, lambda made: made)
            if any(moved):  # ranks capture together
                engine.capture_again(engine.runner.release())
            self._layouts[model] = layouts
            scheduler.forget_prompts()
            self._half.discard(model)
            if model == "target":
                self._updates += 1
                scheduler.weight_version = self._updates if version is None else version
        if model == "draft" and self._trial is not None:
            self._trial.forgo("not tried: the draft's weights were updated")

    def _updatable(self, model: str, version: object) -> ModelWeights | PendingHead:
        """Returns the weights of a model that `update_weights` may change. Raises an error if there are none."""
        if model not in ("target", "draft"):
            raise ValueError(f"model must be 'target' or 'draft', got {model!r}")
        if model == "draft" and version is not None:
            raise ValueError(f"version={version!r} is of the target's weights; leave it out with model='draft'")
        checkpoint = self._target if model == "target" else self._draft
        if checkpoint is None:
            raise ValueError("model='draft', and the generator has no draft model")
        if model == "draft" and self._head is not None:
            return self._head
        swapped = self._trial is not None and self._trial.draft.rounded != getattr(checkpoint, "rounded", None)
        if model == "draft" and swapped:
            raise UnsupportedOption(
                f"the {model} {checkpoint.name} is not updated in place, because calibrate() loaded it again; make a "
                "new generator"
            )
        return self._weights[model]

    def _own_weights(self) -> dict[str, ModelWeights]:
        """Returns {"target" or "draft": its weights} for the models whose weights can be loaded again."""
        swapped = self._trial is not None and self._trial.draft.rounded != getattr(self._draft, "rounded", None)
        return {model: each for model, each in self._weights.items() if model == "target" or not swapped}

    @property
    def asleep(self) -> int | None:
        """Level of the last `sleep`. None: the generator is awake."""
        return None if self._asleep is None else self._asleep.level

    @shielded()
    def sleep(self, level: int = 1) -> int:
        """Releases memory to the GPU driver until `wake`. In between, `generate` and similar calls raise an error.

        The contents of the prefix cache and captured CUDA graphs are deleted. Buffers that are not all zero are copied
        to host memory. On a CPU the memory is released to the operating system.

        Args:
            level: 1 frees K/V, recurrent states, buffers and CUDA graphs. 2 frees the weights as well; weights of a
                learned drafter are copied to host memory.

        Returns:
            The number of bytes that were freed, without the bytes of CUDA graphs.

        Raises:
            ValueError: the level is neither 1 nor 2.
            UnsupportedOption: several processes share the model.
            RuntimeError: a call or a handle is running, or the generator is closed or asleep.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 (caches and buffers) or 2 (weights, too), got {level!r}")
        if self._ranks.size > 1:
            raise UnsupportedOption(
                f"sleep is not supported for a model that {self._ranks.size} processes share; close() the generators"
            )
        loop = self._open()
        with loop.alone() as scheduler:
            scheduler.forget_prompts()
            own = [each.weights for each in self._own_weights().values()]
            kept = [*own, self._head, *models_of(scheduler.engine)] if level == 1 else []
            self._asleep = lay_down(scheduler.engine, level, kept, own if level == 2 else [])
        return self._asleep.freed

    @shielded()
    def wake(self, weights: NewWeights | None = None, *, version: int | str | None = None) -> None:
        """Allocates the memory that `sleep` released, and captures again the CUDA graphs that `sleep` deleted.

        After level 2 it also loads weights. The target gets `weights` if given, else the weights of its checkpoint. A
        draft model always gets the weights of its checkpoint.

        Args:
            weights: all tensors of the target, as for `update_weights`. None: the tensors of its checkpoint, with
                version 0.
            version: name of the loaded weights, see `update_weights`.

        Raises:
            CheckpointError, UnsupportedOption: see `update_weights`; the generator still sleeps.
            ValueError: weights were given after level 1, or not given for a target that was a loaded model.
            MemoryError: there is not enough memory; the generator still sleeps.
            RuntimeError: the generator does not sleep, or is closed.
        """
        self._loop.check_open()
        asleep = self._asleep
        if asleep is None:
            raise RuntimeError("this generator is not asleep; sleep() comes before wake()")
        if weights is not None and asleep.level == 1:
            raise ValueError("sleep(1) has kept the weights; call wake(), then update_weights(...)")
        updates = {
            model: self._reloading(model, pending, weights if model == "target" else None)
            for model, pending in (self._own_weights() if asleep.level == 2 else {}).items()
        }
        with self._loop.alone() as scheduler:
            engine = scheduler.engine
            engine.runner.wait_for_caller()
            asleep.regain(engine)
            self._asleep = None
            self._half.update(updates)
            for model, update in updates.items():
                with engine.runner.on_stream():
                    update.copy()
                    engine.finish()
                self._half.discard(model)
            if updates:
                self._updates += weights is not None
                made = self._updates if weights is not None else 0
                scheduler.weight_version = made if version is None else version
            asleep.recapture(engine)
            self._layouts.clear()

    def _reloading(self, model: str, pending: ModelWeights, values: NewWeights | None) -> Update:
        """Returns an update of all weights of a model, whose tensors have been checked.

        Args:
            model: "target" or "draft".
            pending: present weights of the model.
            values: the new values. None: those of the model's checkpoint.
        """
        update = restored(pending) if values is None else checked(values, pending)
        if not update.whole:
            raise ValueError(f"wake(weights) holds a part of the {model}'s tensors; after sleep(2) give all of them")
        return update

    def _check_awake(self) -> None:
        if self._asleep is not None:
            raise RuntimeError(f"this generator is asleep (level {self._asleep.level}); call wake() first")

    def _half_changed(self) -> str:
        model = min(self._half)
        return (
            f"an update of the {model} has failed midway, and its weights are part old, part new. Call "
            f"update_weights(..., model={model!r}) with all tensors, or make a new generator"
        )

    def warmup(
        self, num_speculative_tokens: int | str | None = None, *, sampler: str = GREEDY, length: int = 0
    ) -> None:
        """Captures CUDA graphs of the decode steps that calls with this number of draft tokens, or with 0, may need.

        With "auto" these are the steps of every k from which "auto" chooses, and they are timed, too. Earlier graphs
        are kept. The constructor captures the steps of greedy decoding with its own number of draft tokens. A call
        captures missing steps before it starts. Without CUDA graphs nothing is captured.

        Args:
            num_speculative_tokens: number of draft tokens per step, up to the generator's own number. None: the default
                of calls.
            sampler: "greedy" (every request takes the largest logit), or "full" (any sampling option).
            length: number of tokens of the longest request, prompt and output. Requests of up to 1024 positions,
                including a step's draft tokens, share one kind of step. Requests of up to 4096 positions share another
                kind, and so on. Prompts of 4354 tokens and more need one more kind.

        Raises:
            ValueError: a value out of range.
            RuntimeError: a step could not be captured; the message names it.
        """
        asked = num_speculative_tokens, sampler, length
        self._warm_up(*agreed_warmup(self._ranks, self._open(), self._drafting, self.max_length, asked))

    def _warm_up(
        self,
        choice: DraftChoice,
        length: int,
        loaded: Callable[[], None] = lambda: None,
        compilers: Executor | None = None,
    ) -> None:
        """Captures the steps that calls with the numbers of draft tokens of `choice` may need.

        Args:
            choice: numbers of draft tokens of the calls.
            length: number of tokens of the longest sequence.
            loaded: waits for weights that another thread still loads.
            compilers: see `Engine.compile`.
        """

        def all_ready() -> None:  # GPUs must not wait in an exchange for a rank that still compiles
            loaded()
            self._ranks.world.wait_for_all()

        with self._open().alone() as scheduler, self._ranks.guarded("warming up"):
            engine = scheduler.engine
            rows = engine.state.batch
            for shortest in dict.fromkeys((0, length)):  # prompts of any length, then long ones alone
                warm_up_for(
                    engine,
                    rows,
                    choice,
                    length,
                    shortest,
                    progress=self._settings.config.bars,
                    prompts=not shortest,
                    loaded=all_ready,
                    compilers=compilers,
                )

    def add_corpus(self, name: str, text: str | Sequence[int]) -> None:
        """Adds a text in which draft tokens of any request are looked up. Replaces an earlier text of the same name.

        Every rank makes the same call. Running requests must have ended.

        Args:
            name: name of the text, for `remove_corpus`.
            text: the text, which is encoded without special tokens, or its token ids.

        Raises:
            ValueError: the text has no tokens, an id is out of range, or `corpus_tokens` has no room for the text.
            UnsupportedOption: the generator's proposer has no memory for such texts.
            RuntimeError: a call or a handle is running, or the generator is closed.
        """
        texts = corpora_of(self._open().engine.texts)
        given = self.tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        (ids,) = id_sequences("corpus", given, 1, self.vocab_size)
        if not ids:
            raise ValueError(f"corpus {name!r} has no tokens; give a text, or remove_corpus({name!r})")
        with self._open().alone() as scheduler, scheduler.engine.on_device():
            texts.add_corpus(name, ids)

    def remove_corpus(self, name: str) -> None:
        """Removes the text that `add_corpus` added under this name.

        Raises:
            ValueError: there is no text of this name.
            UnsupportedOption, RuntimeError: see `add_corpus`.
        """
        texts = corpora_of(self._open().engine.texts)
        with self._open().alone() as scheduler, scheduler.engine.on_device():
            texts.remove_corpus(name)

    def _prepare(
        self, arguments: CallArguments, default_new_tokens: int | None = None, *, submitted: bool = False
    ) -> PreparedCall:
        """Checks a call and makes its requests, without device memory.

        With several ranks, all ranks prepare the call together and compare its arguments. This is left out if the other
        ranks only repeat the steps of rank 0.

        Args:
            arguments: arguments of the call.
            default_new_tokens: default of max_new_tokens. None: the usual default.
            submitted: True for a call of `submit`, which only rank 0 makes.
        """
        loop, spec = self._open(), self._target.spec
        model = ModelLimits(
            spec.vocab_size, spec.max_length, self.max_length, self.generation_config, self._stored_tokenizer
        )

        def make() -> PreparedCall:
            """Checks the arguments of the call, and makes its requests."""
            if self._ranks.size > 1 and alone:
                check_tokenizer_is_stored(arguments.keywords.get("tokenizer"), self._tokenizer)
            inputs = read_call(arguments, model, default_new_tokens)
            requests = requests_of(inputs.prompts, inputs.options, inputs.tokenizer, self.max_length, self._grammars)
            check_texts(inputs.options.rows, loop.engine.texts)
            choice = self._drafting.for_call(inputs.options)
            return PreparedCall(requests, inputs.options, inputs.raw, choice)

        alone = self._ranks.size == 1 or submitted or loop.leads
        return make() if alone else self._ranks.agreed_call(make, lambda call: (call.requests, call.options))

    def _open(self) -> Loop:
        self._loop.check_open()
        self._check_awake()
        if self._half:
            raise RuntimeError(self._half_changed())
        return self._loop

    @property
    def _draft_format(self) -> str | None:
        """Weight format that "auto" chose for the draft, and the reason. None: "auto" chose no format."""
        return None if self._trial is None else str(self._trial)

    def _stats(self, call: PreparedCall, start: float, end: float) -> Stats:
        """Returns the statistics of a call. `start` and `end` are times of `time.perf_counter`."""
        threads = self._loop.threads
        return Stats.of(
            tuple(request.stats() for request in call.requests),
            call.choice.k,
            end - start,
            synthetic=synthetic_name(self._settings.verification),
            auto=call.choice.note,
            exact=self._settings.exact,
            threads=threads.now if threads else None,
            same_text_on=self._ranks.same_text_on,
            draft_format=self._draft_format,
            weight_version=next((request.weight_version for request in call.requests), 0),
        )

    def explain(self) -> str:
        """Describes the models and how they run, as a text of several lines for people."""
        draft = self._draft if self._trial is None else self._trial.draft
        return explain(self._settings, self._open().engine, self._target, draft, self._shared_vocab, self._drafting)

    def _run(self, call: PreparedCall) -> Generator[Emitted, None, None]:
        steps = self._open().run(call)
        self._streams.add(steps)
        return steps

    def close(self) -> None:
        """Cancels requests of handles, and frees all memory. Other processes can use the freed GPU memory.

        Further calls do nothing. Any other use of a closed generator is an error.

        Raises:
            RuntimeError: a call of `generate` or `stream` is still running.
        """
        self._loop.close()
        self._weights, self._head, self._asleep = {}, None, None
        release_unused(self.device)

    def __enter__(self) -> FastSpecGenerator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the generator at the end of a `with` block.

        If the block raises an error, that error is raised on, and unfinished iterations of `stream` are ended first.
        """
        if kind is None:
            self.close()
            return
        try:
            for stream in list(self._streams):
                stream.close()
            self.close()
        except (RuntimeError, ValueError) as refused:  # ValueError: another thread is inside the stream
            warnings.warn(f"the generator could not be closed: {refused}", stacklevel=2)


def _loop_of(engine: Engine, make_ready: MakeReady, max_length: int, ranks: Ranks, numbers: RequestNumbers) -> Loop:
    """Makes the `Loop` of a generator, which runs its steps.

    With several ranks, rank 0's `Loop` tells the other ranks which requests join or leave the batch.
    """
    if ranks.size == 1:
        return Loop(Scheduler(engine), make_ready, max_length, ranks)
    if not ranks.first:
        return Loop(Scheduler(engine), make_ready, max_length, ranks, on_end=numbers.forget)
    leader = Leader(ranks.world, numbers)
    return Loop(
        Scheduler(engine),
        make_ready,
        max_length,
        ranks,
        before_turn=leader.tell,
        on_end=numbers.forget,
        on_close=leader.end,
    )
