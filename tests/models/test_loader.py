"""Weights that are filled later, by one thread or by several: the same as those copied at once."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.errors import CheckpointError
from fastspec.kernels.common.rounding import FORMATS
from fastspec.kernels.select import ops_for
from fastspec.models.checkpoints import weight_loader
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import allocate_weights, load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.weight_loader import Loader
from tests.helpers.checkpoints import make_checkpoint
from tests.models.test_weights import CPU, GATE, rewrite, tensors_of

CUDA = torch.device("cuda")


def pending_of(directory: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    checkpoint = resolve(directory, role="target")
    return allocate_weights(checkpoint, dtype=dtype, device=device, progress=False, **options)


def test_nothing_is_read_before_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama2")  # its head is no second name of its embedding
    reads: list[tuple[str, ...]] = []
    fill = Loader._fill_tensor

    def counted(self: Loader, names: tuple[str, ...], *rest: Any, **named: Any) -> None:
        reads.append(names)
        fill(self, names, *rest, **named)

    monkeypatch.setattr(Loader, "_fill_tensor", counted)
    pending = pending_of(tmp_path)
    assert not reads
    pending.fill()
    assert len(reads) == len(set(reads)) == len(tensors_of(pending.weights))


def test_cancel_ends_a_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama2")
    pending, reads, fill = pending_of(tmp_path), [], Loader._fill_tensor

    def once(self: Loader, names: tuple[str, ...], *rest: Any, **named: Any) -> None:
        reads.append(names)
        fill(self, names, *rest, **named)
        pending.cancel()

    monkeypatch.setattr(Loader, "_fill_tensor", once)
    pending.fill()
    assert len(reads) == 1


def test_an_error_ends_a_fill_and_comes_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2", dtype=torch.bfloat16)
    rewrite(tmp_path, lambda t: t[GATE][0].fill_(1e6))
    pending = pending_of(tmp_path, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="beyond float16"):
        pending.fill()
    pending.fill()  # nothing is left to be done


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_copy_the_same_bits_piece_by_piece(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a tensor goes through pinned memory in pieces that end anywhere, and into packed weights."""
    make_checkpoint(tmp_path, "llama2", dtype=stored, hidden_size=256, intermediate_size=384, num_hidden_layers=5)
    checkpoint = resolve(tmp_path, role="target")
    monkeypatch.setattr(weight_loader, "_PINNED_BYTES", 4 * 1001)
    formats = {"ops": ops_for(CUDA)}
    pending = pending_of(tmp_path, CUDA, dtype, **formats)
    pending.fill()
    plain = load_weights(checkpoint, dtype=dtype, device=CPU, progress=False)
    assert (pending.weights.layers[0].qkv.format == "packed") == (dtype == torch.bfloat16)
    for ours, theirs in zip(pending.weights.layers, plain.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(ours, name).unpack().cpu(), getattr(theirs, name).data), name
        assert torch.equal(ours.input_norm.cpu(), theirs.input_norm)
    assert torch.equal(pending.weights.embed.unpack().cpu(), plain.embed.data)
    assert torch.equal(pending.weights.head.unpack().cpu(), plain.head.data)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 120 MB: what readers have beside them is a part of one, as of an 8B."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama3", dtype=torch.bfloat16, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, *FORMATS])
def test_a_load_takes_what_is_planned_and_at_most_a_layer_more_meanwhile(wide: Path, form: str | None) -> None:
    checkpoint, ops = resolve_pair(wide, None, (None, None), (form, None))[0], ops_for(CUDA)
    assert isinstance(checkpoint, Checkpoint)
    gc.collect()  # or what the tests before left is freed meanwhile
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(checkpoint, dtype=torch.bfloat16, device=CUDA, progress=False, ops=ops)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    planned = checkpoint.bytes_loaded(torch.bfloat16, CUDA, ops)
    assert weights.nbytes() == planned
    assert abs(held - planned) <= 0.05 * held
    (first, *_), parts = weights.layers, ("qkv", "o", "gate_up", "down")
    assert peak - held <= 2 * sum(math.prod(getattr(first, part).shape) for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["reading", "compiling"])
def test_a_start_that_fails_leaves_no_thread(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama2", dtype=torch.bfloat16)
    # the first of a process also gets what cuBLAS keeps
    FastSpecGenerator(tmp_path, max_length=64, device="cuda", progress=False).close()
    before, used = set(threading.enumerate()), torch.cuda.memory_allocated()

    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("planted")

    monkeypatch.setattr(*((Loader, "_fill_tensor") if what == "reading" else (Engine, "compile")), fails)
    with pytest.raises(CheckpointError, match="planted"):
        FastSpecGenerator(tmp_path, max_length=64, device="cuda", progress=False)
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile
    monkeypatch.undo()
    with FastSpecGenerator(tmp_path, max_length=64, device="cuda", progress=False) as generator:
        assert len(generator.generate([[5, 6]], max_new_tokens=3, eos_token_id=None)[0]) == 5
    gc.collect()  # of the frames of the error
    assert torch.cuda.memory_allocated() == used
