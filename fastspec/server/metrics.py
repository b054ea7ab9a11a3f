"""Prometheus metrics of GET /metrics: fastspec's own, and metrics with vLLM's names, which dashboards query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fastspec.scheduling.requests import Request

# upper bounds of the buckets of histograms in seconds, each about twice the one before
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LABELS: Final = ("model_name", "engine")  # of vLLM's metrics; there is one engine, "0"


def buckets_to(longest: float) -> list[float]:
    """Returns the upper bounds of a histogram's buckets in seconds. The last one is `longest`."""
    bounds = [each for each in _BUCKETS if each < longest]
    while bounds and bounds[-1] * 2 < longest:
        bounds.append(bounds[-1] * 2)
    return [*bounds, longest]


@dataclass(frozen=True, slots=True)
class Live:
    """Functions that return current values. They are called at each request to /metrics.

    Attributes:
        running: returns the number of answers that have a batch slot.
        waiting: returns the number of answers that wait for a batch slot.
        kv_usage: returns the share of the K/V cache's pages that running answers use, 0 to 1.
    """

    running: Callable[[], float]
    waiting: Callable[[], float]
    kv_usage: Callable[[], float]


class Meters:
    """Prometheus metrics of one server, in a registry of their own.

    Args:
        longest: time limit of a request in seconds. It is the upper end of the histograms.
        model: name of the model, a label of vLLM's metrics.
        live: functions for the metrics with current values. None: these metrics are left out.
    """

    def __init__(self, longest: float, model: str = "", live: Live | None = None) -> None:
        self.registry = CollectorRegistry()
        to: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("fastspec_requests", "Requests answered, by HTTP status.", ["status"], **to)
        self.running = Gauge("fastspec_answers_running", "Answers that are being written or wait.", **to)
        self.tokens = Counter(
            "fastspec_tokens", "Tokens: of prompts, of those cached; completed, drafted, accepted.", ["kind"], **to
        )
        to["buckets"] = buckets_to(longest)
        self.first = Histogram("fastspec_first_token_seconds", "From a request to its first token.", **to)
        self.whole = Histogram("fastspec_answer_seconds", "From a request to the end of its answer.", **to)
        self._vllm = _OfVllm(self.registry, to["buckets"], model, live)

    def first_token(self, seconds: float) -> None:
        """Records the time from a request to the first token of an answer."""
        self.first.observe(seconds)
        self._vllm.first.observe(seconds)

    def between_tokens(self, seconds: float, count: int) -> None:
        """Records the time between two pieces of an answer, divided over the `count` tokens of the second piece."""
        for _ in range(count):
            self._vllm.between.observe(seconds / count)

    def answer_ended(self, seconds: float) -> None:
        """Records the time from a request to the end of an answer."""
        self.whole.observe(seconds)
        self._vllm.whole.observe(seconds)

    def waited(self, seconds: float) -> None:
        """Records the time that an answer waited for a batch slot."""
        self._vllm.queue.observe(seconds)

    def count(self, prompt_tokens: int, requests: Sequence[Request]) -> None:
        """Adds the token counts of one HTTP request.

        Args:
            prompt_tokens: number of tokens of all prompts of the HTTP request.
            requests: requests of the scheduler, one for each of its answers.
        """
        rows = [each.stats() for each in requests]
        for kind, count in {
            "prompt": prompt_tokens,
            "cached": sum(row.cached_tokens for row in rows),
            "completion": sum(row.emitted for row in rows),
            "drafted": sum(row.drafted for row in rows),
            "accepted": sum(row.accepted for row in rows),
        }.items():
            self.tokens.labels(kind).inc(count)
        self._vllm.count(prompt_tokens, requests)


class _OfVllm:
    """Prometheus metrics with the names and labels of vLLM's metrics."""

    def __init__(self, registry: CollectorRegistry, buckets: list[float], model: str, live: Live | None) -> None:
        to: dict[str, Any] = {"registry": registry}
        self._labels = (model, "0")

        def counter(name: str, help: str) -> Counter:
            return Counter(f"vllm:{name}", help, _LABELS, **to).labels(*self._labels)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"vllm:{name}", help, _LABELS, buckets=buckets, **to).labels(*self._labels)

        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "New tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self._drafts = counter("spec_decode_num_drafts", "Steps with drafts, of one answer each.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafts.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their position in the step, from 0.",
            [*_LABELS, "position"],
            **to,
        )
        self._ended = Counter("vllm:request_success", "Ended answers.", [*_LABELS, "finished_reason"], **to)
        self.first = histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.between = histogram("inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = histogram("e2e_request_latency_seconds", "From a request to the end of its answer.")
        self.queue = histogram("request_queue_time_seconds", "From a request to the row of its answer.")
        if live is not None:
            for name, help, value in (
                ("num_requests_running", "Answers that have a row.", live.running),
                ("num_requests_waiting", "Answers that wait for a row.", live.waiting),
                ("kv_cache_usage_perc", "Share of the K/V cache that rows use, 0 to 1.", live.kv_usage),
            ):
                Gauge(f"vllm:{name}", help, _LABELS, **to).labels(*self._labels).set_function(value)

    def count(self, prompt_tokens: int, requests: Sequence[Request]) -> None:
        """Adds the token counts of one HTTP request. Args: see `Meters.count`."""
        self._prompt.inc(prompt_tokens)
        for each in requests:
            row = each.stats()
            self._generated.inc(row.emitted)
            self._queries.inc(len(each.prompt))
            self._hits.inc(row.cached_tokens)
            self._drafts.inc(row.steps - row.plain_steps)
            self._drafted.inc(row.drafted)
            self._accepted.inc(row.accepted)
            # steps that accepted more than `position` drafts accepted the one at `position`
            for position in range(len(row.histogram) - 1):
                self._at.labels(*self._labels, str(position)).inc(sum(row.histogram[position + 1 :]))
            if each.finish_reason in ("stop", "length"):
                self._ended.labels(*self._labels, each.finish_reason).inc()
