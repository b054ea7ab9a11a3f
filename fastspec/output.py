"""Results of `generate`: sequences, finish reasons and statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStats:
    """Numbers of steps and tokens of one sequence. They satisfy emitted = steps + accepted - dropped.

    Attributes:
        steps: number of decode steps. Each is one pass of the target.
        plain_steps: number of decode steps without draft tokens.
        drafted: number of draft tokens, without those after a stop id or the token limit.
        accepted: number of accepted draft tokens. All of them are returned.
        emitted: number of returned tokens.
        dropped: 1 if the sequence ended before the token that the target itself added in the last step, else 0.
        histogram: element i is the number of steps that accepted i draft tokens. The sum is `steps`.
        steps_at: element k is the number of steps that were made with k draft tokens. The sum is `steps`.
        cached_tokens: number of prompt tokens whose K/V were reused from an earlier prompt, see `prefix_cache`.
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
    """Numbers of steps and tokens of a whole call, summed over its sequences and for each sequence.

    Attributes:
        steps: number of decode steps, summed over sequences.
        plain_steps: number of decode steps without draft tokens, summed over sequences. A sequence has no draft tokens
            with k = 0, or when it is longer than the draft model's context.
        drafted, accepted, emitted, dropped: see `RowStats`; summed over sequences.
        k: number of draft tokens per step that the call asked for. With "auto": the largest number.
        seconds: wall time of the call.
        rows: one `RowStats` for each sequence.
        synthetic: name of the acceptance rule if it changes the output distribution. The text is then not the target's.
            None for exact rules.
        auto: result of num_speculative_tokens="auto": "auto" if k was chosen in each step (see `steps_at`), or the
            reason why it was not. None if k was a number.
        exact: True if the bits of a sequence's results do not depend on other sequences (docs/numerics.md).
        threads: number of torch threads in the last step on the CPU. None on CUDA.
        cached_tokens: see `RowStats`; summed over sequences.
        same_text_on: with `tensor_parallel`, all numbers of processes that give exactly this text. Else None.
        draft_format: weight format that draft_quantization="auto" chose for the draft, and the reason. None if another
            value was given.
        weight_version: version of the target's weights: 0 as loaded, later the version given to `update_weights`.
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
        """Makes the statistics of a call by summing those of its sequences.

        Args:
            rows: statistics of each sequence.
            k, seconds, synthetic, auto, exact, threads, same_text_on, draft_format, weight_version: see the attributes.
        """

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
        """Number of steps by k, the number of draft tokens per step. Values of k without steps are left out."""
        width = max((len(row.steps_at) for row in self.rows), default=0)
        counts = {k: sum(row.steps_at[k] for row in self.rows if k < len(row.steps_at)) for k in range(width)}
        return {k: count for k, count in counts.items() if count}

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted: accepted / drafted. None if there were no draft tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_per_position(self) -> tuple[float, ...] | None:
        """Element j - 1 is the share of steps with draft tokens in which draft token j was accepted.

        It ends at the largest number of draft tokens of a step. None if there were no draft tokens.
        """
        if not self.drafted:
            return None
        # with "auto" the largest k of the steps may be less than the largest k that it may choose
        width = 1 + max(self.steps_at, default=max(len(row.histogram) for row in self.rows) - 1)
        counts = [sum(row.histogram[i] for row in self.rows if i < len(row.histogram)) for i in range(width)]
        steps = self.steps - self.plain_steps
        return tuple(sum(counts[j:]) / steps for j in range(1, width))

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens that a step emits per sequence: emitted / steps. None if there were no steps."""
        return self.emitted / self.steps if self.steps else None

    def __str__(self) -> str:
        """Formats the speed, tokens per step and acceptance of the call as one line."""
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
        """Formats the number of draft tokens per step, or the numbers that "auto" chose, as text."""
        if self.auto is None:
            return str(self.k)
        if self.auto != "auto":
            return f"{self.k} ({self.auto})"
        return f"auto ({', '.join(f'{k} in {count}' for k, count in self.steps_at.items())} of {self.steps} steps)"


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """Result of `generate(..., return_dict_in_generate=True)`.

    Attributes:
        sequences: LongTensor [B, T + new]: prompts (left-padded) and new tokens, padded after the end of a
            sequence. With num_return_sequences, the sequences of a prompt follow each other, here and in all lists.
        new_tokens: the new tokens of each sequence, including the stop id, without padding.
        finish_reasons: for each sequence "stop", "length", "error" if no token could be chosen (see `InvalidLogits`),
            or "cancelled" if its request was cancelled.
        stats: statistics of the call.
        logprobs: log-probabilities of the new tokens under the distribution of `logprobs_mode`, in fp32. None
            unless requested.
        top_logprobs: for each new token the most probable (id, log-probability) pairs, largest first. None unless
            requested.
        texts: text of each sequence's new tokens, with special tokens. If a stop string ended the sequence, the text
            ends with that string, while new_tokens end with the whole token that completed it. None if no stop_strings
            were given.
        prompt_logprobs: log-probabilities of each prompt's tokens from the second on. None unless requested. With
            num_return_sequences there is one list per prompt, not one per sequence.
        prompt_top_logprobs: for each of these tokens the most probable (id, log-probability) pairs. None unless
            requested.
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
    """Result of `FastSpecGenerator.score`: log-probabilities in fp32.

    Attributes:
        logprobs: log-probabilities of the tokens of each row's answer, under the distribution of `logprobs_mode`.
        top_logprobs: at each of these tokens the most probable (id, log-probability) pairs, largest first.
        prompt_logprobs: log-probabilities of each row's prompt from the second token on, under the raw target. None if
            left out.
        prompt_top_logprobs: most probable (id, log-probability) pairs at the tokens of each prompt. None if left out.
        stats: statistics of the call. Given tokens count as drafts.
    """

    logprobs: list[list[float]]
    top_logprobs: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[list[float]] | None
    prompt_top_logprobs: list[list[list[tuple[int, float]]]] | None
    stats: Stats
