"""Times the end of a greedy step: one launch here, against torch's operations and a softmax-and-accept sequence.

Microseconds a call from graph replays (perf.timing). "cold" takes turns over more logits than the L2 cache holds,
"hot" reads the same ones again; `floor` is their bytes at the read ceiling measured in the same run.

Usage: python -m perf.kernels.verify [--vocab 128256] [--repeats 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.reference.step import Record
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.logprobs import record_work
from fastspec.kernels.sampling.publish import publish
from fastspec.sampling import distribution, verify
from fastspec.state import RUNNING, DecodeState
from perf import timing

Call = Callable[[Tensor], object]
GPU_ONLY = True  # for perf.bench
SHAPES = [(1, 0), (1, 5), (1, 7), (8, 5), (32, 5)]
SLOTS = 64
MOST_COPIES = 60  # of logits, each a node of the graph that is timed
TOKENS = 2**19  # room for every token that all launches emit


def running_state(batch: int, k: int, device: torch.device) -> DecodeState:
    """Rows that go on for as long as they are timed."""
    state = DecodeState.allocate(
        batch=batch, max_drafts=k, max_length=TOKENS, pages_per_row=1, vocab_size=32, device=device
    )
    state.finish.fill_(RUNNING)
    state.limits.fill_(TOKENS)
    state.draft_counts.fill_(k)
    return state


def softmax_and_accept(logits: Tensor, state: DecodeState, one_hot: Tensor, draws: distribution.PhiloxDraws) -> None:
    """What a step without a greedy path does: the target's law, rejection sampling, bookkeeping."""
    k = logits.shape[1] - 1
    law = distribution.compute_probs(logits, state.sampler)
    places = state.lengths[:, None] + torch.arange(k + 1, device=logits.device)
    drafts = state.draft_tokens[:, :k]
    accepted, block = verify.rejection(law, one_hot, drafts, state.draft_counts, places, draws, distribution.TARGET)
    verify.commit(state, accepted, block)


def ends_of_a_step(state: DecodeState, k: int, vocab: int) -> dict[str, Call]:
    """By name: each takes logits [B, k+1, V]."""
    batch, device = state.batch, state.lengths.device
    scratch = scratch_of(batch, k, device)
    entries = torch.zeros(SLOTS, 1 + batch * (5 + k), dtype=torch.int64).pin_memory()
    ring = entries, torch.zeros(1, dtype=torch.int64, device=device)
    accepted, block = torch.zeros_like(state.accepted), torch.zeros_like(state.block)
    one_hot = torch.zeros(batch, k, vocab, device=device).scatter_(2, state.draft_tokens[:, :k, None], 1.0)
    draws = distribution.PhiloxDraws(state.seeds)
    words = SLOTS, batch, k + 1, 1 + 2 * state.top_ids.shape[2]
    details = torch.zeros(words, dtype=torch.int32).pin_memory()
    work = record_work(batch, k, vocab, device)

    def recorded(top: int) -> Call:
        return lambda logits: verify_commit(logits, state, scratch, ring, Record(top, work, details))

    def recorded_by_torch(top: int) -> Call:
        def call(logits: Tensor) -> None:
            verify_commit(logits, state, scratch)
            logprobs = logits.log_softmax(dim=-1)
            state.logprobs.copy_(logprobs.gather(2, state.block[:, :, None])[:, :, 0])
            if top:
                values, ids = logprobs.topk(top, dim=-1)
                state.top_logprobs[:, :, :top] = values
                state.top_ids[:, :, :top] = ids
            publish(*ring, state, drafting=k > 0, details=details)

        return call

    return {
        "verify_commit": lambda logits: verify_commit(logits, state, scratch),
        "verify_commit + publish": lambda logits: verify_commit(logits, state, scratch, ring),
        "its own logprobs": recorded(0),
        "and those of 5 ids": recorded(5),
        "and those of 20 ids": recorded(20),
        "torch: its own logprobs": recorded_by_torch(0),
        "torch: and those of 5 ids": recorded_by_torch(5),
        "commit": lambda _: commit(accepted, block, state, scratch),
        "commit + publish": lambda _: commit(accepted, block, state, scratch, ring),
        "publish": lambda _: publish(*ring, state, drafting=k > 0),
        "torch: argmax alone": lambda logits: logits.argmax(-1),
        "torch: greedy, commit": lambda logits: reference.verify_commit(logits, state, None),
        "torch: softmax, accept, commit": lambda logits: softmax_and_accept(logits, state, one_hot, draws),
    }


