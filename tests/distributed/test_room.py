"""The memory that GPUs share is in the plan of each rank, to the byte."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec.config import Config
from fastspec.distributed import devices
from fastspec.distributed.exchange import Alone, RankSums
from fastspec.distributed.world import World
from fastspec.engine.settings import settings_of
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kernels.room import BLOCK, EMPTY, MAX_ELEMENTS, elements_of, room_bytes, takes_prompts
from fastspec.models.checkpoints.resolve import resolve

MIB = 2**20
HIDDEN, VOCAB, PROMPT = 4096, 128256, 2048  # of an 8B target, and its longest pass over a prompt


def of_8b(ranks: int, rows: int) -> tuple[int, int, int]:
    return ranks, rows * 5 * max(HIDDEN, VOCAB // ranks), PROMPT * HIDDEN


@pytest.mark.parametrize(
    ("ranks", "rows", "mib"),
    [
        (1, 32, 0),
        (2, 1, 128),  # a prompt's sum, in two halves for two ranks
        (2, 32, 158),  # logits of 160 rows
        (4, 8, 256),
        (8, 8, 512),
    ],
)
def test_the_room_of_an_8b(ranks: int, rows: int, mib: int) -> None:
    assert room_bytes(*of_8b(ranks, rows)) == mib * MIB


def test_prompts_have_a_room_and_what_is_larger_goes_by_nccl() -> None:
    assert takes_prompts(PROMPT * HIDDEN)
    assert not takes_prompts(MAX_ELEMENTS + 1)
    assert elements_of(1, PROMPT * HIDDEN) == PROMPT * HIDDEN
    assert elements_of(1, MAX_ELEMENTS + 1) == BLOCK
    assert elements_of(3 * MAX_ELEMENTS, 0) == MAX_ELEMENTS


@pytest.mark.parametrize("given", [of_8b(2, 1), of_8b(2, 32), of_8b(8, 8), (4, 77, 0)])
def test_what_is_allocated_is_what_is_planned(given: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, step, prompts = given
    taken: list[int] = []

    def shared(size: int, word: int, everyone: Any, rank: int) -> SimpleNamespace:
        assert (word, rank) == (EMPTY, 0)
        taken.append(size)
        return SimpleNamespace(addresses=[0] * ranks)

    monkeypatch.setattr(devices, "SharedMemory", shared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    world = World.alone()
    world.size = ranks
    elements = elements_of(step, prompts)
    room = devices._shared(world, torch.device("cpu"), elements)
    assert room.elements == elements >= min(step, MAX_ELEMENTS)
    assert len(room.turns) * BLOCK == elements
    assert taken == [room_bytes(ranks, step, prompts)]


def test_sums_have_room_for_what_fits_and_is_faster_at_once() -> None:
    def asked(ranks: int, room: bool = True) -> RankSums:
        shared = SimpleNamespace(size=ranks, elements=100 * 4096) if room else None
        return RankSums(SimpleNamespace(room=shared))  # type: ignore[arg-type]

    assert asked(2).room_for(100 * 4096) is not None
    assert asked(2).room_for(100 * 4096 + 1) is None
    assert [asked(4).room_for(rows * 4096) is not None for rows in (20, 21)] == [True, False]
    assert asked(2, room=False).room_for(1) is None
    assert RankSums(Alone()).room_for(1) is None


def test_the_plan_of_a_rank_has_it_on_gpus_and_shortens_rows_by_it(pair: tuple[str, str]) -> None:
    target = resolve(pair[0], role="target")
    settings = settings_of(target, None, Config(device="cpu", max_length=100))
    alone = replace(settings.layout, ops=TORCH_OPS.replaced(name="triton"), chunks=(64, 2 * PROMPT))
    several = replace(alone, ranks=2)
    free = alone.plan(100, 0).total + 2 * MIB
    # 8 rows of 2 tokens at most, 64 logits of 128 a rank; a prompt of up to 100 tokens is a pass of 4096
    assert several.exchanged(100) == (8 * 2 * 64, 2 * PROMPT * 64)
    assert several.plan(100, free).exchange == 4 * MIB
    assert several.plan(100, free).total == alone.plan(100, free).total + 4 * MIB
    assert alone.largest_length(100, free) == 100
    assert several.largest_length(100, free) == 64, "whose prompts are passes of 64, with a smaller room"
    assert "exchange 0.004" in str(several.plan(100, free))
    assert "exchange" not in str(alone.plan(100, free))
    assert replace(several, ops=TORCH_OPS).plan(100, free).exchange == 0, "gloo keeps nothing"
