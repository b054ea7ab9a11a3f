"""Times the end of a step that samples, and a draft's draw: ours, torch's operations, and the usual chain of launches.

Microseconds a call from graph replays (perf.timing). "cold" takes turns over more logits than the L2 cache holds, "hot"
reads the same ones again; `floor` is their bytes at the read ceiling measured in the same run. The usual chain is what
engines launch one after the other: softmax of the target, uniforms, acceptance, recovered tokens by an exponential race
(Triton, one program a row), without processors and filters, which they do in launches of their own before it.

Laws: "peaked" ones, of which the n-th likeliest id has a share that falls as n^-1.5, about as a language model's (some
60 ids within a nucleus of 0.9), and "flat" ones, of normally distributed logits (61% of all ids are within it).

Usage: python -m perf.kernels.sampled [--vocab 128256] [--repeats 10] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.distribution import find_distributions
from fastspec.kernels.sampling.draw import sampled_draw
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.logits import sampled_work
from fastspec.kernels.sampling.sampled_commit import sampled_commit
from fastspec.sampling import distribution
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION
from fastspec.state import RUNNING, DecodeState
from perf import timing

Call = Callable[[Tensor], object]
SHAPES = [(1, 0), (1, 5), (1, 7), (8, 5), (32, 5)]
TOKENS = 2**19
MOST_COPIES = 24
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties, top-p 0.9": {"repetition": 1.1, "frequency": 0.1, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


@triton.jit
def _chain_softmax(logits_ptr, probs_ptr, vocab, block: tl.constexpr):
    """One program a line: the largest, the sum, the law written out."""
    line = tl.program_id(0).to(tl.int64) * vocab
    top = tl.full([block], -float("inf"), tl.float32)
    for start in range(0, vocab, block):
        at = start + tl.arange(0, block)
        top = tl.maximum(top, tl.load(logits_ptr + line + at, mask=at < vocab, other=-float("inf")))
    top = tl.max(top, axis=0)
    total = tl.zeros([block], tl.float32)
    for start in range(0, vocab, block):
        at = start + tl.arange(0, block)
        total += tl.exp(tl.load(logits_ptr + line + at, mask=at < vocab, other=-float("inf")) - top)
    total = tl.sum(total, axis=0)
    for start in range(0, vocab, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits_ptr + line + at, mask=at < vocab, other=-float("inf"))
        tl.store(probs_ptr + line + at, tl.exp(x - top) / total, mask=at < vocab)


@triton.jit
def _chain_recover(probs_ptr, q_ptr, noise_ptr, out_ptr, vocab, places, block: tl.constexpr):
    """One program a line: the race of what the target's law has beyond the draft's."""
    line = tl.program_id(0).to(tl.int64)
    row, place = line // places, line % places
    best = tl.full([block], -1.0, tl.float32)
    where = tl.zeros([block], tl.int32)
    for start in range(0, vocab, block):
        at = start + tl.arange(0, block)
        p = tl.load(probs_ptr + line * vocab + at, mask=at < vocab, other=0.0)
        drafted = (at < vocab) & (place < places - 1)
        q = tl.load(q_ptr + (row * (places - 1) + place) * vocab + at, mask=drafted, other=0.0)
        speed = tl.maximum(p - q, 0.0) / tl.load(noise_ptr + row * vocab + at, mask=at < vocab, other=1.0)
        where = tl.where(speed > best, at, where)
        best = tl.maximum(best, speed)
    top = tl.max(best, axis=0)
    tl.store(out_ptr + line, tl.min(tl.where(best == top, where, 0x7FFFFFFF), axis=0))


def running_state(batch: int, k: int, vocab: int, options: dict[str, float]) -> DecodeState:
    """Rows that go on for as long as they are timed."""
    state = DecodeState.allocate(
        batch=batch, max_drafts=k, max_length=TOKENS, pages_per_row=1, vocab_size=vocab, device=torch.device("cuda")
    )
    state.finish.fill_(RUNNING)
    state.limits.fill_(TOKENS)
    state.draft_counts.fill_(k)
    state.temperature.fill_(1.0)
    state.unbiased.fill_(True)
    state.seeds.copy_(torch.arange(batch))
    for name, value in options.items():
        getattr(state, name).fill_(value)
    return state


def usual_chain(state: DecodeState, k: int, vocab: int) -> Call:
    """softmax, uniforms and noise, recovered tokens, acceptance, commit: each a launch of its own, or several."""
    batch, device = state.batch, state.lengths.device
    probs = torch.empty(batch, k + 1, vocab, device=device)
    recovered = torch.empty(batch, k + 1, dtype=torch.int64, device=device)
    noise = torch.empty(batch, vocab, device=device)
    q = state.draft_probs[:, :k].contiguous()
    scratch = scratch_of(batch, k, device)

    def chain(logits: Tensor) -> None:
        lines = batch * (k + 1)
        _chain_softmax[(lines,)](logits, probs, vocab, block=8192, num_warps=16)
        noise.exponential_()
        _chain_recover[(lines,)](probs, q, noise, recovered, vocab, k + 1, block=8192, num_warps=16)
        drafts = state.draft_tokens[:, :k]
        ratio = probs[:, :k].gather(2, drafts[:, :, None]) / q.gather(2, drafts[:, :, None])
        accepted = (torch.rand(batch, k, device=device) < ratio[:, :, 0]).long().cumprod(1).sum(1)
        block = torch.cat((drafts, recovered[:, k:]), dim=1)
        block.scatter_(1, accepted[:, None], recovered.gather(1, accepted[:, None]))
        commit(accepted, block, state, scratch)

    return chain


def calls_of(state: DecodeState, k: int, vocab: int) -> dict[str, Call]:
    """By name: each takes logits [B, k+1, V]."""
    device = state.lengths.device
    work, scratch = sampled_work(state.batch, k, vocab, device), scratch_of(state.batch, k, device)
    deterministic = k == 0
    draws = distribution.PhiloxDraws(state.seeds)

    def ours(rule: str) -> Call:
        return lambda logits: sampled_commit(
            logits, state, scratch, work, rule=rule, deterministic=deterministic, draws=None
        )

    calls: dict[str, Call] = {
        "ours, block": ours(BLOCK),
        "ours, rejection": ours(REJECTION),
        "ours, coupled": ours(COUPLED),
        "its first two launches": lambda logits: find_distributions(logits, state, work, ragged=True),
    }
    if k:
        calls["ours, one draft's draw"] = lambda logits: sampled_draw(
            logits[:, :1], state, 0, work, purpose=distribution.DRAFT, keep_draft_probs=True, draws=None
        )
    if state.batch <= 8:
        calls["torch, block"] = lambda logits: reference.sampled_commit(
            logits, state, None, None, rule=BLOCK, deterministic=deterministic, draws=draws
        )
    if k:
        calls["usual chain, no filters"] = usual_chain(state, k, vocab)
    calls["greedy verify_commit"] = lambda logits: verify_commit(logits, state, scratch)
    return calls


def logits_of(law: str, batch: int, places: int, vocab: int) -> Tensor:
    """fp32 [B, k+1, V]."""
    noise = torch.randn(batch, places, vocab, device="cuda")
    if law == "flat":
        return noise
    ranks = noise.argsort(dim=-1).argsort(dim=-1).float() + 1.0
    return -1.5 * ranks.log()


def drafts_for(state: DecodeState, logits: Tensor) -> None:
    """Drafts of a law near the target's, so that some are accepted."""
    k = state.draft_tokens.shape[1]
    draws = distribution.PhiloxDraws(state.seeds)
    for j in range(k):
        near = logits[:, j : j + 1] + torch.randn_like(logits[:, j : j + 1]) * 0.4
        reference.sampled_draw(near, state, j, None, purpose=distribution.DRAFT, keep_draft_probs=True, draws=draws)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and options")
    given = parser.parse_args()
    ceiling = timing.read_ceiling()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read ceiling {ceiling:.0f} GB/s")
    torch.cuda.empty_cache()
    for batch, k in [(1, 7), (32, 5)] if given.quick else SHAPES:
        size = batch * (k + 1) * given.vocab * 4
        count = min(MOST_COPIES, timing.copies_for(size))
        print(f"B = {batch}, k = {k}, V = {given.vocab}: floor {size / ceiling / 1e3:.2f} us, {count} sets of logits")
        for law in ("peaked", "flat"):
            logits = [logits_of(law, batch, k + 1, given.vocab) for _ in range(count)]
            for name, options in OPTIONS.items():
                if law == "flat" and name not in ("plain", "top-k 50, top-p 0.9", "top-p 0.9"):
                    continue
                state = running_state(batch, k, given.vocab, options)
                drafts_for(state, logits[0])
                first = name == "plain" and law == "peaked"
                parts = []
                for what, call in calls_of(state, k, given.vocab).items():
                    if not first and what.split(",")[0] in ("torch", "usual chain", "greedy verify_commit"):
                        continue
                    cold = timing.graph_time([partial(call, each) for each in logits], repeats=given.repeats).us
                    hot = timing.graph_time([partial(call, logits[0])], repeats=given.repeats).us
                    parts.append(f"{what} {cold:.1f}/{hot:.1f}")
                print(f"  {law}, {name} (cold/hot us): " + "; ".join(parts), flush=True)
                del state
            del logits
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
