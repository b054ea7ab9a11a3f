"""Results of `generate`: sequences, finish reasons and statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStats:
    """Counts of one row. They satisfy emitted = steps + accepted - dropped.

    Attributes:
        steps: number of target passes.
        plain_steps: number of target passes without drafts.
        drafted: number of draft tokens, without those after a stop id or the limit.
        accepted: number of accepted drafts, which are all returned.
        emitted: number of returned tokens.
        dropped: 1 if the row ended before the token that the target itself gave in the last step, else 0.
        histogram: numbers of steps that accepted 0, 1, .. k drafts. Their sum is `steps`.
        steps_at: numbers of steps that were made with k = 0, 1, .. Their sum is `steps`.
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
    """Counts of a whole call, summed over rows, and the counts of each row.

    Attributes:
        steps: number of target passes, summed over rows.
        plain_steps: number of target passes without drafts: with k = 0, or in a row that is longer than the draft's
            context.
        drafted, accepted, emitted, dropped: see RowStats; summed.
        k: drafts per step that were asked for. With "auto": upper limit.
        seconds: wall time of the call.
        rows: one RowStats per prompt.
        synthetic: name of the acceptance rule, if it changes the distribution; then the text is not the model's. None
            for exact rules.
        auto: result of num_speculative_tokens="auto": "auto" if k was chosen in each step (see `steps_at`), or the
            reason why it was not. None if k was a number.
        exact: True if the bits of a row depend on that row alone (docs/numerics.md).
        threads: number of torch threads in the last step on the CPU. None on CUDA.
        cached_tokens: see RowStats; summed.
        same_text_on: with `tensor_parallel`, the numbers of processes that give this text, to the bit. Else None.
        draft_format: draft format that draft_quantization="auto" chose, and the reason. None if another value was
            given.
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
        """Sums the counts of all rows. Other arguments become the attributes of the same names."""

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
        """Number of steps with each k; ks without steps are left out."""
        width = max((len(row.steps_at) for row in self.rows), default=0)
        counts = {k: sum(row.steps_at[k] for row in self.rows if k < len(row.steps_at)) for k in range(width)}
        return {k: count for k, count in counts.items() if count}

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted: accepted / drafted. None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_per_position(self) -> tuple[float, ...] | None:
        """Shares of the steps with drafts in which draft 1, 2, .. k was accepted. None if nothing was drafted."""
        if not self.drafted:
            return None
        width = max(len(row.histogram) for row in self.rows)
        counts = [sum(row.histogram[i] for row in self.rows if i < len(row.histogram)) for i in range(width)]
        steps = self.steps - self.plain_steps
        return tuple(sum(counts[j:]) / steps for j in range(1, width))

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens that a step emits per row: emitted / steps. None if no step was made."""
        return self.emitted / self.steps if self.steps else None

    def __str__(self) -> str:
        """Formats the counts as one line."""
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
        """Formats k, or the ks that "auto" chose."""
        if self.auto is None:
            return str(self.k)
        if self.auto != "auto":
            return f"{self.k} ({self.auto})"
        return f"auto ({', '.join(f'{k} in {count}' for k, count in self.steps_at.items())} of {self.steps} steps)"


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """Result of `generate(..., return_dict_in_generate=True)`.

    Attributes:
        sequences: LongTensor [B, T + new]: prompts (left-padded) and new tokens, padded after a row's end. With
            num_return_sequences the rows of a prompt follow each other, here and in all lists.
        new_tokens: the new tokens of each row, including the stop id, without padding.
        finish_reasons: for each row "stop", "length", "error" if no token could be chosen (see `InvalidLogits`), or
            "cancelled" if its request was cancelled.
        stats: counts of the call.
        logprobs: log-probabilities of the new tokens under the distribution of `logprobs_mode`, in fp32. None
            unless requested.
        top_logprobs: for each new token the most probable (id, log-probability) pairs, largest first. None unless
            requested.
        texts: if stop_strings were given: the text of each row's new tokens, with special tokens. If a stop string
            ended the row, the text ends with that string, while new_tokens end with the whole token that completed it.
        prompt_logprobs: log-probabilities of each prompt's tokens from the second on. None unless requested. With
            num_return_sequences there is one list per prompt, not one per row.
        prompt_top_logprobs: for each of these tokens the most probable (id, log-probability) pairs.
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
        prompt_top_logprobs: the same pairs for the tokens of the prompt. None if left out.
        stats: counts of the call. Given tokens count as drafts.
    """

    logprobs: list[list[float]]
    top_logprobs: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[list[float]] | None
    prompt_top_logprobs: list[list[list[tuple[int, float]]]] | None
    stats: Stats
