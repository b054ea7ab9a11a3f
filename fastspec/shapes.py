"""Shapes of decode steps and forward passes, which the host fixes. Sizes of layers with recurrent states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from fastspec.sampling.distribution import DRAFT, TARGET
from fastspec.sampling.rules import COUPLED, REJECTION, SyntheticAcceptance, Verification, needs_draft_probs

KEY_BLOCK = 256  # positions per block in which attention processes keys
MAX_DRAFTS = 16  # of a step, for every proposer and device: kernels of a GPU's step take one more token of a row
MAX_LOOKED_UP = 32  # drafts of a step by lookup alone, on a CPU
# one attention kernel serves queries in these first blocks of positions, another one those in later blocks; see
# `StepShape.first_block`
EARLY_BLOCKS = 17
# positions of a chunk of the gated delta rule in a prompt; chunks are on a grid from position 0. Recurrent states of
# any kind are stored only after whole chunks
DELTA_CHUNK = 64
# prompts with more tokens than this are long: their first new token comes from the last prefill pass, and the draft
# model reads them later. On CUDA all prompts with a prefill pass are long, because a step would read all weights again
# for one token
LONG_PROMPT, LONG_PROMPT_CUDA = 1024, 1
_PASS_COST = 128  # fixed cost of a pass, in prompt tokens: about the time to read the weights
SAMPLERS = GREEDY, FULL = "greedy", "full"  # sampler kinds of a step
# values of `StepShape.grammars`. MIXED_DRAFTS: the proposer drafts for rows without a grammar. GRAMMAR_ONLY: only rows
# with a grammar have drafts, which the host sends
GRAMMARS = MIXED_DRAFTS, GRAMMAR_ONLY = "mixed", "only"
ROW_TILE = 16  # rows; see `row_tiles`
# temporary 4-byte words for each logit of a step: the logits, their masked copy and the mask's bits. Synthetic
# acceptance also copies distributions
WORDS_MASKED, _WORDS_SYNTHETIC = 3, 15
NO_LIMIT = 2**31 - 1  # for passes whose positions are limited only by the length of the row


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fixed sizes of matrix products. Larger products are split into tiles of this size, smaller ones are padded.

    Attributes:
        rows: number of tokens in every product of activations with weights. None: all tokens at once.
        queries: number of query tokens per row in every product of queries with keys. None: all at once.
    """

    rows: int | None
    queries: int | None


UNTILED = Tiling(rows=None, queries=None)


class AttentionRule(NamedTuple):
    """Rule by which queries of one layer are scored against keys.

    Attributes:
        window: number of newest keys that a query sees, including the key at its own position. None: all keys.
        scale: number by which q . k is multiplied. None: 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap), before the mask. None: no softcap.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def factor(self, dim: int) -> float:
        """Returns the number by which q . k is multiplied, for heads of `dim` elements."""
        return float(dim**-0.5) if self.scale is None else self.scale


class DeltaRule(NamedTuple):
    """Sizes of a gated delta-rule layer (arXiv 2412.06464), which has a recurrent state instead of keys and values.

    Attributes:
        key_heads: number of heads of q and k. Each serves value_heads / key_heads neighbouring value heads.
        value_heads: number of heads of v, each with a state [value_dim, key_dim].
        key_dim, value_dim: number of elements of one head of q and k, and of v.
        width: number of positions that the convolution reads, including the current one (its kernel size).
        by_channel: True if each element of a key has its own decay (Kimi delta attention, arXiv 2510.26692). The
            numbers of key heads and value heads are then equal.
        floor: with `by_channel`, lower limit of a decay's logarithm. The decay is e^(floor * sigmoid(rate * x)).
            0: no limit; the decay is e^(-rate * softplus(x)).
        rank: inner width of the two successive products that compute the inputs of decays, and the gate z. 0: both are
            outputs of the input projection.
        gate: activation of z in the gated norm.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    by_channel: bool = False
    floor: float = 0.0
    rank: int = 0
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def keys(self) -> int:
        """Number of elements of k at one position, in all key heads. q has the same number."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of elements of v at one position, in all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution, whose input is q, k and v of each position."""
        return 2 * self.keys + self.values

    @property
    def rows(self) -> int:
        """Number of elements per position that the layer computes from its input.

        They are q, k, v, a gate z for each element of v, b for each value head, and the inputs of decays (`decays`).
        """
        return self.channels + self.values + self.value_heads + self.decays

    @property
    def decays(self) -> int:
        """Number of elements per position from which decays are computed.

        With `by_channel` there is one for each element of k, else one for each value head.
        """
        return self.keys if self.by_channel else self.value_heads

    @property
    def tail(self) -> int:
        """Number of older positions that the convolution reads."""
        return self.width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state of one sequence after one position."""
        return self.value_heads, self.value_dim, self.key_dim

    def cut(self, ranks: int) -> DeltaRule:
        """Returns the sizes of one rank's part of the layer, if `ranks` ranks share it."""
        return self._replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


