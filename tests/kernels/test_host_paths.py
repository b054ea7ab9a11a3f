"""What the engine gives to kernels on a GPU: every wrapper takes it, seen without one.

Wrappers choose kernels and tiles, check what they are given, and make room for results. Here they run as on an sm_90 or
sm_80 with launches that do nothing, over steps and prompts of whole models; `compiling()` keeps ids in range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.shapes import FULL, GREEDY
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.modules import exchange

pytest.importorskip("triton", reason="Triton ships for Linux only")

PRODUCTS = {"few_rows_kernel", "tma_kernel", "many_rows_kernel", "tile_kernel"}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # which can be packed


class Launched(list[str]):
    """Names of kernels, one a launch, and what each was compiled by."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[object] = set()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Launched:
    """The kernels that would have been launched on a GPU of the test's `capability`."""
    from fastspec.engine import settings
    from fastspec.kernels import gpu, triton_ops
    from fastspec.kernels.common import launch as device

    capability, names = request.getfixturevalue("capability"), Launched()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert all(0 < size < 2**31 for size in grid), (kernel, grid)
        names.append(kernel.fn.__name__)
        names.kinds.add((names[-1], device._kind(args), device._kind(tuple(options.items()))))

    instead: dict[Any, Callable[..., Any]] = {
        device.launch: launch,
        device.described: lambda tensor, block: SimpleNamespace(base=tensor, block_shape=block, layout=""),
        gpu.has_pdl: lambda device: capability >= (9, 0),
        gpu.has_warp_groups: lambda device: capability == (9, 0),
        gpu.multiprocessors: lambda device: 132,
        gpu.gpu_of: lambda device: gpu.Gpu(capability, 132),
        gpu.generation_of: lambda device: gpu.Gpu(capability, 0),
    }
    exchange(monkeypatch, instead)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: capability)
    ops = triton_ops.TRITON_OPS.replaced(name="torch")  # whose results need no pinned memory
    monkeypatch.setattr(settings, "ops_for", lambda device: ops)
    return names


def compile_all(directory: Path, dtype: torch.dtype, ks: tuple[int, ...], batch: int, length: int) -> None:
    """Steps of one row and of all, greedy, sampled, and with log-probabilities; and chunks of prompts."""
    with FastSpecGenerator(
        directory, directory, dtype=dtype, max_batch_size=batch, max_length=length, device="cpu", progress=False
    ) as generator:
        engine = generator._open().engine
        kinds = [(k, *kind) for k in ks for kind in ((GREEDY, None), (FULL, None), (GREEDY, 2), (FULL, 0))]
        with engine.on_device():
            steps = [(rows, engine.shapes.step(*kind, length)) for rows in (1, batch) for kind in kinds]
            engine.compile(steps, prompts=True)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "mistral"])
def test_wrappers_take_what_the_engine_gives(
    family: str, dtype: torch.dtype, capability: tuple[int, int], launched: Launched, tmp_path: Path
) -> None:
    compile_all(make_checkpoint(tmp_path, family, **SIZES), dtype, (0, 4), 8, 300)
    assert {"_embed_kernel", "_feed_kernel", "_verify_kernel", "_end_kernel"} <= set(launched)
    assert "_publish_kernel" not in launched  # what ends a step publishes, log-probabilities too
    products = {"few_rows_kernel", *(("tma_kernel", "sum_kernel") if capability == (9, 0) else ("many_rows_kernel",))}
    assert (products <= set(launched)) == (dtype.itemsize == 2)
    assert ({"fp32_kernel", "fp32_argmax_kernel"} <= set(launched)) == (dtype.itemsize == 4)
    assert ("fragment_kernel" in launched) == (dtype.itemsize == 2 and capability == (9, 0))


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama3", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 3, "use_sliding_window": True}),
    ],
)
def test_one_layer_of_each_kind_launches_what_all_launch(
    family: str,
    more: dict[str, Any],
    capability: tuple[int, int],
    launched: Launched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    directory, kinds, counts = make_checkpoint(tmp_path, family, **SIZES, num_hidden_layers=6, **more), [], []
    for cut in (True, False):
        launched.clear()
        launched.kinds = set()
        from fastspec.kernels.triton_ops import TritonOps

        monkeypatch.setattr(TritonOps, "is_brief", staticmethod(lambda cut=cut: cut))
        compile_all(directory, torch.bfloat16, (0, 2), 2, 300)
        kinds.append(launched.kinds)
        counts.append(len(launched))
    assert kinds[0] == kinds[1]
    assert counts[0] < counts[1]


def test_passes_are_brief_within_their_context_alone() -> None:
    from fastspec.kernels.common.launch import brief, is_brief

    with brief():
        assert is_brief()
    assert not is_brief()


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_so_over_a_long_cache(capability: tuple[int, int], launched: Launched, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama3", **SIZES, max_position_embeddings=20_000)
    compile_all(directory, torch.bfloat16, (0, 4), 2, 10_000)
    """Where the kernel of long rows cannot run, the portable one decodes all rows."""
    expected = {"shares_kernel", "gather_kernel"} if capability == (9, 0) else {"_decode_kernel"}
    decoding = {"fragment_kernel", "batch_kernel", "shares_kernel", "gather_kernel", "_decode_kernel"}
    assert decoding & set(launched) - {"fragment_kernel", "batch_kernel"} == expected
    assert ({"fragment_kernel", "batch_kernel"} & set(launched) != set()) == (capability == (9, 0))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_who_multiplies_chunks_of_prompts(
    capability: tuple[int, int], launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of tokens, the prompts' own product: all passes leave the same bits."""
    from fastspec.engine import settings

    monkeypatch.setitem(settings._CHUNKS, "cpu", (64, 128, 256))
    directory = make_checkpoint(tmp_path, "qwen2", **SIZES)
    with FastSpecGenerator(
        directory, directory, dtype=torch.bfloat16, max_length=300, device="cpu", progress=False
    ) as generator:
        engine = generator._open().engine
        for chunk, draft in itertools.product(engine.sizes.chunks, (False, True)):
            launched.clear()
            with engine.on_device(), engine.modules.ops.compiling(None):
                engine.prompts.body(chunk, chunk, draft=draft)()
            own = "_hopper_kernel" if capability == (9, 0) else "_prefill_kernel"
            attention = "chunk_kernel" if capability == (9, 0) else "_flash_kernel"
            assert {"_rotate_kernel", attention} < set(launched)  # not split by keys, as a step's
            assert ("tma_kernel" in launched, "regroup_kernel" in launched, own in launched) == (False, False, True)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
@pytest.mark.parametrize(("sampler", "end"), [(GREEDY, 1), (FULL, 3)])
def test_how_many_launches_end_a_step(
    sampler: str, end: int, capability: tuple[int, int], launched: Launched, tmp_path: Path
) -> None:
    """Behind the head verification, commit, stops and what the host is told: one kernel, or three with sampling.

    With log-probabilities recorded there are no more.
    """
    with FastSpecGenerator(
        *[make_checkpoint(tmp_path, "llama3", **SIZES)] * 2,
        dtype=torch.bfloat16, max_length=300, device="cpu", progress=False,
    ) as generator:  # fmt: skip
        engine = generator._open().engine
        for k, recorded in itertools.product((0, 4), (None, 5)):
            launched.clear()
            with engine.on_device():
                engine.compile([(8, engine.shapes.step(k, sampler, recorded, 200))], prompts=False)
            head = max(at for at, name in enumerate(launched) if name in PRODUCTS)
            assert len(launched) - 1 - head == end, launched[head:]
