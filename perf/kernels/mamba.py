"""Times a prompt of one Mamba-2 layer, in chunks and token by token, in the same run.

Microseconds from graph replays (perf.timing), with random activations. `us` is the recurrence in chunks, `token_us` the
recurrence token by token, and `layer_us` the whole operation, with the convolution before it and what it stores. Errors
are those of the recurrence's own inputs, against fp64: of the state after the prompt, as a share of its largest
element, and the share of outputs that are not the exact result rounded once. `bits_equal` says whether passes of 64,
128 and so on leave the bits of one pass. --sweep times other launch configurations, too.

Usage: python -m perf.kernels.mamba [--shapes nano granite] [--tokens 64 512 2048] [--batch 1] [--repeats 9] [--sweep]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.common.launch import compiling
from fastspec.kernels.recurrent.mamba_prompt import MambaPlan, mamba_in_chunks, plan_of
from fastspec.kernels.recurrent.parts import ScanWeights, StateSlots
from fastspec.kernels.recurrent.state_space import mamba, scanned
from fastspec.shapes import MambaRule
from perf import timing

GPU_ONLY = True  # for perf.bench
SHAPES = {
    "nano": ("Nemotron 3 Nano", MambaRule(heads=64, head_dim=64, groups=8, state_dim=128, width=4)),
    "granite": ("Granite 4-H-Small", MambaRule(heads=128, head_dim=64, groups=1, state_dim=128, width=4)),
    "falcon": ("Falcon-H1-0.5B", MambaRule(heads=24, head_dim=64, groups=1, state_dim=256, width=4)),
    "tiny": ("tiny", MambaRule(heads=2, head_dim=32, groups=1, state_dim=16, width=4)),
}
SLOTS = 5  # of a generator with four drafts
PASSES = (64, 128, 512, 1024, 2048)
SWEEP = (
    *(MambaPlan(64, 32, 4, warps, stages) for warps in (4, 8) for stages in (1, 2, 3)),
    *(MambaPlan(64, 16, 4, warps, 2) for warps in (4, 8)),
    *(MambaPlan(64, 64, 4, 8, stages) for stages in (2, 3)),
    *(MambaPlan(32, block, 4, 4, 2) for block in (16, 32)),
    MambaPlan(64, 32, 8, 8, 2),
)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, as trained ones begin: decays of 1 to 16, steps of 0.001 to 0.1."""

    conv: Tensor
    conv_bias: Tensor
    decay: Tensor
    step: Tensor
    skip: Tensor

    @classmethod
    def random(cls, rule: MambaRule, device: torch.device) -> Layer:
        size = torch.exp(torch.empty(rule.heads, device=device).uniform_(math.log(1e-3), math.log(0.1)))
        conv = torch.randn(rule.channels, 1, rule.width, device=device) / rule.width**0.5
        return cls(
            conv.to(torch.bfloat16),
            torch.zeros(rule.channels, device=device, dtype=torch.bfloat16),
            torch.log(torch.empty(rule.heads, device=device).uniform_(1, 16)),
            size + torch.log(-torch.expm1(-size)),
            torch.ones(rule.heads, device=device),
        )

    def scan(self) -> ScanWeights:
        return ScanWeights(self.decay, self.step, self.skip)


def slots_of(rule: MambaRule, batch: int, start: int, tokens: int, device: torch.device) -> StateSlots:
    """Empty states of `batch` rows, and the positions of `tokens` tokens of each."""
    states = torch.zeros(batch, SLOTS, *rule.state_shape, device=device)
    inputs = torch.zeros(batch, SLOTS + rule.tail, rule.channels, device=device, dtype=torch.bfloat16)
    at = torch.arange(start, start + tokens, device=device).repeat(batch, 1)
    return StateSlots(states, inputs, torch.arange(batch, device=device), at, torch.ones_like(at, dtype=torch.bool))


def exact(mixed: Tensor, product: Tensor, layer: Layer, rule: MambaRule) -> tuple[Tensor, Tensor]:
    """Outputs [Q, values] and last state of the first row, in fp64, token by token."""
    x, b, c = mixed[0].double().split([rule.values, rule.shared, rule.shared], dim=-1)
    served = rule.heads // rule.groups
    b, c = (each.unflatten(-1, (rule.groups, -1)).repeat_interleave(served, dim=1) for each in (b, c))
    x = x.unflatten(-1, (rule.heads, -1))
    step = torch.nn.functional.softplus(product[0, :, -rule.heads :].double() + layer.step.double())
    fade = torch.exp(-torch.exp(layer.decay.double()) * step)
    state, outs = torch.zeros(rule.state_shape, dtype=torch.float64, device=x.device), []
    for t in range(len(x)):
        state = state * fade[t, :, None, None] + (step[t, :, None] * x[t])[..., None] * b[t, :, None]
        outs.append(torch.einsum("hpn,hn->hp", state, c[t]))
    return (torch.stack(outs) + layer.skip.double()[:, None] * x).flatten(1), state


