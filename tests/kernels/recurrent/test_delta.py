"""The gated delta rule and the gated norm are their definitions; a token's bits depend on what came before it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels import reference
from fastspec.shapes import DeltaRule
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.recurrent.dispatch import delta_rule
from fastspec.kernels.recurrent.gated_norm import gated, gated_norm
from fastspec.kernels.reference.recurrent import KeptState

RULE = DeltaRule(key_heads=2, value_heads=4, key_dim=16, value_dim=24, width=4)
WIDE = DeltaRule(key_heads=1, value_heads=2, key_dim=128, value_dim=40, width=3)  # a head in several programs
OF_CHANNELS = DeltaRule(key_heads=2, value_heads=2, key_dim=16, value_dim=24, width=4, by_channel=True)
RULES = {"head": RULE, "channel": OF_CHANNELS, "bounded": OF_CHANNELS._replace(floor=-5.0)}
DRAFTS = 4
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Parts:
    """Weights of a layer."""

    conv: Tensor
    decay: Tensor
    step: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Case:
    """Some rows of a layer."""

    layer: Parts
    states: Tensor
    inputs: Tensor
    state_rows: Tensor
    rule: DeltaRule = RULE

    def run(self, op: Callable[..., Tensor], product: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        where = self.states, self.inputs, self.state_rows, positions, mask
        return op(product, self.layer, *where, self.rule)

    def copy(self) -> Case:
        return replace(self, states=self.states.clone(), inputs=self.inputs.clone())


def a_case(dtype: torch.dtype, device: str, rows: int = 3, rule: DeltaRule = RULE) -> Case:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int, std: float = 0.5) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    layer = Parts(
        normal(rule.channels, 1, rule.width).to(dtype),
        normal(rule.value_heads),
        normal(rule.decays),
        (1 + normal(rule.value_dim)).to(dtype),
    )
    states = normal(rows + 1, DRAFTS + 1, rule.value_heads, rule.value_dim, rule.key_dim)
    inputs = normal(rows + 1, DRAFTS + rule.width, rule.channels).to(dtype)
    return Case(layer, states, inputs, torch.arange(rows, 0, -1, device=device), rule)


def a_product(rows: int, tokens: int, dtype: torch.dtype, device: str, seed: int = 0, rule: DeltaRule = RULE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, rule.rows, generator=generator).to(dtype).to(device)


def placed(first: list[int], tokens: int, device: str) -> Tensor:
    return (torch.tensor(first)[:, None] + torch.arange(tokens)).clamp_min(0).to(device)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    # sums over a key in another order, and exp by other formulas: some roundings
    eps = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


# first position of each row, tokens, masked ones at the beginning and at the end of each row
CASES: dict[str, tuple[list[int], int, list[int], list[int]]] = {
    "plain": ([0, 7, 30], 1, [0, 0, 0], [0, 0, 0]),
    "drafts": ([0, 1, 30], 5, [0, 0, 0], [0, 0, 0]),
    "idle": ([9, 12, 3], 3, [0, 3, 0], [0, 0, 0]),
    "a draft's first": ([-1, 2, 40], 2, [1, 0, 0], [0, 0, 0]),
    "context's end": ([4, 5, 6], 4, [0, 0, 0], [3, 1, 0]),
    "prompt": ([0, 64, 2], 13, [0, 0, 0], [0, 6, 11]),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *(("head", name, F32) for name in CASES),
        *((kind, name, BF16) for kind in ("head", "channel") for name in ("drafts", "prompt")),
        *((kind, name, F32) for kind in ("channel", "bounded") for name in ("plain", "idle", "prompt")),
    ],
)
def test_it_is_its_definition(kind: str, name: str, dtype: torch.dtype, device: str) -> None:
    (starts, tokens, before, behind), rule = CASES[name], RULES[kind]
    positions, product = placed(starts, tokens, device), a_product(3, tokens, dtype, device, rule=rule)
    at = torch.arange(tokens)
    mask = (at >= torch.tensor(before)[:, None]) & (at < tokens - torch.tensor(behind)[:, None])
    mask = mask.to(device)
    mine, wanted = (a_case(dtype, device, rule=rule) for _ in range(2))
    found = mine.run(delta_rule, product, positions, mask)
    expected = wanted.run(reference.delta_rule, product, positions, mask)
    close(found[mask], expected[mask], dtype)
    assert not found[~mask].any()
    close(mine.states, wanted.states, F32 if dtype is F32 else BF16)
    assert torch.equal(mine.inputs, wanted.inputs)
    fresh = a_case(dtype, device, rule=rule)
    assert torch.equal(mine.states[0], fresh.states[0]), "nobody's row"
    if tokens > 1:
        assert not torch.equal(mine.states, fresh.states)


@pytest.mark.parametrize("device", devices())
def test_a_wide_head_is_its_definition(device: str) -> None:
    mine, wanted = (a_case(BF16, device, 1, WIDE) for _ in range(2))
    product, at = a_product(1, 2, BF16, device, rule=WIDE), placed([5], 2, device)
    mask = torch.ones(1, 2, dtype=torch.bool, device=device)
    found = mine.run(delta_rule, product, at, mask)
    close(found, wanted.run(reference.delta_rule, product, at, mask), BF16)
    close(mine.states, wanted.states, BF16)
    assert torch.equal(mine.inputs, wanted.inputs)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", [RULE, WIDE, RULES["bounded"]], ids=["narrow", "wide", "bounded"])
@pytest.mark.parametrize("op", [delta_rule, reference.delta_rule], ids=["kernel", "definition"])
def test_bits_depend_on_the_tokens_before_alone(op: Callable[..., Tensor], rule: DeltaRule, device: str) -> None:
    """Three rows with drafts, the same in plain steps, and one row of them."""
    product, start = a_product(3, 3, BF16, device, rule=rule), [0, 31, 8]
    together, apart, alone = (a_case(BF16, device, 3, rule) for _ in range(3))
    everything = torch.ones(3, 3, dtype=torch.bool, device=device)
    whole = together.run(op, product, placed(start, 3, device), everything)
    for t in range(3):
        at = placed([first + t for first in start], 1, device)
        one = apart.run(op, product[:, t : t + 1].contiguous(), at, everything[:, :1].contiguous())
        assert torch.equal(one[:, 0], whole[:, t])
    for row in range(3):
        mine = replace(alone, state_rows=alone.state_rows[row : row + 1])
        found = mine.run(op, product[row : row + 1], placed(start[row : row + 1], 3, device), everything[:1])
        assert torch.equal(found[0], whole[row])
    for other in (apart, alone):
        assert torch.equal(other.states, together.states)
        assert torch.equal(other.inputs, together.inputs)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_never_draft_have_the_same_bits(dtype: torch.dtype, device: str) -> None:
    """Those of a generator without a drafter have room for one state."""
    product, one = a_product(1, 3, dtype, device, rule=WIDE), torch.ones(1, 1, dtype=torch.bool, device=device)
    drafting, case = (a_case(dtype, device, 1, WIDE) for _ in range(2))
    plain = replace(case, states=case.states[:, :1].contiguous(), inputs=case.inputs[:, : WIDE.width].contiguous())
    whole = drafting.run(delta_rule, product, placed([0], 3, device), one.repeat(1, 3))
    for t in range(3):
        found = plain.run(delta_rule, product[:, t : t + 1].contiguous(), placed([t], 1, device), one)
        assert torch.equal(found[0, 0], whole[0, t])
    assert torch.equal(plain.states[1, 0], drafting.states[1, 2])


SMALL = DeltaRule(key_heads=1, value_heads=2, key_dim=16, value_dim=16, width=4)
SMALL_CHANNELS = SMALL._replace(value_heads=1, by_channel=True)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("op", "rule"),
    [(delta_rule, SMALL), (reference.delta_rule, SMALL), (delta_rule, SMALL_CHANNELS)],
    ids=["kernel", "definition", "channel"],
)
def test_a_prompt_may_be_cut_on_the_grid_of_positions(op: Callable[..., Tensor], rule: DeltaRule, device: str) -> None:
    """Wherever a prompt begins and is cut, its chunks are those of the grid, and so are its bits."""
    start, tokens = 64, 150
    product = a_product(1, tokens, F32, device, rule=rule)
    everything = torch.ones(1, tokens, dtype=torch.bool, device=device)
    whole, pieces = (a_case(F32, device, 1, rule) for _ in range(2))
    at = placed([start], tokens, device)
    found = whole.run(op, product, at, everything)
    parts = [
        pieces.run(op, product[:, cut].contiguous(), at[:, cut].contiguous(), everything[:, cut].contiguous())
        for cut in (slice(0, 64), slice(64, tokens))
    ]
    assert torch.equal(torch.cat(parts, dim=1), found)
    newest = (start + tokens - 1) % 5
    assert torch.equal(pieces.states[1, newest], whole.states[1, newest])
    assert torch.equal(pieces.inputs, whole.inputs)


def kept_of(case: Case, at: int) -> KeptState:
    """Room for one state of a case."""
    rule, device = case.rule, case.states.device
    state = torch.full((rule.value_heads, rule.value_dim, rule.key_dim), -7.0, device=device)
    inputs = torch.full((rule.width, rule.channels), -7.0, dtype=case.inputs.dtype, device=device)
    return KeptState(torch.tensor([at], device=device), state, inputs)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("op", [delta_rule, reference.delta_rule], ids=["kernel", "definition"])
@pytest.mark.parametrize("behind", [64, 128, 192, 256, 0])
def test_the_state_behind_a_chunk_is_kept(op: Callable[..., Tensor], behind: int, device: str) -> None:
    """It is the state of a prompt that ends there, with its newest inputs; a pass that ends before keeps none."""
    start, tokens = 64, 160  # positions 64..223
    product = a_product(1, tokens, F32, device, rule=SMALL)
    everything = torch.ones(1, tokens, dtype=torch.bool, device=device)
    whole, short, plain = (a_case(F32, device, 1, SMALL) for _ in range(3))
    at = placed([start], tokens, device)
    kept = kept_of(whole, behind)
    where = whole.states, whole.inputs, whole.state_rows, at, everything
    found = op(product, whole.layer, *where, SMALL, kept)
    assert torch.equal(found, plain.run(op, product, at, everything)), "what is kept changes nothing"
    assert torch.equal(whole.states, plain.states)
    if not start < behind <= start + tokens:
        assert bool((kept.state == -7).all())
        assert bool((kept.inputs == -7).all())
        return
    cut = slice(0, behind - start)
    short.run(op, product[:, cut].contiguous(), at[:, cut].contiguous(), everything[:, cut].contiguous())
    assert torch.equal(kept.state, short.states[1, (behind - 1) % 5])
    for position in range(behind - SMALL.tail, behind):
        assert torch.equal(kept.inputs[position % SMALL.width], short.inputs[1, position % short.inputs.shape[1]])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("decay", [-9.0, 0.0, 4.0])
def test_chunks_of_like_keys_are_the_definition(decay: float, device: str) -> None:
    """Keys that are all one another, as of a token that repeats itself: powers of their products would overflow."""
    case = a_case(F32, device, 1, SMALL)
    layer = replace(case.layer, decay=torch.full_like(case.layer.decay, decay))
    mine, wanted = replace(case, layer=layer).copy(), replace(case, layer=layer).copy()
    product = a_product(1, 1, F32, device, rule=SMALL).repeat(1, 130, 1)
    product[..., -4:-2] = 3.0  # beta is nearly 1
    at, mask = placed([0], 130, device), torch.ones(1, 130, dtype=torch.bool, device=device)
    found, expected = (
        each.run(op, product, at, mask) for each, op in ((mine, delta_rule), (wanted, reference.delta_rule))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # sums over a chunk of 64 in another order
    torch.testing.assert_close(mine.states, wanted.states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("op", [delta_rule, reference.delta_rule], ids=["kernel", "definition"])
def test_refused_tokens_leave_nothing(op: Callable[..., Tensor], device: str) -> None:
    """Five tokens at once of which two count, then the next five: as one after the other without the refused ones."""
    case = a_case(F32, device, rows=1)
    plain = case.copy()
    true, wrong = (a_product(1, 9, F32, device, seed) for seed in (1, 2))
    one = torch.ones(1, 5, dtype=torch.bool, device=device)
    case.run(op, torch.cat([true[:, :2], wrong[:, :3]], dim=1), placed([0], 5, device), one)
    second = case.run(op, true[:, 2:7].contiguous(), placed([2], 5, device), one)
    for t in range(7):
        last = plain.run(op, true[:, t : t + 1].contiguous(), placed([t], 1, device), one[:, :1].contiguous())
    assert torch.equal(second[:, -1], last[:, 0])
    assert torch.equal(case.states[1, 6 % 5], plain.states[1, 6 % 5])


def test_the_definition_with_a_decay_of_each_element_is_that_of_transformers() -> None:
    """The loop over tokens of Kimi-Linear, over the convolution of torch."""
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule, tokens = OF_CHANNELS, 11
    case, product = a_case(F32, "cpu", 1, rule), a_product(1, tokens, F32, "cpu", rule=rule)
    at, mask = placed([0], tokens, "cpu"), torch.ones(1, tokens, dtype=torch.bool)
    given = product[..., : rule.channels].transpose(1, 2)
    mixed = F.silu(F.conv1d(given, case.layer.conv, padding=rule.tail, groups=rule.channels)[..., :tokens])
    q, k, v = mixed.transpose(1, 2).split([rule.keys, rule.keys, rule.values], dim=-1)
    b, a = product[..., -rule.value_heads - rule.decays :].split([rule.value_heads, rule.decays], dim=-1)
    g = -case.layer.decay.exp()[:, None] * F.softplus(a + case.layer.step).unflatten(-1, (rule.value_heads, -1))
    wanted, state = module.recurrent_kimi_delta_attention(
        *(each.unflatten(-1, (rule.value_heads, -1)) for each in (q, k, v)),
        g=g,
        beta=b.sigmoid(),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found = case.run(reference.delta_rule, product, at, mask)
    torch.testing.assert_close(found, wanted.flatten(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.states[1, (tokens - 1) % 5], state[0].transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("dtype", "activation"), [(F32, "silu"), (BF16, "silu"), (BF16, "sigmoid")])
def test_the_gated_norm_is_its_definition(dtype: torch.dtype, activation: Any, device: str) -> None:
    layer, product = a_case(dtype, device).layer, a_product(2, 3, dtype, device)
    x = 3 * product[..., : RULE.values].contiguous()
    gate = product[..., RULE.channels : RULE.channels + RULE.values]
    found = gated_norm(x, gate, layer.norm, 1e-6, activation)
    close(found, reference.gated_norm(x, gate, layer.norm, 1e-6, activation), dtype)
    one = gated_norm(x[1:, 2:].contiguous(), gate[1:, 2:], layer.norm, 1e-6, activation)
    assert torch.equal(one[0, 0], found[1, 2])
    heads = x.float().unflatten(-1, (-1, RULE.value_dim))
    normed = F.rms_norm(heads, heads.shape[-1:], eps=1e-6) * layer.norm.float()
    opened = gate.float().sigmoid() * (gate.float() if activation == "silu" else 1)
    close(found, (normed.flatten(-2) * opened).to(dtype), dtype)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gate_is_its_definition(dtype: torch.dtype, device: str) -> None:
    product = torch.randn(2, 3, 2 * 1500, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    x, gate = product[..., :1500].contiguous(), 3 * product[..., 1500:]
    found = gated(x, product[..., 1500:])
    close(found, reference.gated(x, product[..., 1500:]), dtype)
    assert not torch.equal(found, gated(x, gate))
    assert torch.equal(gated(x[1:, 2:].contiguous(), product[1:, 2:, 1500:])[0, 0], found[1, 2])


def test_what_it_cannot_take_is_refused() -> None:
    case, one = a_case(F32, "cpu", rows=1), torch.ones(1, 1, dtype=torch.bool)
    good: dict[str, Any] = {"product": a_product(1, 1, F32, "cpu"), "positions": placed([0], 1, "cpu"), "mask": one}
    with pytest.raises(ValueError, match="product is"):
        case.run(delta_rule, **{**good, "product": good["product"][..., 1:]})
    with pytest.raises(ValueError, match="write_mask is"):
        case.run(delta_rule, **{**good, "mask": one.int()})
    where = case.states, case.inputs, case.state_rows, good["positions"], one
    with pytest.raises(ValueError, match="a state is kept of a pass over a prompt"):
        delta_rule(good["product"], case.layer, *where, RULE, kept_of(case, 64))
    with pytest.raises(ValueError, match="states is"):
        replace(case, states=case.states.half()).run(delta_rule, **good)
    x = good["product"][..., : RULE.values]
    with pytest.raises(ValueError, match="gate is"):
        gated_norm(x.contiguous(), x.to(BF16), case.layer.norm, 1e-6)
    with pytest.raises(ValueError, match="x is"):
        gated_norm(x[..., 1:], x[..., 1:], case.layer.norm, 1e-6)
    with pytest.raises(ValueError, match="gate is"):
        gated(x.contiguous(), x[..., 1:])
