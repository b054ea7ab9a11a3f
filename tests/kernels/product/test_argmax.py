"""The largest logit of a packed head, against the logits of the packed product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import Gpu
from tests.helpers.devices import devices
from tests.kernels.product.test_dispatch import NAN, PDL, case, modules


def room(rows: int, device: str) -> torch.Tensor:
    """Just what a pick of so many rows needs."""
    return torch.zeros(rows + 1, dtype=torch.int64, device=device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("epilogue", ["plain", "norm"])
def test_is_the_largest_of_the_logits(epilogue: str, device: str) -> None:
    """Of exactly those that `packed_linear` gives, whatever the rows, and of as many of them as count."""
    vocab, k = 304, 384
    with modules(device) as packed:
        scratch = room(170, device)
        for rows in (1, 5, 13, 40, 64, 70, 170):
            x, weight, arguments = case(rows, vocab, k, torch.bfloat16, device, epilogue)
            logits = packed.dispatch.packed_linear(x, weight, **arguments, out_dtype=torch.float32, pdl=PDL[device])
            for limit in (1, 2, 100, vocab, 10**6):
                picked = packed.dispatch.packed_argmax(x, weight, limit, scratch, **arguments, pdl=PDL[device])
                assert torch.equal(picked, logits[:, :limit].argmax(-1)), (rows, limit)
                assert not scratch.any()
            for limit in (0, 1, 100, vocab):
                keys = torch.full((rows,), 7, dtype=torch.uint64, device=device)
                packed.dispatch.packed_argmax(x, weight, limit, scratch, **arguments, pdl=PDL[device], out=keys)
                assert torch.equal(keys.view(torch.int64), reference.keys_of(logits, limit)), (rows, limit)
                assert not scratch.any()


def lowest_of_the_largest(logits: torch.Tensor, ids: torch.Tensor, limit: int) -> list[int]:
    """The definition for one row and id after another."""
    counted = [(index, token) for index, token in enumerate(ids.tolist()) if token < limit]
    best = [max(float(row[index]) for index, _ in counted) for row in logits]
    return [
        min(token for index, token in counted if float(row[index]) == top)
        for row, top in zip(logits, best, strict=True)
    ]


@pytest.mark.parametrize("device", devices())
def test_logits_have_the_ids_of_another_vocabulary(device: str) -> None:
    """As a draft with another tokenizer has: some ids have no counterpart, and the order is another one."""
    vocab, k = 304, 384
    draw = torch.Generator().manual_seed(3)
    ids = torch.randperm(2 * vocab, generator=draw)[:vocab].to(device)
    ids[torch.randperm(vocab, generator=draw)[:60]] = 10**6  # without a counterpart, the largest logits among them
    with modules(device) as packed:
        scratch = room(70, device)
        for rows in (1, 5, 40, 70):
            x, weight, arguments = case(rows, vocab, k, torch.bfloat16, device, "norm")
            logits = packed.dispatch.packed_linear(x, weight, **arguments, out_dtype=torch.float32, pdl=PDL[device])
            for limit in (200, 2 * vocab):
                expected = lowest_of_the_largest(logits, ids, limit)
                given: dict[str, Any] = {**arguments, "pdl": PDL[device], "ids": ids}
                assert packed.dispatch.packed_argmax(x, weight, limit, scratch, **given).tolist() == expected
                own = torch.empty(rows, dtype=torch.int64, device=device)
                reference.pick(logits, limit, own, ids)
                assert own.tolist() == expected
                keys = torch.zeros(rows, dtype=torch.uint64, device=device)
                packed.dispatch.packed_argmax(x, weight, limit, scratch, **given, out=keys)
                assert torch.equal(keys.view(torch.int64), reference.keys_of(logits, limit, ids))
                assert not scratch.any()
        with pytest.raises(ValueError, match="ids has shape"):
            packed.dispatch.packed_argmax(x, weight, vocab, scratch, **{**given, "ids": ids[1:]})


def test_of_equal_logits_the_lowest_mapped_id_is_taken_and_nan_is_the_largest() -> None:
    ids = torch.tensor([9, 4, 7, 50])
    rows = torch.tensor([[1.0, 1.0, 0.0, 5.0], [0.0, NAN, NAN, 9.0], [-torch.inf] * 4, [-0.0, 0.0, -1.0, NAN]])
    out = torch.empty(4, dtype=torch.int64)
    reference.pick(rows, 50, out, ids)
    assert out.tolist() == [4, 4, 4, 4]
    halves = [reference.keys_of(rows[:, part], 50, ids[part]) for part in (slice(2), slice(2, 4))]
    assert reference.largest_of(halves, 0).tolist() == [4, 4, 4, 4], "of two ranks"
    x, head = rigged({0: 1.0, 1: 1.0, 2: 0.0}, "cpu")
    of_head = torch.full((160,), 50)
    of_head[:4] = ids
    with modules("cpu") as packed:
        picked = packed.dispatch.packed_argmax(x, head, 50, room(3, "cpu"), pdl=True, ids=of_head)
    assert picked.tolist() == [4] * 3


def test_the_ring_picks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 16 rows, of heads with many ids and with few; programs with fewer weight rows than fit."""
    with modules("cpu") as packed:
        scratch = room(200, "cpu")
        cases = [(17, 304, 1), (40, 304, 132), (64, 16384, 132), (70, 304, 132), (150, 304, 132), (200, 16384, 132)]
        for rows, many, multiprocessors in cases:
            monkeypatch.setattr(packed.plan, "MANY_WEIGHT_ROWS", many)
            gpu = Gpu((9, 0), multiprocessors)
            monkeypatch.setattr(packed.launch, "gpu_of", lambda device, gpu=gpu: gpu)
            tile = packed.plan.tile_of(304, 512, rows, gpu, True)
            assert isinstance(tile, packed.plan.Tma)
            assert (tile.weight_rows < tile.room) == (multiprocessors == 1 or rows == 70 or many > 304)
            x, weight, arguments = case(rows, 304, 512, torch.bfloat16, "cpu", "norm")
            logits = packed.dispatch.packed_linear(x, weight, **arguments, out_dtype=torch.float32, pdl=True)
            for limit in (1, 100, 304):
                picked = packed.dispatch.packed_argmax(x, weight, limit, scratch, **arguments, pdl=True)
                assert torch.equal(picked, logits[:, :limit].argmax(-1)), (rows, limit)
                assert not scratch.any()


