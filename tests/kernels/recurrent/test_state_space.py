"""Mamba-2 and short convolutions: definitions are transformers', kernels are definitions, bits are a row's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.cpu.state_space import mamba as in_chunks
from fastspec.kernels.reference.recurrent import KeptState
from fastspec.shapes import ConvRule, MambaRule, SelectiveRule
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.recurrent import state_space
from fastspec.kernels.recurrent.mamba_prompt import NARROW, mamba_in_chunks, plan_of
from fastspec.kernels.recurrent.parts import ScanWeights, StateSlots
from fastspec.kernels.recurrent.state_space import (
    mamba,
    mamba_norm,
    scanned,
    selective_conv,
    selective_scan,
    short_conv,
)

# sizes that are no powers of two, a head in several programs, and channels in several blocks
MAMBA = MambaRule(heads=2, head_dim=20, groups=2, state_dim=24, width=4, least_step=0.5, most_step=1.5)
WIDE = MambaRule(heads=2, head_dim=24, groups=1, state_dim=128, width=3)
BROAD = MambaRule(heads=2, head_dim=24, groups=1, state_dim=200, width=2)
SMALL = MambaRule(heads=2, head_dim=16, groups=2, state_dim=8, width=4)
CONV = ConvRule(channels=72, width=3)
SELECTIVE = SelectiveRule(channels=72, state_dim=12, width=3, rank=5)
RULES = {"mamba": MAMBA, "wide": WIDE, "broad": BROAD, "small": SMALL, "conv": CONV, "selective": SELECTIVE}


def both(conv: Callable[..., Tensor], scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mamba-1 as one operation, whose product goes on with B, C and steps."""

    def op(product: Tensor, layer: Any, states: Tensor, inputs: Tensor, *where: Any, **more: Any) -> Tensor:
        rule = where[-1]
        product, b_c, steps = product.split([rule.rows, 2 * rule.state_dim, rule.channels], dim=-1)
        x = conv(product.contiguous(), layer, states, inputs, *where, **more)
        return scan(torch.cat((x, b_c), dim=-1), steps.contiguous(), layer, states, *where, **more)

    return op


OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # kernel, definition
    **dict.fromkeys(("mamba", "wide", "broad"), (mamba, reference.mamba)),
    "conv": (short_conv, reference.short_conv),
    "selective": (
        both(selective_conv, selective_scan),
        both(reference.selective_conv, reference.selective_scan),
    ),
}
SLOTS = 3
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Parts:
    """Weights of a layer."""

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor | None
    step: Tensor | None
    skip: Tensor | None


