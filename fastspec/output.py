"""Results of `generate`: sequences, finish reasons and statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStats:
    """Counts of one row. Conservation: emitted = steps + accepted - dropped.

    Attributes:
        steps: target passes.
        plain_steps: those of them that drafted nothing.
        drafted: tokens proposed.
        accepted: drafts accepted, also those that a stop or the cap then cut off.
        emitted: tokens returned.
        dropped: tokens after a stop id or the limit, accepted or sampled but not returned.
        histogram: how many steps accepted 0, 1, .. k drafts; sums to steps.
        steps_at: how many steps were made with k = 0, 1, ..; sums to steps.
        cached_tokens: tokens of the prompt whose K/V were there from an earlier one, see `prefix_cache`.
    """

    steps: int
    plain_steps: int
    drafted: int
    accepted: int
    emitted: int
    dropped: int
    histogram: tuple[int, ...]
    steps_at: tuple[int, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of a whole call, all rows together, and the rows' own.

    Attributes:
        steps: target passes summed over rows.
        plain_steps: those of them that drafted nothing: k = 0, or a row beyond the draft's context.
        drafted: as in RowStats, summed.
        accepted: likewise.
        emitted: likewise.
        dropped: likewise.
        k: drafts per step asked for; with "auto" the most that a step may have had.
        seconds: wall time of the call.
        rows: one RowStats per prompt.
        synthetic: what drafts were accepted by, when it was a rule that changes the distribution; then the text is not
            the model's. None for a real one.
        auto: what num_speculative_tokens="auto" came to: "auto" where it chose k step by step (`steps_at` tells what),
            or why it did not. None where k was a number.
        exact: whether a row's bits are promised to depend on that row alone (docs/numerics.md).
        threads: of torch's that worked on the last step on the CPU; None on CUDA.
        cached_tokens: as in RowStats, summed.
        same_text_on: with `tensor_parallel`, the numbers of processes that give this text, to the bit; else None.
        draft_format: what draft_quantization="auto" made of the draft's format, and why; None where it chose none.
        weight_version: version of the target's weights: 0 as loaded, then as `update_weights` said.
    """

    steps: int
    plain_steps: int
    drafted: int
    accepted: int
    emitted: int
    dropped: int
    k: int
    seconds: float
    rows: tuple[RowStats, ...]
    synthetic: str | None = None
    auto: str | None = None
    exact: bool = True
    threads: int | None = None
    cached_tokens: int = 0
    same_text_on: tuple[int, ...] | None = None
    draft_format: str | None = None
    weight_version: int | str = 0

    @classmethod
    def of(
        cls,
        rows: tuple[RowStats, ...],
        k: int,
        seconds: float,
        synthetic: str | None = None,
        auto: str | None = None,
        exact: bool = True,
        threads: int | None = None,
        same_text_on: tuple[int, ...] | None = None,
        draft_format: str | None = None,
        weight_version: int | str = 0,
    ) -> Stats:
        """The counts of all rows, summed."""

        def total(name: str) -> int:
            return sum(getattr(row, name) for row in rows)

        names = ("steps", "plain_steps", "drafted", "accepted", "emitted", "dropped")
        steps, plain, drafted, accepted, emitted, dropped = map(total, names)
        return cls(
            steps,
            plain,
            drafted,
            accepted,
            emitted,
            dropped,
            k,
            seconds,
            rows,
            synthetic=synthetic,
            auto=auto,
            exact=exact,
            threads=threads,
            cached_tokens=total("cached_tokens"),
            same_text_on=same_text_on,
            draft_format=draft_format,
            weight_version=weight_version,
        )

    @property
    def steps_at(self) -> dict[int, int]:
        """How many of the steps were made with each k; ks without any are left out."""
        width = max((len(row.steps_at) for row in self.rows), default=0)
        counts = {k: sum(row.steps_at[k] for row in self.rows if k < len(row.steps_at)) for k in range(width)}
        return {k: count for k, count in counts.items() if count}

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_per_position(self) -> tuple[float, ...] | None:
        """Share of drafting steps in which draft 1, 2, .. k was accepted; None where nothing was drafted."""
        if not self.drafted:
            return None
        width = max(len(row.histogram) for row in self.rows)
        counts = [sum(row.histogram[i] for row in self.rows if i < len(row.histogram)) for i in range(width)]
        steps = self.steps - self.plain_steps
        return tuple(sum(counts[j:]) / steps for j in range(1, width))

    @property
    def tokens_per_step(self) -> float | None:
        """emitted / steps; None where no step was made."""
        return self.emitted / self.steps if self.steps else None

    def __str__(self) -> str:
        """The counts in one line."""
        rate = "-" if self.acceptance_rate is None else f"{self.acceptance_rate:.1%}"
        per_step = "-" if self.tokens_per_step is None else f"{self.tokens_per_step:.2f}"
        alone = (
            f", {self.plain_steps} of {self.steps} steps without drafts" if self.plain_steps and self.drafted else ""
        )
        speed = f"{self.emitted / self.seconds:.1f}" if self.seconds > 0 else "-"
        notice = f"; {self.cached_tokens} prompt tokens from the prefix cache" if self.cached_tokens else ""
        notice += "" if self.exact else "; exact=False"
        notice += f"; NOT THE MODEL'S TEXT: {self.synthetic}" if self.synthetic else ""
        return (
            f"{self.emitted} tokens in {self.seconds:.2f} s ({speed} tok/s), {per_step} tokens per step, "
            f"acceptance {rate} of {self.drafted} drafted, k = {self._drafts()}{alone}{notice}"
        )

    def _drafts(self) -> str:
        """k, or the ks that "auto" chose."""
        if self.auto is None:
            return str(self.k)
        if self.auto != "auto":
            return f"{self.k} ({self.auto})"
        return f"auto ({', '.join(f'{k} in {count}' for k, count in self.steps_at.items())} of {self.steps} steps)"


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """Result of `generate(..., return_dict_in_generate=True)`.

    Attributes:
        sequences: LongTensor [B, T + new], prompts (left-padded) and new tokens, padded after a row's end. With
            num_return_sequences a prompt's rows follow each other, here and in all lists.
        new_tokens: the new tokens of each row, stop id included, unpadded.
        finish_reasons: "stop" or "length" per row; "error" where no token could be chosen (see `InvalidLogits`);
            "cancelled" where a handle's request was.
        stats: what happened.
        logprobs: of the new tokens, under the raw target (no temperature, no filters), in fp32; None unless asked for.
        top_logprobs: at each new token the most probable (id, log-probability) pairs, largest first; as above.
        texts: where stop_strings were given, the text of each row's new tokens, special tokens written out. In a row
            that a stop string ended it ends with that string, while new_tokens end with the whole token that
            completed it.
        prompt_logprobs: of each prompt's tokens from the second on, as above; None unless asked for. With
            num_return_sequences there is one list a prompt, not a row.
        prompt_top_logprobs: at each of these tokens the most probable (id, log-probability) pairs, as above.
    """

    sequences: Tensor
    new_tokens: list[list[int]]
    finish_reasons: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    texts: list[str] | None = None
    prompt_logprobs: list[list[float]] | None = None
    prompt_top_logprobs: list[list[list[tuple[int, float]]]] | None = None


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Result of `FastSpecGenerator.score`: log-probabilities under the raw target, in fp32.

    Attributes:
        logprobs: of the tokens of each row's answer.
        top_logprobs: at each of these tokens the most probable (id, log-probability) pairs, largest first.
        prompt_logprobs: of the tokens of each row's prompt from the second on; None where they were left out.
        prompt_top_logprobs: as `top_logprobs`, of these tokens; None where they were left out.
        stats: what happened. Given tokens count as drafts.
    """

    logprobs: list[list[float]]
    top_logprobs: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[list[float]] | None
    prompt_top_logprobs: list[list[list[tuple[int, float]]]] | None
    stats: Stats
