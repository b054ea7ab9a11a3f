"""The ring kernel, a packed product of 17 rows of x and more: the bits of the narrow kernel in every tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_packed_linear import case, modules, some_rows

# K, N and tiles (rows of x, of the weight, steps of weights and of x in flight, steps of x held or 0 for all)
SHAPES = {"whole": (256, 2048), "ragged": (272, 1408)}
TILES = [(64, 128, 6, 2, 0), (32, 128, 3, 4, 8), (64, 256, 4, 2, 4)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("epilogue", ["plain", "norm+gated+bias+residual", "norm+fp32"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_bits_of_a_row(shape: str, epilogue: str, late: bool, monkeypatch: Any) -> None:
    """For every split: one cluster with all tiles and two, the norm in either place, copies that land at any time."""
    n, k = SHAPES[shape]
    with modules("cpu", late=late) as packed:
        launch = packed.launch
        for split in {split for split, _ in launch.NARROW}:
            monkeypatch.setattr(launch, "split_of", lambda n, k, split=split: split)
            monkeypatch.setattr(launch, "MANY", {})
            x, weight, arguments = case(70, n, k, torch.bfloat16, "cpu", epilogue)
            parts = [some_rows(x, arguments, slice(first, first + 14)) for first in range(0, 70, 14)]
            whole = torch.cat([packed.linear.packed_linear(some, weight, **given, pdl=True) for some, given in parts])
            for (block, weight_rows, depth, row_depth, slots), clusters in zip(TILES, (1, 2, 1), strict=True):
                tile = launch.Held(
                    *(clusters, block, weight_rows, 8, depth, row_depth, slots, True),
                    norm=clusters == 1,
                    ring=True,
                )
                monkeypatch.setattr(launch, "tile_of", lambda *given, tile=tile: tile)
                for rows in (17, 70):
                    some, given = some_rows(x, arguments, slice(70 - rows, None))
                    ours = packed.linear.packed_linear(some, weight, **given, pdl=True)
                    assert torch.equal(ours, whole[70 - rows :]), (split, tile, rows)
            monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "epilogue", "rows", "tile"),
    [
        (6144, 4096, "norm+bias+residual", 64, (32, 64, 4, 12, 4, 0)),
        (4096, 4096, "residual", 64, (32, 128, 8, 12, 2, 4)),
        (28672, 4096, "norm+gated", 64, (32, 128, 8, 6, 4, 0)),
        (28672, 4096, "norm+gated", 32, (32, 128, 8, 10, 4, 0)),
        (4096, 14336, "residual", 64, (16, 256, 8, 6, 2, 4)),
        (4096, 14336, "plain", 32, (16, 256, 8, 6, 4, 8)),
        (1168, 3584, "norm+fp32", 64, (3, 128, 8, 4, 2, 4)),
    ],
)
def test_bits_on_a_gpu(n: int, k: int, epilogue: str, rows: int, tile: tuple[int, ...], monkeypatch: Any) -> None:
    """1 to 64 rows in random places, against each row alone in the narrow kernel, several times over."""
    from fastspec.kernels import packed_launch
    from fastspec.kernels.packed_linear import packed_linear

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters with warp groups are for sm_90")
    x, weight, arguments = case(128, n, k, torch.bfloat16, "cuda", epilogue)
    alone = [some_rows(x, arguments, slice(row, row + 1)) for row in range(128)]
    expected = torch.cat([packed_linear(some, weight, **given, pdl=False) for some, given in alone])
    clusters, weight_rows, warps, depth, row_depth, slots = tile
    held = packed_launch.Held(
        *(clusters, rows, weight_rows, warps, depth, row_depth, slots, True), norm=False, ring=True
    )
    monkeypatch.setattr(packed_launch, "tile_of", lambda *given: held)
    generator = torch.Generator().manual_seed(0)
    for count in (*range(1, 65), 100) * 3:
        at = torch.randperm(128, generator=generator)[:count].cuda()
        some, given = some_rows(x, arguments, at)
        assert torch.equal(packed_linear(some, weight, **given, pdl=False), expected[at]), count