@dataclass(frozen=True)
class Case:
    """Some rows of a layer."""

    layer: Parts
    states: Tensor
    inputs: Tensor
    state_rows: Tensor
    rule: MambaRule | ConvRule | SelectiveRule

    def run(
        self, op: Callable[..., Tensor], product: Tensor, first: list[int], mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        """The result for tokens from position first[b] on."""
        rows, tokens, _ = product.shape
        at = (torch.tensor(first)[:, None] + torch.arange(tokens)).clamp_min(0).to(product.device)
        mask = torch.ones(rows, tokens, dtype=torch.bool) if mask is None else mask
        where = self.states, self.inputs, self.state_rows, at, mask.to(product.device)
        return op(product, self.layer, *where, self.rule, **more)


def a_case(kind: str, dtype: torch.dtype, device: str, rows: int = 3) -> Case:
    rule, generator = RULES[kind], torch.Generator().manual_seed(rows)

    def normal(*shape: int, std: float = 0.5) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    conv, bias = normal(rule.channels, 1, rule.width).to(dtype), normal(rule.channels).to(dtype)
    heads: list[Tensor | None] = [normal(rule.heads) for _ in range(3)] if isinstance(rule, MambaRule) else [None] * 3
    if isinstance(rule, SelectiveRule):
        heads = [normal(*shape) for shape in (rule.state_shape, rule.state_shape[:1], rule.state_shape[:1])]
    layer = Parts(conv, None if kind == "wide" else bias, *heads)
    states = normal(rows + 1, SLOTS, *rule.state_shape)
    inputs = normal(rows + 1, SLOTS + rule.tail, rule.channels).to(dtype)
    return Case(layer, states, inputs, torch.arange(rows, 0, -1, device=device), rule)


def a_product(kind: str, rows: int, tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rule = RULES[kind]
    more = 2 * rule.state_dim + rule.channels if isinstance(rule, SelectiveRule) else 0
    return torch.randn(rows, tokens, rule.rows + more, generator=generator).to(dtype).to(device)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # sums over a state in another order, and exp by other formulas: some roundings
    eps = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def test_the_definition_of_mamba_is_that_of_transformers() -> None:
    """The convolution of torch, and the chunks of the module of Bamba."""
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    case, tokens = a_case("mamba", F32, "cpu", 1), 21
    product, layer = a_product("mamba", 1, tokens, F32, "cpu"), case.layer
    assert layer.decay is not None
    found = case.run(reference.mamba, product, [0])
    given = product[..., MAMBA.values : MAMBA.values + MAMBA.channels].transpose(1, 2)
    mixed = F.conv1d(given, layer.conv, layer.conv_bias, padding=MAMBA.tail, groups=MAMBA.channels)[..., :tokens]
    x, b, c = F.silu(mixed).transpose(1, 2).split([MAMBA.values, MAMBA.shared, MAMBA.shared], dim=-1)
    wanted = mamba2_chunk_scan(
        x.unflatten(-1, (MAMBA.heads, -1)),
        product[..., -MAMBA.heads :],
        -torch.exp(layer.decay),
        b.unflatten(-1, (MAMBA.groups, -1)),
        c.unflatten(-1, (MAMBA.groups, -1)),
        chunk_size=8,
        D=layer.skip,
        dt_bias=layer.step,
        dt_softplus=True,
        dt_limit=(MAMBA.least_step, MAMBA.most_step),
    )
    torch.testing.assert_close(found, wanted.flatten(2), rtol=1e-5, atol=1e-5)


def test_the_definition_of_mamba_1_is_that_of_transformers() -> None:
    """The convolution of torch, and the scan of the module of Jamba."""
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    case, product, rule = a_case("selective", F32, "cpu", 1), a_product("selective", 1, 9, F32, "cpu"), SELECTIVE
    assert case.layer.decay is not None
    x, z, b, c, steps = product.transpose(1, 2).split(
        [*[rule.channels] * 2, *[rule.state_dim] * 2, rule.channels], dim=1
    )
    mixed = F.conv1d(x, case.layer.conv, case.layer.conv_bias, padding=rule.tail, groups=rule.channels)[..., :9]
    wanted = mamba_selective_scan(
        *(F.silu(mixed), steps, -torch.exp(case.layer.decay), b, c),
        D=case.layer.skip,
        z=z,
        delta_bias=case.layer.step,
        delta_softplus=True,
    )
    found = case.run(OPS["selective"][1], product, [0])
    found = reference.mamba_norm(found, z.transpose(1, 2), None, 1e-6, rule)
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_the_definition_of_the_short_convolution_is_that_of_torch() -> None:
    case, product = a_case("conv", F32, "cpu", 1), a_product("conv", 1, 9, F32, "cpu")
    b, c, x = product.transpose(1, 2).chunk(3, dim=1)
    mixed = F.conv1d(b * x, case.layer.conv, case.layer.conv_bias, padding=CONV.tail, groups=CONV.channels)[..., :9]
    found = case.run(reference.short_conv, product, [0])
    torch.testing.assert_close(found, (c * mixed).transpose(1, 2), rtol=1e-6, atol=1e-6)


# first position of each row, tokens, masked ones at the beginning and at the end of each row
CASES: dict[str, tuple[list[int], int, list[int], list[int]]] = {
    "plain": ([0, 7, 30], 1, [0, 0, 0], [0, 0, 0]),
    "drafts": ([0, 1, 30], 3, [0, 2, 0], [0, 0, 0]),
    "idle": ([9, 12, -1], 3, [0, 3, 1], [0, 0, 0]),
    "context's end": ([4, 5, 6], 3, [0, 0, 0], [2, 1, 0]),
    "prompt": ([0, 64, 2], 17, [0, 0, 0], [0, 6, 15]),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *((kind, name, F32) for name in CASES for kind in ("mamba", "conv")),
        *(("selective", name, F32) for name in ("plain", "idle", "prompt")),
        ("selective", "drafts", BF16),
        *((kind, name, BF16) for name in ("drafts", "prompt") for kind in ("wide", "conv")),
        *(("broad", "prompt", dtype) for dtype in (BF16, F16)),
        ("mamba", "prompt", F16),
    ],
)
def test_a_kernel_is_its_definition(kind: str, name: str, dtype: torch.dtype, device: str) -> None:
    starts, tokens, before, behind = CASES[name]
    product, at = a_product(kind, 3, tokens, dtype, device), torch.arange(tokens)
    mask = (at >= torch.tensor(before)[:, None]) & (at < tokens - torch.tensor(behind)[:, None])
    mine, wanted = a_case(kind, dtype, device), a_case(kind, dtype, device)
    kernel, definition = OPS[kind]
    found, expected = mine.run(kernel, product, starts, mask), wanted.run(definition, product, starts, mask)
    close(found[mask], expected[mask], dtype)
    assert not found[~mask].any()
    close(mine.states, wanted.states, dtype)
    # the inputs of a short convolution are a product, which Triton's interpreter rounds otherwise
    close(mine.inputs, wanted.inputs, dtype) if kind == "conv" else assert_equal(mine.inputs, wanted.inputs)
    fresh = a_case(kind, dtype, device)
    assert torch.equal(mine.states[0], fresh.states[0]), "nobody's row"
    assert not torch.equal(mine.inputs, fresh.inputs)


BOTH = pytest.mark.parametrize("which", [0, 1], ids=["kernel", "definition"])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["mamba", "conv", "selective"])
@BOTH
def test_bits_depend_on_the_tokens_before_alone(which: int, kind: str, device: str) -> None:
    """Three rows with drafts, the same in plain steps, one row at a time, and as prompts."""
    op, product, start = OPS[kind][which], a_product(kind, 3, 4, BF16, device), [0, 31, 8]
    together, apart, alone, prompt = (a_case(kind, BF16, device) for _ in range(4))
    whole = torch.cat(
        [
            together.run(op, product[:, :3].contiguous(), start),
            together.run(op, product[:, 3:].contiguous(), [first + 3 for first in start]),
        ],
        dim=1,
    )
    for t in range(4):
        one = apart.run(op, product[:, t : t + 1].contiguous(), [first + t for first in start])
        assert torch.equal(one[:, 0], whole[:, t])
    for row in range(3):
        mine = replace(alone, state_rows=alone.state_rows[row : row + 1])
        for cut in (slice(0, 3), slice(3, 4)):
            found = mine.run(op, product[row : row + 1, cut].contiguous(), [start[row] + cut.start])
            assert torch.equal(found[0], whole[row, cut])
    # prompts of Mamba-2 are products in chunks, by the kernels
    same = assert_equal if op is not mamba else partial(close, dtype=BF16)
    same(prompt.run(op, product, start), whole)
    for other in (apart, alone):
        assert torch.equal(other.states, together.states)
        assert torch.equal(other.inputs, together.inputs)
    assert torch.equal(prompt.inputs, together.inputs)
    for row, first in zip((3, 2, 1), start, strict=True):
        newest = (first + 3) % SLOTS
        same(prompt.states[row, newest], together.states[row, newest])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["wide", "selective"])
