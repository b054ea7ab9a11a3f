"""What the plan says before anything is allocated is what is allocated."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator, generator
from fastspec.engine import memory
from fastspec.engine.memory import free_bytes, release_unused
from fastspec.engine.prompt_passes import PrefillSlot
from fastspec.state import BUFFERS, IDLE, DecodeState, StateSizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = [
    StateSizes(batch=1, max_drafts=0, max_length=1, pages_per_row=1, vocab_size=1),
    StateSizes(batch=1, max_drafts=3, max_length=40, pages_per_row=2, vocab_size=7),
    StateSizes(batch=5, max_drafts=8, max_length=100, pages_per_row=7, vocab_size=300),
    StateSizes(batch=5, max_drafts=8, max_length=100, pages_per_row=7, vocab_size=300, keep_draft_probs=False),
]


def allocated(sizes: StateSizes) -> DecodeState:
    return DecodeState.allocate(device=CPU, **asdict(sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_planned_bytes_are_allocated_bytes(sizes: StateSizes) -> None:
    state = allocated(sizes)
    assert state.nbytes == sizes.nbytes
    slot = PrefillSlot.allocate(state)
    assert slot.state.nbytes * sizes.batch == sizes.nbytes


def test_reset_gives_back_what_was_allocated() -> None:
    fresh, used = allocated(SIZES[2]), allocated(SIZES[2])
    for name in BUFFERS:
        getattr(used, name).fill_(1)
    used.reset()
    again = {name for name in BUFFERS if torch.equal(getattr(used, name), getattr(fresh, name))}
    assert {"finish", "lengths", "limits", "draft_lengths", "block_table", "stop_ids", "temperature"} <= again
    assert bool((used.finish == IDLE).all())


def test_a_prefill_slot_takes_what_a_prompts_pass_reads() -> None:
    state = allocated(SIZES[2])
    for name in BUFFERS:
        getattr(state, name)[3].fill_(1)
    slot = PrefillSlot.allocate(state)
    before = {name: getattr(slot.state, name).clone() for name in BUFFERS}
    slot.enter(state, 3, start=4)
    changed = {name for name in BUFFERS if not torch.equal(getattr(slot.state, name), before[name])}
    assert changed == {"tokens", "finish", "block_table", "draft_lengths", "state_rows"}  # its length was 1 already
    assert slot.start.tolist() == [4]


def test_every_field_is_described() -> None:
    assert list(BUFFERS) == [field.name for field in fields(DecodeState)]
    for name, buffer in BUFFERS.items():
        assert buffer.shape.startswith("B"), name
        assert buffer.written_by, name
        assert buffer.meaning, name


@pytest.fixture
def driver_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that release or count memory, in their order, of a GPU with 3 of 4 GiB cached but unused."""
    calls: list[str] = []

    def count(device: torch.device) -> tuple[int, int]:
        calls.append("count")
        return 2**30 if "release" not in calls else 2**32, 2**32

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("release"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", count)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(memory.gc, "collect", lambda: calls.append("collect"))
    return calls


def test_cached_blocks_are_released_before_free_memory_is_counted(driver_calls: list[str]) -> None:
    assert free_bytes(CUDA) == 2**32
    assert driver_calls == ["release", "count"]


def test_objects_are_collected_before_their_memory_is_released(driver_calls: list[str]) -> None:
    release_unused(CUDA)
    assert driver_calls == ["collect", "release"]


def test_nothing_is_released_where_nothing_is_cached(driver_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing waits for the GPU."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    assert free_bytes(CUDA) == 2**30
    assert driver_calls == ["count"]
    release_unused(CPU)
    assert driver_calls == ["count"]


def test_closing_releases_memory_after_the_engine_is_gone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    made = FastSpecGenerator(directory, device="cpu", max_length=64, max_batch_size=1, progress=False)
    lengths = weakref.ref(made._open().scheduler.engine.state.lengths)

    def released(device: torch.device) -> None:
        gc.collect()
        found.append(lengths() is None)

    monkeypatch.setattr(generator, "release_unused", released)
    made.close()
    assert found == [True]


def live_tensors() -> dict[int, torch.Tensor]:
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"target_quantization": "int8"}], ids=str)
def test_a_closed_generator_holds_no_tensors(directory: Path, options: dict[str, str]) -> None:
    """Neither by itself, nor in cycles: the next model may be loaded before Python looks for these."""
    gc.collect()
    before = live_tensors()
    gc.disable()
    try:
        with FastSpecGenerator(directory, device="cpu", max_length=64, progress=False, **options) as made:  # type: ignore[arg-type]
            made.generate([[1, 2, 3]], max_new_tokens=4)
            assert live_tensors().keys() - before.keys()
        assert not [each.shape for key, each in live_tensors().items() if key not in before], made
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_closed_generator_leaves_its_memory_to_the_next(directory: Path) -> None:
    """The first generator also makes what stays until the process ends: CUDA's context, kernels, a cuBLAS work area.

    The second one finds these, and takes the same stream. So only the driver's granule of 2 MiB may differ, for each
    of its pools: small and large blocks of torch, and the instances of captured graphs.
    """
    free: list[int] = []
    held: list[int] = []
    for _ in range(3):
        with FastSpecGenerator(directory, device="cuda", max_length=512, progress=False) as made:
            made.generate([[1, 2, 3]], max_new_tokens=4)
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
        held.append(torch.cuda.memory_allocated())
        del made
        gc.collect()
        assert torch.cuda.memory_allocated() == held[-1]  # the closed generator held nothing while it was there
    assert free[0] - free[-1] <= 3 * 2 * 2**20