class ConvRule(NamedTuple):
    """Sizes of a gated short convolution layer (LFM2). Its only state is the inputs of a few older positions.

    Attributes:
        channels: number of channels of the convolution.
        width: number of positions that the convolution reads, including the current one.
    """

    channels: int
    width: int

    @property
    def values(self) -> int:
        """Number of elements per position of the layer's result."""
        return self.channels

    @property
    def rows(self) -> int:
        """Number of outputs of the input projection: the gates b and c, and x."""
        return 3 * self.channels

    @property
    def tail(self) -> int:
        """Number of older positions that the convolution reads."""
        return self.width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state after one position. It has no elements, because this layer has none."""
        return (0,)

    def cut(self, ranks: int) -> ConvRule:
        """Returns the sizes of one rank's part of the layer, if `ranks` ranks share it."""
        return self._replace(channels=self.channels // ranks)


class MambaRule(NamedTuple):
    """Sizes of a Mamba-2 layer (arXiv 2405.21060), which has a state [head_dim, state_dim] for each head.

    Attributes:
        heads: number of heads.
        head_dim: number of elements of x in one head.
        groups: number of groups of neighbouring heads. A group has one B and one C.
        state_dim: number of elements of B and of C.
        width: number of positions that the convolution reads, including the current one.
        least_step, most_step: limits of a head's time step (dt) after softplus.
        norm: order in which the result is normed and multiplied by its gate silu(z). None: there is a gate and no norm.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    least_step: float = 0.0
    most_step: float = math.inf
    norm: Literal["gate_first", "norm_first"] | None = "gate_first"

    @property
    def values(self) -> int:
        """Number of elements of x at one position. The layer's result has the same number."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Number of elements of B at one position, in all groups. C has the same number."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution, whose input is x, B and C of each position."""
        return self.values + 2 * self.shared

    @property
    def rows(self) -> int:
        """Number of outputs of the input projection: the gate z, x, B, C, and the time step of each head."""
        return self.values + self.channels + self.heads

    @property
    def tail(self) -> int:
        """Number of older positions that the convolution reads."""
        return self.width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state of one sequence after one position."""
        return self.heads, self.head_dim, self.state_dim

    def cut(self, ranks: int) -> MambaRule:
        """Returns the sizes of one rank's part of the layer, if `ranks` ranks share it."""
        return self._replace(heads=self.heads // ranks, groups=self.groups // ranks)


class SelectiveRule(NamedTuple):
    """Sizes of a Mamba-1 layer (arXiv 2312.00752), in which every channel has its own state and time step.

    Attributes:
        channels: number of elements of x.
        state_dim: number of elements of B. C and the state of a channel have the same number.
        width: number of positions that the convolution reads, including the current one.
        rank: inner width of the two successive products that compute time steps from x.
    """

    channels: int
    state_dim: int
    width: int
    rank: int

    @property
    def values(self) -> int:
        """Number of elements per position of the layer's result."""
        return self.channels

    @property
    def rows(self) -> int:
        """Number of outputs of the input projection: x and its gate z."""
        return 2 * self.channels

    @property
    def selected(self) -> tuple[int, int, int]:
        """Numbers of elements per position that are computed from x: (`rank` inner values of time steps, B, C)."""
        return self.rank, self.state_dim, self.state_dim

    @property
    def tail(self) -> int:
        """Number of older positions that the convolution reads."""
        return self.width - 1

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state of one sequence after one position."""
        return self.channels, self.state_dim

    def cut(self, ranks: int) -> SelectiveRule:
        """Returns these sizes unchanged, because every rank has the whole layer."""
        return self


StateRule: TypeAlias = DeltaRule | ConvRule | MambaRule | SelectiveRule  # each kind of layer with a recurrent state


class RoutingRule(NamedTuple):
    """Rule by which a token's experts are chosen from its router logits [E], and weighted.

        s = softmax(logits), sigmoid(logits), or the logits themselves
        chosen experts: the `chosen` largest of s [+ the checkpoint's correction bias], the lowest id first if equal;
            with groups only from the `kept_groups` groups of neighbouring experts whose two largest scores have the
            largest sums (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
        factor = s of a chosen expert; for "logits" softmax over the chosen experts; divided by the sum of the factors
            plus `eps` with `normed`; times `scale`
        with `shared` also experts E .. E + shared_parts - 1, after the chosen ones, whose factor is 1 ("whole"), or
            sigmoid(logits[E]) ("gated")

    Attributes:
        chosen: number of experts that are chosen for a token.
        scores: formula of s. "logits": s is the logits, and factors are their softmax over the chosen experts alone.
        normed: True if factors are divided by their sum.
        scale: number by which all factors are multiplied.
        groups: number of groups of experts, all of one size. 1: no groups.
        kept_groups: number of groups from which experts are chosen.
        shared: type of the shared expert, which processes every token. None: there is none.
        eps: number that is added to the sum of the factors, with `normed`.
        shared_parts: number of experts that the shared expert is stored as, with `shared`.
    """

    chosen: int
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared: Literal["whole", "gated"] | None = None
    eps: float = 0.0
    shared_parts: int = 1

    @property
    def held(self) -> int:
        """Number of experts that process each token, including the parts of the shared expert."""
        return self.chosen + (0 if self.shared is None else self.shared_parts)

    @property
    def gates(self) -> int:
        """Number of router logits after those of the experts: 1 if the shared expert has a gate, else 0."""
        return int(self.shared == "gated")


@dataclass(frozen=True, slots=True)
class SquaredRelu:
    """Activation of an expert without a gate (Nemotron-H): relu(u)^2, where u is the result of its up projection."""


class ClampedGate(NamedTuple):
    """Activation of gpt-oss's experts (transformers' GptOssExperts), instead of silu(g) * u.

    It is g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit) and u = clamp(up, -limit, limit).
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a decode step, which the host fixes before the launch. Each different shape has its own CUDA graph.

    Attributes:
        num_drafts: k, number of draft tokens of every running row (batch slot). 0: plain decoding.
        sampler: GREEDY (every row takes the token with the largest unchanged logit) or FULL (all sampling options).
        num_blocks: upper limit of attended positions, in blocks of KEY_BLOCK.
        tiling: tiles of the matrix products of target and draft.
        top_logprobs: number of most probable ids that are recorded at each place, with the emitted token's
            log-probability. None: nothing is recorded.
        processed: True if some rows record log-probabilities of the distribution that they sample from, instead of the
            unprocessed logits. The sampler is then FULL.
        verification: rule that accepts or rejects draft tokens of rows that sample.
        first_block: index of a block of KEY_BLOCK positions. No token of a running row is at a position in an earlier
            block.
        grammars: one of GRAMMARS if some rows have a grammar. None: no row has one.
        first_token: True if the step is `first_token_step`, which runs no forward pass.
    """

    num_drafts: int
    sampler: str
    num_blocks: int
    tiling: Tiling
    top_logprobs: int | None = None
    verification: Verification = REJECTION
    first_block: int = 0
    grammars: str | None = None
    first_token: bool = False
    processed: bool = False

    def for_first_tokens(self, *, grammars: bool) -> StepShape:
        """Returns the shape of a `first_token_step`. All other values equal those of this shape.

        Args:
            grammars: True if some rows of that step have a grammar.
        """
        return replace(self, first_token=True, grammars=GRAMMAR_ONLY if grammars else None)

    def forward_batch(
        self,
        ids: Tensor,
        positions: Tensor,
        write_mask: Tensor,
        block_table: Tensor,
        state_rows: Tensor | None = None,
    ) -> ForwardBatch:
        """Returns the input of a forward pass of this step. For the arguments see `ForwardBatch`."""
        limits = self.num_blocks, self.tiling, self.first_block
        return ForwardBatch(ids, positions, write_mask, block_table, *limits, state_rows)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one forward pass: B rows of Q consecutive tokens each.

    Attributes:
        ids: int64 [B, Q], token ids within the model's vocabulary.
        positions: int64 [B, Q], absolute positions, >= 0 also for idle rows.
        write_mask: bool [B, Q], True if K/V are stored. False for padding, idle rows, and positions below 0.
        block_table: int64 [B, P], pages of each row.
        num_blocks: upper limit of attended positions, in blocks of KEY_BLOCK.
        tiling: tiles of the matrix products. With fixed tiles a row's bits do not depend on other rows.
        first_block: see `StepShape`.
        state_rows: int64 [B], for each row the index of its recurrent states in their cache. None: the model has no
            recurrent states.
    """

    ids: Tensor
    positions: Tensor
    write_mask: Tensor
    block_table: Tensor
    num_blocks: int
    tiling: Tiling
    first_block: int = 0
    state_rows: Tensor | None = None


def row_tiles(batch: int, row_bytes: int, limit: int | None) -> list[tuple[int, int]]:
    """Splits the rows of a step into parts, so that only the logits of one part are in memory at a time.

    A part begins at a multiple of ROW_TILE rows, because kernels are compiled for the alignment of their arguments. A
    row's bits do not depend on the part it is in.

    Args:
        batch: number of rows of the step.
        row_bytes: temporary bytes for the logits of one row.
        limit: largest number of bytes of one part. A part has at least ROW_TILE rows. None: all rows are one part.

    Returns:
        (first row, row after the last) of each part. All parts have the same size, except the last.
    """
    if limit is None or batch * row_bytes <= limit:
        return [(0, batch)]
    room = max(1, limit // (row_bytes * ROW_TILE)) * ROW_TILE
    rows = -(-batch // -(-batch // room))
    rows += -rows % ROW_TILE
    return [(start, min(start + rows, batch)) for start in range(0, batch, rows)]


def logit_words(shape: StepShape) -> int:
    """Returns the number of temporary 4-byte words per logit of a step, for ops that make no copies of their own."""
    if isinstance(shape.verification, SyntheticAcceptance):
        return _WORDS_SYNTHETIC if shape.sampler == FULL else 1
    return 1 if shape.grammars is None else WORDS_MASKED


def blocks(positions: int) -> int:
    """Returns the number of blocks of KEY_BLOCK positions that cover the first `positions` positions."""
    return -(-positions // KEY_BLOCK)


def step_kinds(ks: Iterable[int], grammars: Iterable[str | None]) -> list[tuple[int, str | None]]:
    """Returns the kinds of decode steps that a call may need, largest number of draft tokens first.

    Each number in `ks` is combined with each value in `grammars`. MIXED_DRAFTS is not combined with 0, because the
    proposer drafts in such a step. GRAMMAR_ONLY is combined with 0 even if `ks` has no 0.

    Args:
        ks: numbers of draft tokens that steps of the call may have.
        grammars: values of `StepShape.grammars` that steps of the call may have.

    Returns:
        Pairs of `StepShape.num_drafts` and `StepShape.grammars`.
    """
    pairs = [
        (k, kind)
        for kind in grammars
        for k in (set(ks) | {0} if kind == GRAMMAR_ONLY else set(ks))
        if k or kind != MIXED_DRAFTS
    ]
    return sorted(pairs, key=lambda pair: -pair[0])


def keep_draft_probs(shape: StepShape) -> bool:
    """True if a proposer that samples draft tokens must write their distributions to `DecodeState.draft_probs`."""
    return shape.sampler != GREEDY and needs_draft_probs(shape.verification)


def purpose_of(shape: StepShape) -> int:
    """Returns the key that selects the random numbers of a proposer: DRAFT or TARGET.

    It is TARGET with coupled verification, in which draft tokens are sampled with the random numbers of the target.
    """
    return TARGET if shape.verification == COUPLED else DRAFT


def chunks_of(
    sizes: tuple[int, ...],
    stop: int,
    start: int = 0,
    same_bits: tuple[int, ...] = (),
    grid_unit: int | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Returns the sizes of the passes over the prompt tokens at positions start..stop-1.

    Passes begin on a grid of positions that is the same for all prompts. From position 0 on, each full range of the
    largest size is one pass. The tokens after the last full range take the cheaper of two ways, by estimated cost. One
    way is a single padded pass. The other is the largest pass without padding, and further passes after it.

    Passes of sizes in `same_bits` write the same bits to the KV caches. So a pass of such a size may be split, or start
    in its middle. The smallest of these sizes is the unit of the grid. Prompts with a common prefix have the same bits
    in all whole units of that prefix.

    Args:
        sizes: permitted sizes of passes, ascending.
        stop: the position after the last token.
        start: the first position, see `grid_unit`.
        same_bits: those of `sizes` whose passes write the same bits, ascending. (): only the largest size.
        grid_unit: number of positions. `start` is a multiple of it. None: the smallest of `same_bits`.
        max_tokens: upper limit of tokens for passes of a size in `same_bits`. The smallest size is always allowed.
            None: no limit.
    """
    same_bits = same_bits or sizes[-1:]
    assert start % (grid_unit or same_bits[0]) == 0, "a prompt is continued only at a multiple of the grid's unit"
    if stop <= start:
        return []
    short = [size for size in same_bits if max_tokens is None or size <= max_tokens] or [same_bits[0]]
    if same_bits == sizes:
        return _covering(short, stop - start)
    whole, left = divmod(stop, sizes[-1])
    chunks, end = [], 0
    for size in [sizes[-1]] * whole + _tail(sizes, left):
        begin, end = end, end + size
        if end <= start:
            continue
        if begin >= start and (size not in same_bits or size <= short[-1]):
            chunks.append(size)
        else:  # only the last pass may be larger than its tokens; others end where the next begins
            fitted = _filled(short, end - max(begin, start))
            chunks += fitted if end < stop else _covering(short, stop - max(begin, start))
    return chunks


def _covering(sizes: list[int], tokens: int) -> list[int]:
    """Returns the sizes of prefill passes over `tokens` tokens. The last pass may be padded. `sizes` is ascending."""
    whole, rest = divmod(tokens, sizes[-1])
    return [sizes[-1]] * whole + _tail(tuple(sizes), rest)


def _filled(sizes: list[int], tokens: int) -> list[int]:
    """Returns the sizes of prefill passes without padding over `tokens` tokens.

    `tokens` is a multiple of the smallest size. `sizes` is ascending, and every size divides the next one.
    """
    chunks = []
    for size in reversed(sizes):
        count, tokens = divmod(tokens, size)
        chunks += [size] * count
    return chunks


def _tail(sizes: tuple[int, ...], tokens: int) -> list[int]:
    """Returns the sizes of the prefill passes over `tokens` tokens that have the lowest estimated cost.

    `tokens` is below the largest size. `sizes` is ascending.
    """
    if tokens <= 0:
        return []
    choices = [[size] for size in sizes if size >= tokens][:1]
    if filled := [size for size in sizes if size < tokens]:
        choices.append([filled[-1], *_tail(sizes, tokens - filled[-1])])
    return min(choices, key=_cost)  # the first of equal ones, which is one pass


def _cost(chunks: list[int]) -> int:
    """Returns the estimated time of prefill passes of these sizes. The unit is the time of one prompt token."""
    return sum(chunks) + _PASS_COST * len(chunks)