def test_the_tile_of_a_state_changes_no_bit(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of other sizes have other tiles. The smallest one here has several programs for a head."""
    product, found = a_product(kind, 3, 2, BF16, device), []
    for tile in (512, 4096):
        monkeypatch.setattr(state_space, "_TILES", (tile,))
        case = a_case(kind, BF16, device)
        found.append((case.run(OPS[kind][0], product, [0, 7, 30]), case.states))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["mamba", "conv"])
@BOTH
def test_refused_tokens_leave_nothing(which: int, kind: str, device: str) -> None:
    """Three tokens at once of which two count, then the next three: as one after the other without the refused one."""
    op, case, plain = OPS[kind][which], a_case(kind, F32, device, 1), a_case(kind, F32, device, 1)
    true, wrong = (a_product(kind, 1, 5, F32, device, seed) for seed in (1, 2))
    case.run(op, torch.cat([true[:, :2], wrong[:, :1]], dim=1), [0])
    second = case.run(op, true[:, 2:].contiguous(), [2])
    for t in range(5):
        last = plain.run(op, true[:, t : t + 1].contiguous(), [t])
    assert torch.equal(second[:, -1], last[:, 0])
    assert torch.equal(case.states[1, 4 % SLOTS], plain.states[1, 4 % SLOTS])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["mamba", "conv", "selective"])
@BOTH
def test_the_state_after_a_chunk_is_kept(which: int, kind: str, device: str) -> None:
    """It is the state of a prompt that ends there, with its newest inputs. A pass that ends before keeps none."""
    op, rule, start, tokens, after = OPS[kind][which], RULES[kind], 61, 9, 64
    product = a_product(kind, 1, tokens, F32, device)
    short, plain = (a_case(kind, F32, device, 1) for _ in range(2))

    def room(at: int) -> KeptState:
        inputs = torch.full((rule.width, rule.channels), -7.0, device=device)
        return KeptState(torch.tensor([at], device=device), torch.full(rule.state_shape, -7.0, device=device), inputs)

    for at in (after, start, start + tokens + 1):
        case, kept = a_case(kind, F32, device, 1), room(at)
        found = case.run(op, product, [start], kept=kept)
        assert torch.equal(found, plain.run(op, product, [start])), "what is kept changes nothing"
        plain = a_case(kind, F32, device, 1)
        if at != after:
            assert bool((kept.state == -7).all())
            assert bool((kept.inputs == -7).all())
            continue
        for t in range(after - start):
            short.run(op, product[:, t : t + 1].contiguous(), [start + t])
        same = assert_equal if op is not mamba else partial(close, dtype=F32)
        same(kept.state, short.states[1, (after - 1) % SLOTS])
        for position in range(after - rule.tail, after):
            assert torch.equal(kept.inputs[position % rule.width], short.inputs[1, position % short.inputs.shape[1]])


# of a prompt in chunks of 64: first position, tokens, masked ones at the beginning and at the end
PROMPTS = {"from 0": (0, 150, 0, 0), "later": (64, 70, 0, 5), "inside": (30, 40, 0, 0), "masked": (60, 9, 3, 2)}
# operations with chunks, and where they run
IN_CHUNKS = [pytest.param(in_chunks, "cpu", id="cpu"), pytest.param(mamba, "cpu", id="kernel")]
IN_CHUNKS += [pytest.param(mamba, "cuda", id="kernel-cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("op", "device"), IN_CHUNKS)
@pytest.mark.parametrize(("kind", "dtype"), [("mamba", F32), ("mamba", BF16), ("wide", F32)])
@pytest.mark.parametrize("name", PROMPTS)
def test_chunks_of_a_prompt_are_the_definition(
    name: str, kind: str, dtype: torch.dtype, op: Callable[..., Tensor], device: str
) -> None:
    start, tokens, before, behind = PROMPTS[name]
    product, at = a_product(kind, 2, tokens, dtype, device), torch.arange(tokens)
    mask = ((at >= before) & (at < tokens - behind)).repeat(2, 1)
    mine, wanted = a_case(kind, dtype, device, 2), a_case(kind, dtype, device, 2)
    found, expected = (
        case.run(each, product, [start, start], mask) for case, each in ((mine, op), (wanted, reference.mamba))
    )
    # sums of up to 64 terms, whose products of decays are one exp: more roundings than `close` allows
    eps = 32 * torch.finfo(dtype).eps if dtype is BF16 else 1e-5
    torch.testing.assert_close(found[mask], expected[mask], rtol=eps, atol=eps)
    # a kernel's convolution may round to another bf16
    eps = 1e-5 if op is in_chunks else eps
    torch.testing.assert_close(mine.states, wanted.states, rtol=eps, atol=eps)
    assert torch.equal(mine.inputs, wanted.inputs)
    assert op is in_chunks or not found[~mask].any()


@pytest.mark.parametrize(
    ("kind", "dtype", "op", "device"),
    [
        *((kind, F32, in_chunks, "cpu") for kind in ("mamba", "wide")),
        ("small", BF16, mamba, "cpu"),
        *(
            pytest.param(kind, dtype, mamba, "cuda", marks=pytest.mark.gpu)
            for kind in ("mamba", "wide", "broad")
            for dtype in (F32, BF16, F16)
        ),
    ],
)
def test_bits_of_a_prompt_do_not_depend_on_its_passes_or_on_later_tokens(
    kind: str, dtype: torch.dtype, op: Callable[..., Tensor], device: str
) -> None:
    product, cuts = a_product(kind, 1, 200, dtype, device), ([200], [64, 128, 8], [192, 8])
    cases = [a_case(kind, dtype, device, 1) for _ in range(1 + len(cuts))]
    found = []
    for case, cut in zip(cases, cuts, strict=False):
        pieces, start = [], 0
        for tokens in cut:
            pieces.append(case.run(op, product[:, start : start + tokens].contiguous(), [start]))
            start += tokens
        found.append(torch.cat(pieces, dim=1))
    for other, case in zip(found[1:], cases[1:], strict=False):
        assert torch.equal(other, found[0])
        assert torch.equal(case.states[1, 199 % SLOTS], cases[0].states[1, 199 % SLOTS])
    inside, parts = (a_case(kind, dtype, device, 1) for _ in range(2))
    whole = inside.run(op, product[:, 30:100].contiguous(), [30])
    both = [parts.run(op, product[:, a:b].contiguous(), [a]) for a, b in ((30, 64), (64, 100))]
    assert torch.equal(torch.cat(both, dim=1), whole)
    assert torch.equal(cases[-1].run(op, product[:, :90].contiguous(), [0]), found[0][:, :90])


@pytest.mark.parametrize(("op", "device"), IN_CHUNKS)
@pytest.mark.parametrize("kind", ["small"])
def test_a_state_inside_a_prompt_in_chunks_is_that_of_a_shorter_one(
    kind: str, op: Callable[..., Tensor], device: str
) -> None:
    rule, product = RULES[kind], a_product(kind, 1, 150, F32, device)
    long, short = (a_case(kind, F32, device, 1) for _ in range(2))
    inputs = torch.zeros(rule.width, rule.channels, device=device)
    kept = KeptState(torch.tensor([128], device=device), torch.zeros(rule.state_shape, device=device), inputs)
    long.run(op, product, [0], kept=kept)
    short.run(op, product[:, :128].contiguous(), [0])
    assert torch.equal(kept.state, short.states[1, 127 % SLOTS])
    for position in range(128 - rule.tail, 128):
        assert torch.equal(inputs[position % rule.width], short.inputs[1, position % short.inputs.shape[1]])


@pytest.mark.parametrize("device", devices())
def test_a_prompt_has_its_bits_beside_other_prompts(device: str) -> None:
    """Three prompts of one pass, with other beginnings and lengths."""
    product, starts, at = a_product("small", 3, 66, BF16, device), [64, -12, 192], torch.arange(66)
    mask = (at >= torch.tensor([0, 12, 0])[:, None]) & (at < torch.tensor([66, 66, 33])[:, None])
    together, alone = (a_case("small", BF16, device) for _ in range(2))
    found = together.run(mamba, product, starts, mask)
    for row, fed in enumerate(mask):
        mine = replace(alone, state_rows=alone.state_rows[row : row + 1])
        one = mine.run(mamba, product[row : row + 1, fed].contiguous(), [max(starts[row], 0)])
        assert torch.equal(one[0], found[row, fed])
    assert torch.equal(alone.states, together.states)
    assert torch.equal(alone.inputs, together.inputs)


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        *((dtype, "cpu") for dtype in (BF16, F16, F32)),
        *(pytest.param(dtype, "cuda", marks=pytest.mark.gpu) for dtype in (BF16, F16, F32)),
    ],
)
def test_a_state_after_a_prompt_has_the_precision_of_its_steps(dtype: torch.dtype, device: str) -> None:
    """Of fp32 also in 16 bits, and also where most of a state fades within a chunk: against fp64."""
    tokens, rule = 45, MAMBA._replace(groups=1, least_step=0.0, most_step=math.inf)
    case, product = a_case("mamba", dtype, device, 1), a_product("mamba", 1, 45, dtype, device)
    mixed = torch.randn(1, tokens, rule.channels, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    product = product[..., : rule.rows].contiguous()
    product[:, :30, -rule.heads :] = 40.0
    product[:, 30:, -rule.heads :] = -4.0
    decay, step, skip = torch.full((rule.heads,), 4.0), torch.tensor([-0.5, 0.25]), torch.zeros(rule.heads)
    at = torch.arange(28, 28 + tokens, device=device)[None]  # a chunk begins nine tokens before the end
    slots = StateSlots(case.states, case.inputs, case.state_rows, at, torch.ones_like(at, dtype=torch.bool))
    weights = ScanWeights(*(each.to(device) for each in (decay, step, skip)))
    sizes = F.softplus(product[0, :, -rule.heads :].double().cpu() + step)
    x, b, c = mixed[0].double().cpu().split([rule.values, rule.shared, rule.shared], dim=-1)
    x = x.unflatten(-1, (rule.heads, -1))
    wanted, outs = torch.zeros(rule.state_shape, dtype=torch.float64), []
    for t in range(tokens):
        faded = wanted * torch.exp(-decay.double().exp() * sizes[t])[:, None, None]
        wanted = faded + (sizes[t, :, None] * x[t])[..., None] * b[t]
        outs.append((wanted @ c[t]).flatten())
    # a decay has an error of fp32 in its logarithm, here of about 1; its steps multiply 15 such errors
    plan = plan_of(rule, dtype)
    assert plan is not None
    chunked = partial(mamba_in_chunks, plan=plan)
    for scan, most in ((chunked, 1e-6), (scanned, 4e-6)):
        out = scan(mixed, product, weights, slots, rule, None)[0].double().cpu()
        found = case.states[1, int(at[0, -1]) % SLOTS].double().cpu()
        assert float((found - wanted).abs().max() / wanted.abs().max()) < most
        # the last rounding, and before it factors with an error of 2^-17 if they are multiplied in 16 bits
        before = 2.0**-15 if dtype is not F32 and scan is chunked else 4e-6
        for at_once in (slice(30, 36), slice(36, tokens)):  # outputs of a like size
            exact = torch.stack(outs)[at_once]
            bound = torch.finfo(dtype).eps * exact.abs() + before * exact.abs().max()
            assert bool(((out[at_once] - exact).abs() <= bound).all())


def test_prompts_go_token_by_token_where_chunks_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of(MAMBA._replace(state_dim=NARROW), F32) is not None
    assert plan_of(MAMBA._replace(state_dim=NARROW + 1), F32) is None
    monkeypatch.setattr(state_space, "plan_of", lambda rule, dtype: None)
    monkeypatch.setattr(state_space, "mamba_in_chunks", None)
    product = a_product("mamba", 2, 40, F32, "cpu")
    mine, wanted = a_case("mamba", F32, "cpu", 2), a_case("mamba", F32, "cpu", 2)
    close(mine.run(mamba, product, [0, 8]), wanted.run(reference.mamba, product, [0, 8]), F32)
    close(mine.states, wanted.states, F32)


def test_a_step_on_the_cpu_goes_token_by_token() -> None:
    product = a_product("mamba", 3, SLOTS, F32, "cpu")
    mine, wanted = a_case("mamba", F32, "cpu"), a_case("mamba", F32, "cpu")
    assert torch.equal(mine.run(in_chunks, product, [0, 7, 63]), wanted.run(reference.mamba, product, [0, 7, 63]))
    assert torch.equal(mine.states, wanted.states)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("norm", ["gate_first", "norm_first", None])
def test_the_norm_is_its_definition(norm: Any, dtype: torch.dtype, device: str) -> None:
    rule, product = MAMBA._replace(norm=norm), a_product("mamba", 2, 3, dtype, device)
    x, gate = 3 * product[..., : rule.values].contiguous(), product[..., rule.values : 2 * rule.values]
    weight = None if norm is None else 1 + product[0, 0, : rule.values]
    found = mamba_norm(x, gate, weight, 1e-6, rule)
    close(found, reference.mamba_norm(x, gate, weight, 1e-6, rule), dtype)
    for op in (mamba_norm, reference.mamba_norm):
        one = op(x[1:, 2:].contiguous(), gate[1:, 2:], weight, 1e-6, rule)
        assert torch.equal(one[0, 0], op(x, gate, weight, 1e-6, rule)[1, 2])
    groups = (x.float() * F.silu(gate.float()) if norm == "gate_first" else x.float()).unflatten(-1, (rule.groups, -1))
    wanted = groups if weight is None else F.rms_norm(groups, groups.shape[-1:], eps=1e-6)
    wanted = wanted.flatten(-2) * (1 if weight is None else weight.float())
    close(found, (wanted if norm == "gate_first" else wanted * F.silu(gate.float())).to(dtype), dtype)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    case, product = a_case("mamba", F32, "cpu", 1), a_product("mamba", 1, 1, F32, "cpu")
    with pytest.raises(ValueError, match="product is"):
        case.run(mamba, product[..., 1:], [0])
    with pytest.raises(ValueError, match="states is"):
        replace(case, states=case.states.half()).run(mamba, product, [0])
    selective, mixed = a_case("selective", F32, "cpu", 1), torch.zeros(1, 1, SELECTIVE.channels + 24)
    where = selective.layer, selective.states, selective.state_rows, torch.zeros(1, 1, dtype=torch.int64)
    rest = torch.ones(1, 1, dtype=torch.bool), SELECTIVE
    with pytest.raises(ValueError, match="mixed is"):
        selective_scan(mixed.double(), mixed, *where, *rest)
    with pytest.raises(ValueError, match="steps is"):
        selective_scan(mixed, mixed, *where, *rest)
    with pytest.raises(ValueError, match="skip is None"):
        replace(case, layer=replace(case.layer, skip=None)).run(mamba, product, [0])
    kept = KeptState(torch.tensor([64]), case.states[0, 0], case.inputs[0, : MAMBA.width])
    with pytest.raises(ValueError, match="a state is kept of a pass over a prompt"):
        case.run(mamba, product, [0], kept=kept)
    x = product[..., : MAMBA.values]
    with pytest.raises(ValueError, match="gate is"):
        mamba_norm(x.contiguous(), x.to(BF16), None, 1e-6, MAMBA)