def starts_of_a_pass(state: DecodeState, k: int, hidden: int = 4096, vocab: int = 32000) -> dict[str, Call]:
    """By name; the scoring pass's k+1 rows."""
    weight = torch.randn(vocab, hidden, device=state.lengths.device).to(torch.bfloat16)
    rows = (state.tokens, state.lengths, state.finish, state.draft_tokens)
    shape = {"first": -1, "queries": k + 1, "limit": TOKENS, "vocab": vocab}
    return {
        "feed_rows": lambda _: feed_rows(*rows, **shape),
        "feed_rows, embed": lambda _: embed(Weight(weight), feed_rows(*rows, **shape)[0]),
        "torch: feed_rows, embed": lambda _: reference.embed(Weight(weight), reference.feed_rows(*rows, **shape)[0]),
    }


def times(calls: dict[str, Call], given: list[Tensor], repeats: int) -> dict[str, float]:
    """Microseconds a call, by name; the calls take `given` in turn."""
    return {
        name: timing.graph_time([partial(call, logits) for logits in given], repeats=repeats).us
        for name, call in calls.items()
    }


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    ceiling, vocab = timing.read_ceiling(device=device), 128256
    torch.cuda.empty_cache()
    for batch, k in SHAPES[:2] if quick else SHAPES:
        size = batch * (k + 1) * vocab * 4
        count = min(MOST_COPIES, timing.copies_for(size))
        logits = [torch.randn(batch, k + 1, vocab, device=device) for _ in range(count)]
        found = times(ends_of_a_step(running_state(batch, k, device), k, vocab), logits, 9)
        yield {
            "op": "verify_commit + publish",
            "shape": f"batch {batch}, {vocab}",
            "rows": k + 1,
            "us": round(found["verify_commit + publish"], 2),
            "bytes": size,
            "share": round(size / found["verify_commit + publish"] / 1e3 / ceiling, 3),
            "torch_us": round(found["torch: greedy, commit"], 2),
        }
        for name in ("its own logprobs", "and those of 5 ids"):
            yield {
                "op": f"verify_commit + publish, {name}",
                "shape": f"batch {batch}, {vocab}",
                "rows": k + 1,
                "us": round(found[name], 2),
                "bytes": size,
                "share": round(size / found[name] / 1e3 / ceiling, 3),
                "torch_us": round(found[f"torch: {name}"], 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    device = torch.device("cuda")
    ceiling = timing.read_ceiling()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read ceiling {ceiling:.0f} GB/s")
    torch.cuda.empty_cache()
    for batch, k in SHAPES:
        size = batch * (k + 1) * given.vocab * 4
        count = min(MOST_COPIES, timing.copies_for(size))
        logits = [torch.randn(batch, k + 1, given.vocab, device=device) for _ in range(count)]
        state = running_state(batch, k, device)
        calls = ends_of_a_step(state, k, given.vocab)
        cold, hot = times(calls, logits, given.repeats), times(calls, logits[:1], given.repeats)
        print(f"B = {batch}, k = {k}, V = {given.vocab}: floor {size / ceiling / 1e3:.2f} us, {count} sets of logits")
        for name in calls:
            print(f"  {name:32} cold {cold[name]:8.2f}  hot {hot[name]:8.2f}", flush=True)
        for name, time in times(starts_of_a_pass(state, k), logits[:1], given.repeats).items():
            print(f"  {name:32}      {'':8}      {time:8.2f}", flush=True)


if __name__ == "__main__":
    main()