def known_plan(rule: MambaRule, dtype: torch.dtype) -> MambaPlan:
    """The plan of a layer that has one."""
    plan = plan_of(rule, dtype)
    assert plan is not None, "a layer of the bench has chunks"
    return plan


def in_passes(mixed: Tensor, product: Tensor, layer: Layer, rule: MambaRule, size: int) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a prompt in passes of `size` tokens."""
    tokens, outs = mixed.shape[1], []
    slots = slots_of(rule, 1, 0, tokens, mixed.device)
    for start in range(0, tokens, size):
        here = slice(start, min(start + size, tokens))
        part = slots._replace(positions=slots.positions[:, here].contiguous())
        part = part._replace(write_mask=torch.ones_like(part.positions, dtype=torch.bool))
        given = mixed[:1, here].contiguous(), product[:1, here].contiguous()
        outs.append(mamba_in_chunks(*given, layer.scan(), part, rule, None, known_plan(rule, mixed.dtype)))
    return torch.cat(outs, dim=1), slots.states[0, (tokens - 1) % SLOTS]


def errors(found: Tensor, slots: StateSlots, wanted: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Errors of the first row."""
    out, state = wanted
    mine = slots.states[0, (len(out) - 1) % SLOTS].double()
    return {
        "state_error": float((mine - state).abs().max() / state.abs().max()),
        "rounded_otherwise": float((found[0] != out.to(found.dtype)).float().mean()),
    }


def shape_rows(
    name: str, batch: int, tokens: int, device: torch.device, repeats: int, *, sweep: bool = False
) -> Iterator[dict[str, Any]]:
    """A row of a shape and `batch` prompts of `tokens` tokens; with `sweep`, one more for each configuration."""
    torch.manual_seed(0)
    title, rule = SHAPES[name]
    layer, dtype = Layer.random(rule, device), torch.bfloat16
    product = torch.randn(batch, tokens, rule.rows, device=device).to(dtype)
    mixed = torch.nn.functional.silu(torch.randn(batch, tokens, rule.channels, device=device)).to(dtype)
    time = partial(timing.graph_time, repeats=repeats, device=device)
    row: dict[str, Any] = {"op": f"{title} prompt of a layer", "rows": batch, "tokens": tokens}
    slots, other = (slots_of(rule, batch, 0, tokens, device) for _ in range(2))
    given = mixed, product, layer.scan()
    plan = known_plan(rule, dtype)
    chunks = partial(mamba_in_chunks, *given, slots, rule, None)
    by_token = partial(scanned, *given, other, rule, None)
    plans = SWEEP if sweep else ()
    with compiling() if device.type == "cuda" else nullcontext():
        for call in (partial(chunks, plan), by_token, *(partial(chunks, each) for each in plans)):
            call()
    took, slow = time(partial(chunks, plan)), time(by_token)
    whole = time(partial(mamba, product, layer, *slots_of(rule, batch, 0, tokens, device), rule))
    wanted = exact(mixed, product, layer, rule)
    new, old = errors(chunks(plan), slots, wanted), errors(by_token(), other, wanted)
    parts = [in_passes(mixed, product, layer, rule, size) for size in PASSES if size <= max(tokens, PASSES[0])]
    one = parts[-1]
    yield {
        **row,
        **{"plan": str(tuple(plan)), "us": round(took.us, 2), "us_iqr": round(took.spread * 1e6, 2)},
        **{"token_us": round(slow.us, 2), "ratio": round(slow.us / took.us, 2), "layer_us": round(whole.us, 2)},
        **{key: float(f"{value:.2e}") for key, value in new.items()},
        **{f"token_{key}": float(f"{value:.2e}") for key, value in old.items()},
        "bits_equal": all(torch.equal(a, b) for part in parts for a, b in zip(part, one, strict=True)),
    }
    for plan in plans:
        took = time(partial(chunks, plan))
        yield {**row, "plan": str(tuple(plan)), "us": round(took.us, 2), "us_iqr": round(took.spread * 1e6, 2)}


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    for name in ("nano", "granite", "falcon"):
        for batch, tokens in ((1, 64),) if quick else ((1, 64), (1, 512), (1, 2048), (4, 512)):
            yield from shape_rows(name, batch, tokens, device, 3 if quick else 9)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["nano", "granite"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    given = parser.parse_args(arguments)
    for name in given.shapes:
        for tokens in given.tokens:
            for row in shape_rows(name, given.batch, tokens, given.device, given.repeats, sweep=given.sweep):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
