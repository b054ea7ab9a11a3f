"""How many bytes a generator needs, before any of them is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import psutil
import torch

from fastspec.models.spec import ModelSpec
from fastspec.state import MAX_STOP_IDS, MAX_TOP_LOGPROBS

_GIB = 2**30
FREE_SHARE = 0.9  # of the free memory that a default max_length may take; the rest is for passes and others


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. Weights count as loaded (fused copies), tied embeddings once."""

    target_weights: int
    draft_weights: int
    target_cache: int
    draft_cache: int
    rotary_tables: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        """One line, in GiB."""
        parts = ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(self, field.name) / _GIB:.3f}" for field in fields(self)
        )
        return f"{self.total / _GIB:.3f} GiB: {parts}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that the caller chose.

    Attributes:
        batch: rows that decode at once.
        max_drafts: k at most.
        page_size: positions per page.
        target, draft: specs; draft is None for plain decoding.
        target_dtype, draft_dtype: of weights and caches.
    """

    batch: int
    max_drafts: int
    page_size: int
    target: ModelSpec
    target_dtype: torch.dtype
    draft: ModelSpec | None
    draft_dtype: torch.dtype

    def pages_per_row(self, max_length: int) -> int:
        """Pages of a row of `max_length` tokens and the k+1 positions that a last step may touch beyond."""
        return -(-(max_length + self.max_drafts + 1) // self.page_size)

    def num_pages(self, max_length: int) -> int:
        """Pages of the whole cache, the trash page included."""
        return 1 + self.batch * self.pages_per_row(max_length)

    def plan(self, max_length: int) -> MemoryPlan:
        """Bytes needed for rows of up to `max_length` tokens."""
        positions = self.num_pages(max_length) * self.page_size
        top = min(MAX_TOP_LOGPROBS, self.target.vocab_size)
        per_row = (
            (max_length + 1)  # tokens
            + 3  # lengths, limits, draft_lengths
            + 4  # finish, top_k, seeds, emitted
            + 2  # accepted, draft_counts
            + MAX_STOP_IDS
            + self.pages_per_row(max_length)
            + 2 * self.max_drafts
            + 1  # block
            + (self.max_drafts + 1) * top  # top_ids
        ) * 8 + (3 + (self.max_drafts + 1) * (1 + top)) * 4
        return MemoryPlan(
            target_weights=weight_bytes(self.target, self.target_dtype),
            draft_weights=weight_bytes(self.draft, self.draft_dtype) if self.draft else 0,
            target_cache=positions * position_bytes(self.target, self.target_dtype),
            draft_cache=positions * position_bytes(self.draft, self.draft_dtype) if self.draft else 0,
            rotary_tables=sum(
                self.pages_per_row(max_length) * self.page_size * spec.head_dim * 4
                for spec in (self.target, self.draft)
                if spec
            ),
            state=self.batch * (per_row + self.max_drafts * self.target.vocab_size * 4),
        )

    def largest_length(self, upper: int, free: int) -> int:
        """The largest max_length up to `upper` whose plan fits in `free` bytes; 0 when not even 1 does."""
        return _largest(upper, lambda length: self.plan(length).total <= free)


def _largest(upper: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a model's fused weights."""
    heads = spec.num_heads * spec.head_dim
    kv_heads = spec.num_kv_heads * spec.head_dim
    qkv = (heads + 2 * kv_heads) * (spec.hidden_size + spec.qkv_bias)
    out = spec.hidden_size * (heads + spec.o_bias)
    mlp = 2 * spec.intermediate_size * (spec.hidden_size + spec.mlp_bias)
    mlp += spec.hidden_size * (spec.intermediate_size + spec.mlp_bias)
    norms = 2 * spec.hidden_size + 2 * spec.head_dim * spec.qk_norm
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    return (spec.num_layers * (qkv + out + mlp + norms) + embeddings + spec.hidden_size) * dtype.itemsize


def position_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of K and V per cached position."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