def rigged(values: dict[int, float], device: str, vocab: int = 160) -> tuple[torch.Tensor, Weight]:
    """x [3, 128] of ones and a packed head whose logits are -1, or `values` by id."""
    head = torch.full((vocab, 128), 0.0)
    head[:, 0] = -1.0
    for token, value in values.items():
        head[token, 0] = value
    x = torch.ones(3, 128, dtype=torch.bfloat16, device=device)
    return x, Weight.pack(head.bfloat16().to(device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("values", "limit", "expected"),
    [
        ({}, 160, 0),
        ({40: 2.0, 41: 2.0, 150: 2.0}, 160, 40),
        ({150: 2.0, 151: 3.0}, 151, 150),
        ({7: 0.0, 3: -0.0}, 160, 3),
        ({9: -0.0, 12: 0.0}, 160, 9),
        ({20: float("inf"), 30: NAN, 99: NAN}, 160, 30),
        ({30: -NAN, 31: float("inf")}, 160, 30),
        ({0: -float("inf"), 1: -3e38}, 2, 1),
        ({0: -float("inf"), 1: -float("inf")}, 2, 0),
    ],
)
def test_ties_zeros_and_values_that_are_not_numbers(
    values: dict[int, float], limit: int, expected: int, device: str
) -> None:
    with modules(device) as packed:
        x, head = rigged(values, device)
        scratch = room(39, device)
        for rows in (x, x.repeat(5, 1), x.repeat(13, 1)):
            picked = packed.dispatch.packed_argmax(rows, head, limit, scratch, pdl=PDL[device])
            assert picked.tolist() == [expected] * len(rows)
            assert reference.packed_argmax(rows, head, limit).tolist() == [expected] * len(rows)
            keys = torch.zeros(len(rows), dtype=torch.uint64, device=device)
            packed.dispatch.packed_argmax(rows, head, limit, scratch, pdl=PDL[device], out=keys)
            assert reference.largest_of([keys.view(torch.int64)], 160).tolist() == [expected] * len(rows)
            assert not scratch.any()


@pytest.mark.parametrize("device", devices())
def test_writes_where_it_is_told_and_nowhere_else(device: str) -> None:
    with modules(device) as packed:
        x, weight, _ = case(6, 64, 128, torch.bfloat16, device)
        table = torch.full((6, 3), -7, dtype=torch.int64, device=device)
        scratch = room(6, device)
        expected = packed.dispatch.packed_argmax(x, weight, 64, scratch, pdl=PDL[device])
        given = packed.dispatch.packed_argmax(x, weight, 64, scratch, pdl=PDL[device], out=table[:, 1])
        assert given.data_ptr() == table[:, 1].data_ptr()
        assert torch.equal(table[:, 1], expected)
        assert (table[:, [0, 2]] == -7).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "k"), [(128256, 2048), (151936, 896), (128256, 4096)])
def test_the_argmax_over_heads_of_real_size_equals_the_definition(vocab: int, k: int) -> None:
    from fastspec.kernels.product.dispatch import packed_argmax, packed_linear

    scratch = room(200, "cuda")
    for rows in (1, 6, 13, 40, 64, 70, 160, 200):
        x, weight, arguments = case(rows, vocab, k, torch.bfloat16, "cuda", "norm")
        logits = packed_linear(x, weight, **arguments, out_dtype=torch.float32, pdl=False)
        for _ in range(20):
            assert torch.equal(packed_argmax(x, weight, vocab, scratch, **arguments, pdl=False), logits.argmax(-1))
        assert not scratch.any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"scratch": torch.zeros(3, dtype=torch.int64)}, r"wanted int64 \[4\] or longer"),
        ({"scratch": torch.zeros(65, dtype=torch.int32)}, r"wanted int64 \[4\] or longer"),
        ({"out": torch.zeros(2, dtype=torch.int64)}, "out is"),
        ({"out": torch.zeros(3, dtype=torch.int32)}, "out is"),
        ({"x": torch.zeros(1, 3, 128, dtype=torch.bfloat16)}, "must be"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], match: str) -> None:
    with modules("cpu") as packed:
        x, head = rigged({}, "cpu")
        given = {"x": x, "weight": head, "limit": 5, "scratch": room(3, "cpu")}
        with pytest.raises(ValueError, match=match):
            packed.dispatch.packed_argmax(**{**given, **change}, pdl=False)
