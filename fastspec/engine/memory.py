"""Computes the bytes that a generator needs, before it allocates any, and measures the free memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import psutil
import torch

from fastspec.kernels.ops import Ops
from fastspec.kernels.room import room_bytes
from fastspec.models.heads.spec import HeadSpec
from fastspec.models.interface import ModelInfo
from fastspec.shapes import ROW_TILE, WORDS_MASKED
from fastspec.state import BUFFERS, StateSizes

_GIB = 2**30
# tokens of the largest pass over several prompts; larger ones take hardly less time for a token on an H100
SHARED_TOKENS = 2048
_LIBRARY_WORKSPACE = 32 * 2**20  # cuBLAS allocates this on a Hopper GPU; other libraries take less
_KEPT_STATES = 4  # the prefix cache keeps recurrent states after at least this many prefixes
# share of the free memory that a generator may use; the rest is left for passes and other programs
FREE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a generator needs, by use.

    Weights count as they are in memory after loading, with fused copies. Tied embeddings count once.

    Attributes:
        target_weights, draft_weights: weights of target and draft.
        target_cache: KV cache pages and recurrent states of the target.
        draft_cache: KV cache pages and recurrent states of the draft. 0 without a draft.
        buffers: the decode state, the prefill slots, the rotary tables, and texts that drafts are looked up in.
        workspace: estimated temporary memory of the largest pass, and work areas of libraries.
        exchange: memory of this GPU to which other ranks write. NCCL's own memory is not counted.
        graphs: captured CUDA graphs. Tensors inside them count as workspace.
        free: free bytes on the device when the plan was made.
    """

    target_weights: int
    draft_weights: int
    target_cache: int
    draft_cache: int
    buffers: int
    workspace: int
    exchange: int
    graphs: int
    free: int

    @property
    def total(self) -> int:
        """Sum of all uses, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "free")

    @property
    def headroom(self) -> int:
        """Free bytes minus `total`."""
        return self.free - self.total

    def __str__(self) -> str:
        """Formats the plan as one line, in GiB."""
        uses = [field.name for field in fields(self) if field.name != "free"]
        if not self.exchange:  # 0 without other ranks
            uses.remove("exchange")
        parts = ", ".join(f"{name.replace('_', ' ')} {getattr(self, name) / _GIB:.3f}" for name in uses)
        return f"{self.total / _GIB:.3f} GiB ({parts}), headroom {self.headroom / _GIB:.3f}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes from which the memory plan is computed.

    Attributes:
        batch: number of batch slots: sequences that decode at once.
        max_drafts: largest number of draft tokens per step and sequence.
        page_size: number of positions per KV cache page.
        target, draft: specs of the models. draft is None if there is no draft model and no head.
        target_dtype, draft_dtype: dtype of weights, activations and, unless `kv_dtypes` is set, KV caches.
        chunks: numbers of prompt tokens that one prefill pass may have, ascending.
        ops: implementation of the kernels.
        keep_draft_probs: True if the draft's probability distributions are kept until verification.
        feature_layers: number of target layers whose hidden states the proposer reads.
        feature_elements: number of elements per sequence that are kept for the proposer between steps.
        weights: bytes of the weights of (target, draft). None: computed from their specs.
        keeps_prefixes: True if recurrent states after prefixes of prompts are stored.
        kv_dtypes: dtypes of the KV cache pages of (target, draft). None: the dtypes of the models.
        ranks: number of processes that share the target.
        parallel_draft: True if the draft is a `ParallelDraft`.
        prediction_tokens: largest number of tokens of a request's predicted output.
        lookup_bytes: bytes of the texts in which draft tokens are looked up.
    """

    batch: int
    max_drafts: int
    page_size: int
    target: ModelInfo
    target_dtype: torch.dtype
    draft: ModelInfo | None
    draft_dtype: torch.dtype
    chunks: tuple[int, ...]
    ops: Ops
    keep_draft_probs: bool = True
    feature_layers: int = 0
    feature_elements: int = 0
    weights: tuple[int, int] | None = None
    kv_dtypes: tuple[torch.dtype, torch.dtype] | None = None
    keeps_prefixes: bool = True
    ranks: int = 1
    prediction_tokens: int = 0
    parallel_draft: bool = False
    lookup_bytes: int = 0

    @property
    def cache_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the KV cache pages of (target, draft)."""
        return self.kv_dtypes or (self.target_dtype, self.draft_dtype)

    def with_batch(self, batch: int) -> Layout:
        """Returns a copy of this layout with `batch` batch slots."""
        return replace(self, batch=batch)

    def pages_per_row(self, max_length: int) -> int:
        """Returns the number of KV cache pages of a sequence of `max_length` tokens.

        It includes `max_drafts` + 1 further positions, to which the last decode step may write.
        """
        return -(-(max_length + self.max_drafts + 1) // self.page_size)

    def num_pages(self, max_length: int) -> int:
        """Returns the number of pages of the whole KV cache, if sequences have up to `max_length` tokens.

        It includes one page for K and V that nothing reads.
        """
        return 1 + self.batch * self.pages_per_row(max_length)

    def chunks_for(self, max_length: int) -> tuple[int, ...]:
        """Returns the numbers of tokens of prefill chunks, ascending, that sequences of `max_length` tokens need."""
        smaller = [size for size in self.chunks if size < max_length]
        return self.chunks[: len(smaller) + 1]

    def pass_tokens(self, max_length: int) -> int:
        """Returns the number of tokens of the largest prefill pass. With Triton it may read several prompts."""
        one = self.chunks_for(max_length)[-1]
        return max(one, min(SHARED_TOKENS, self.batch * one)) if self.ops.name == "triton" else one

    def plan(self, max_length: int, free: int) -> MemoryPlan:
        """Returns the bytes that a generator needs, by use.

        Args:
            max_length: largest number of tokens of a sequence.
            free: free bytes on the device.
        """
        positions = self.num_pages(max_length) * self.page_size
        state, slot = self.state_sizes(max_length), self.with_batch(1).state_sizes(max_length)
        target_weights, draft_weights = self.weight_bytes
        of_target, of_draft = self.cache_dtypes
        return MemoryPlan(
            target_weights=target_weights,
            draft_weights=draft_weights,
            target_cache=positions * position_bytes(self.target, of_target)
            + self._state_bytes(self.target, self.target_dtype),
            draft_cache=positions * position_bytes(self.draft, of_draft)
            + self._state_bytes(self.draft, self.draft_dtype)
            if self.draft
            else 0,
            buffers=state.nbytes
            + slot.nbytes
            + self._shared_slot_bytes(max_length)
            + self._rotary_bytes(max_length)
            + self._feature_bytes()
            + self.lookup_bytes,
            workspace=self._workspace_bytes(max_length),
            exchange=self._exchange_bytes(max_length),
            graphs=0,
            free=free,
        )

    @property
    def kept_states(self) -> int:
        """Number of recurrent states for which the prefix cache has memory. 0: the prefix cache stores none.

        One of these states is the buffer to which passes write.
        """
        return 1 + max(_KEPT_STATES, 2 * self.batch) if self.keeps_prefixes else 0

    def _state_bytes(self, spec: ModelInfo, dtype: torch.dtype) -> int:
        """Returns the bytes of a model's recurrent states: those of all batch slots, and those of the prefix cache."""
        return self.batch * spec.state_bytes(self.max_drafts, dtype) + self.kept_states * spec.state_bytes(0, dtype)

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of (target, draft)."""
        if self.weights is not None:
            return self.weights
        draft = self.draft.weight_bytes(self.draft_dtype) if self.draft else 0
        return self.target.weight_bytes(self.target_dtype), draft

    def state_sizes(self, max_length: int) -> StateSizes:
        """Returns the sizes of the decode state for sequences of up to `max_length` tokens."""
        return StateSizes(
            self.batch,
            self.max_drafts,
            max_length,
            self.pages_per_row(max_length),
            self.target.vocab_size,
            self.keep_draft_probs,
            self.prediction_tokens,
        )

    @property
    def max_queries(self) -> int:
        """Largest number of tokens per sequence in one pass of a decode step.

        With k draft tokens, the target's pass has k + 1. The first pass of a draft model has 2. The pass of a
        `ParallelDraft` (PARD) has 2 k.
        """
        return max(2, 2 * self.max_drafts if self.parallel_draft else self.max_drafts + 1)

    def exchanged(self, max_length: int) -> tuple[int, int]:
        """Returns the sizes of the largest tensors that ranks exchange: (in a decode step, in a prefill pass).

        Sizes are numbers of elements.
        """
        widest = max(self.target.hidden_size, -(-self.target.vocab_size // self.ranks))
        return self.batch * self.max_queries * widest, self.chunks_for(max_length)[-1] * self.target.hidden_size

    def _exchange_bytes(self, max_length: int) -> int:
        """Returns the bytes of the GPU memory through which ranks exchange tensors. 0 on a CPU."""
        return room_bytes(self.ranks, *self.exchanged(max_length)) if self.ops.name == "triton" else 0

    def _rotary_bytes(self, max_length: int) -> int:
        positions = self.pages_per_row(max_length) * self.page_size
        return sum(spec.rotary_bytes(positions) for spec in (self.target, self.draft) if spec)

    def _shared_slot_bytes(self, max_length: int) -> int:
        """Returns the bytes of the buffers for prefill passes over several prompts.

        These buffers have one row for each block of tokens of a pass.
        """
        blocks = self.pass_tokens(max_length) // self.chunks[0] if self.ops.name == "triton" and self.batch > 1 else 0
        letters = self.state_sizes(max_length).letters | {"B": blocks}
        ends = blocks * self.target.hidden_size * self.target_dtype.itemsize
        return ends + sum(each.nbytes(letters) for each in BUFFERS.values() if each.prefill)

    def _feature_bytes(self) -> int:
        """Returns the bytes of `feature_buffer` and `PromptEnd`, for all batch slots and one prefill slot."""
        ends = (1 + self.feature_layers) * self.target.hidden_size
        return (self.batch + 1) * (self.feature_elements + ends) * self.target_dtype.itemsize

    def _workspace_bytes(self, max_length: int) -> int:
        """Estimates the temporary memory of the largest pass: a prefill chunk, or a step with its logits."""
        spec, size = self.target, self.target_dtype.itemsize
        shapes = spec.attention_shapes or ((spec.num_heads, spec.num_kv_heads, spec.head_dim),)
        heads = max((each + 2 * kv_heads) * dim for each, kv_heads, dim in shapes)
        wide = max(3 * heads, 3 * spec.intermediate_size) + 4 * spec.hidden_size
        wide += spec.routed_elements
        wide += 2 * self.feature_layers * spec.hidden_size  # the features of each layer, and their concatenation
        rows = self.batch * (self.max_drafts + 1)
        step = rows * wide * size + self._logit_bytes()
        # attention of a chunk keeps fp32 partial sums of every head
        chunk = self.pass_tokens(max_length) * (wide * size + 4 * 4 * max(each * dim for each, _, dim in shapes))
        return max(step, chunk) + self._kernels_bytes(max_length) + _LIBRARY_WORKSPACE

    def _logit_bytes(self) -> int:
        """Returns the temporary bytes for the logits of a decode step in which sequences may follow a grammar.

        A hosted model needs a further copy of the logits, in its own dtype. Ranks that share the target need a further
        copy, for their parts of the logits.
        """
        copies = (self.ops.logit_words or WORDS_MASKED) + int(bool(self.target.hosting) or self.ranks > 1)
        line = (self.max_drafts + 1) * 4 * self.target.vocab_size * copies
        limit = self.ops.logit_bytes
        return self.batch * line if limit is None else min(self.batch * line, max(limit, ROW_TILE * line))

    def _kernels_bytes(self, max_length: int) -> int:
        """Returns the bytes of the kernels' work buffers for both models, for sequences of `max_length` tokens."""
        positions = self.pages_per_row(max_length) * self.page_size
        specs = [spec for spec in (self.target, self.draft) if spec]
        heads = [shape for spec in specs for shape in dict.fromkeys(spec.attention_shapes)]
        lines = self.batch, self.max_drafts, self.target.vocab_size
        ends = self.ops.sampled_work_bytes(*lines) + self.ops.record_work_bytes(*lines)
        # a pass of several MTP layers has more positions than one of the target
        queries = self.max_queries + (self.draft.computed_again if isinstance(self.draft, HeadSpec) else 0)
        return ends + sum(self.ops.workspace_bytes(self.batch, queries, positions, each) for each in heads)

    def largest_length(self, upper: int, free: int) -> int:
        """Returns the largest max_length up to `upper` with which a generator needs at most `free` bytes. 0: none."""
        return _largest(upper, lambda length: self.plan(length, free).total <= free)

    def largest_batch(self, max_length: int, free: int) -> int:
        """Returns the largest number of batch slots up to `batch` that need at most `free` bytes. 0: none.

        Args:
            max_length: largest number of tokens of a sequence.
            free: bytes that the generator may use.
        """
        return _largest(self.batch, lambda rows: self.with_batch(rows).plan(max_length, free).total <= free)


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def position_bytes(spec: ModelInfo, dtype: torch.dtype) -> int:
    """Returns the bytes of K and V of one position, in all layers of a model."""
    return 2 * dtype.itemsize * sum(kv_heads * dim for _, kv_heads, dim in spec.attention_shapes)


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device.

    Unused blocks of torch's cache are released first, so they count as free.
    """
    if device.type == "cuda":
        _empty_cache(device)
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def release_unused(device: torch.device) -> None:
    """Runs the garbage collector, then returns unused memory of torch's cache to the GPU driver.

    CUDA graphs, models and the objects that exchange tensors between ranks refer to each other. So only the garbage
    collector frees them. Does nothing on a CPU.
    """
    if device.type == "cuda":
        gc.collect()
        _empty_cache(device)


def _empty_cache(device: torch.device) -> None:
    """Releases the unused blocks of torch's cache. Skips the call without such blocks, because it waits for the GPU."""
    if torch.cuda.memory_reserved(device) > torch.cuda.memory_allocated(device):
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
