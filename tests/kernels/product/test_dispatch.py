"""The packed product against its torch twin: on a GPU for real, elsewhere by stand-ins for Gluon's language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import Gpu
from fastspec.kernels.product import plan
from tests.helpers.devices import devices
from tests.helpers.gluon_simulator import simulated
from tests.helpers.products import EPILOGUES, product_case, widened

NAN = float("nan")
# rows on both sides of every change of kernel or tile
ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100]
PDL = {"cpu": True, "cuda": False}  # a lone launch has nothing to depend on; chains are tested below


@contextmanager
def modules(device: str, capability: tuple[int, int] = (9, 0), late: bool = True) -> Iterator[SimpleNamespace]:
    if device == "cpu":
        with simulated(capability, late) as found:
            yield found
    else:
        from fastspec.kernels.product import dispatch, plan

        yield SimpleNamespace(plan=plan, dispatch=dispatch)


def case(
    rows: int, n: int, k: int, dtype: torch.dtype, device: str, epilogue: str = "plain", seed: int = 0
) -> tuple[Tensor, Weight, dict[str, Any]]:
    """x, packed weight and keyword arguments of one call."""
    x, weight, arguments = product_case(rows, n, k, dtype, device, epilogue, seed)
    return x, Weight.pack(weight, "gated" in arguments), arguments


def some_rows(x: Tensor, arguments: dict[str, Any], at: Any) -> tuple[Tensor, dict[str, Any]]:
    if "residual" in arguments:
        arguments = {**arguments, "residual": arguments["residual"][at]}
    return x[at], arguments


def error_and_bound(ours: Tensor, x: Tensor, weight: Weight, arguments: dict[str, Any]) -> tuple[float, float]:
    """Largest errors against the twin in fp64: ours, and what it may be."""
    wide = {name: widened(value) for name, value in arguments.items() if name != "out_dtype"}
    truth = reference.packed_linear(x.double(), widened(weight), **wide)
    torchs = (reference.linear(x, weight, **arguments).double() - truth).abs().max().item()
    # the rule of the house: twice what torch itself errs by; floored at a few fp32 ulp of values near four, for
    # torch's own sums may by chance be exact. Before an fp32 result torch rounds a norm twice, we round it once
    return (ours.double() - truth).abs().max().item(), max(2 * torchs, 4e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_kernel_equals_its_torch_definition(epilogue: str, dtype: torch.dtype, device: str) -> None:
    with modules(device) as packed:
        for rows, n, k in (
            (1, 48, 896),
            (6, 160, 128),
            (12, 32, 1024),
            (20, 144, 384),
            (40, 272, 640),
            (3, 48, 192),
            (40, 272, 704),
            (5, 16, 64),
            (12, 48, 64),
        ):
            x, weight, arguments = case(rows, n, k, dtype, device, epilogue)
            ours = packed.dispatch.packed_linear(x, weight, **arguments, pdl=PDL[device])
            assert ours.dtype == arguments.get("out_dtype", dtype)
            assert ours.shape == (rows, n // 2 if "gated" in epilogue else n)
            error, bound = error_and_bound(ours, x, weight, arguments)
            assert error <= bound, (rows, n, k)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_gates_by_gelu(capability: tuple[int, int], device: str) -> None:
    """In every kernel, and not as silu."""
    with modules(device, capability) as packed:
        for rows, n, k in ((1, 48, 896), (12, 64, 256), (40, 272, 192)):
            x, weight, arguments = case(rows, n, k, torch.bfloat16, device, "gated")
            arguments["gelu"] = True
            ours = packed.dispatch.packed_linear(x, weight, **arguments, pdl=PDL[device])
            error, bound = error_and_bound(ours, x, weight, arguments)
            assert error <= bound, (rows, n, k)
            arguments["gelu"] = False
            error, bound = error_and_bound(ours, x, weight, arguments)
            assert error > bound


@pytest.mark.parametrize(
    ("epilogue", "capability"),
    [("norm+gated", (8, 6)), ("norm+gated", (9, 0)), ("norm+gated", (10, 0)), ("plain", (9, 0)), ("norm+fp32", (8, 6))],
)
def test_bits_of_a_row_in_every_tile(epilogue: str, capability: tuple[int, int], monkeypatch: Any) -> None:
    """For every split: alone, in every kernel and tile that rows come in. K ends with half of a K tile of 128."""
    with modules("cpu", capability) as packed:
        for split in {split for split, _ in packed.plan.FEW_ROW_TILES} | {packed.plan.Split(8, 64, 2)}:
            monkeypatch.setattr(packed.plan, "split_of", lambda n, k, split=split: split)
            x, weight, arguments = case(70, 144, 1472, torch.bfloat16, "cpu", epilogue)
            whole = packed.dispatch.packed_linear(x, weight, **arguments, pdl=True)
            for many in (16384, 1):
                monkeypatch.setattr(packed.plan, "MANY_WEIGHT_ROWS", many)
                for rows in (1, 3, 9, 17, 40):
                    some, given = some_rows(x, arguments, slice(70 - rows, None))
                    ours = packed.dispatch.packed_linear(some, weight, **given, pdl=True)
                    assert torch.equal(ours, whole[70 - rows :]), (split, many, rows)


def cache_by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it returns for as many rows as before is what it returned then: no tile changes it."""
    made: dict[int, Any] = {}

    def cached(weight: Weight, x: Tensor, *given: Any) -> Any:
        if len(x) not in made:
            made[len(x)] = function(weight, x, *given)
        return made[len(x)]

    return cached


@pytest.mark.parametrize(
    "epilogue",
    [
        "norm+gated+bias+residual",
        *(pytest.param(epilogue, marks=pytest.mark.slow) for epilogue in ("plain", "norm+bias+residual", "norm+fp32")),
    ],
)
def test_bits_of_a_row_in_the_ring(epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of rows and two, a ring shorter and longer than a pass, all ways in a program, some and one.

    Weight rows come in one box and in several, for all that there is room for and for less. Programs have one tile or
    several, and not all of them as many.
    """
    with modules("cpu") as packed:
        launch = packed.plan
        ragged = [(split, 272, 1472) for split in {split for split, _ in launch.FEW_ROW_TILES}]
        ragged += [(launch.Split(8, 64, 2), 272, 1408), (launch.Split(4, 128, 2), 272, 1472)]
        for split, n, k in [*ragged, (launch.Split(4, 64), 256, 1024), (launch.Split(8, 128), 256, 2048)]:
            monkeypatch.setattr(launch, "split_of", lambda n, k, split=split: split)
            x, weight, arguments = case(70, n, k, torch.bfloat16, "cpu", epilogue)
            parts = [some_rows(x, arguments, slice(first, first + 14)) for first in range(0, 70, 14)]
            whole = torch.cat([packed.dispatch.packed_linear(some, weight, **given, pdl=True) for some, given in parts])
            tiles = [
                (9, launch.Tma(16, 64, 4, 2)),
                (38, launch.Tma(32, 128, 4, 3, 8)),
                (70, launch.Tma(32, 64, 4, 5)),
                (20, launch.Tma(32, 112, 4, 3)),
                (40, launch.Tma(64, 48, 4, 4)),
                (70, launch.Tma(64, 112, 8, 3, 8)),
                (70, launch.Tma(64, 112, 8, 3, 8, programs=2)),
                (38, launch.Tma(32, 64, 4, 2, 8, programs=2)),
                (70, launch.Tma(32, 128, 8, 5, programs=1)),
            ]
            if "gated" not in epilogue:
                ways = split.pairwise
                tiles += [(30, launch.Tma(32, 128, 8, 4, split_k=ways)), (70, launch.Tma(64, 64, 4, 9, 16, split_k=1))]
                tiles += [(30, launch.Tma(32, 80, 4, 4, split_k=1)), (70, launch.Tma(64, 128, 4, 3, 8, split_k=ways))]
            permuted = cache_by_rows(packed.launch.permuted_for)
            for rows, tile in tiles:
                monkeypatch.setattr(launch, "tile_of", lambda *given, tile=tile, **options: tile)
                monkeypatch.setattr(packed.launch, "permuted_for", permuted)
                some, given = some_rows(x, arguments, slice(70 - rows, None))
                ours = packed.dispatch.packed_linear(some, weight, **given, pdl=True)
                assert torch.equal(ours, whole[70 - rows :]), (split, n, tile)
            monkeypatch.undo()


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (10, 0)])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_ways_are_added_up_in_groups(together: int, capability: tuple[int, int], monkeypatch: Any) -> None:
    """Each way's sum is what is left of a row that is zero elsewhere: these, added up here, are the row's."""
    with modules("cpu", capability) as packed:
        launch = packed.plan
        monkeypatch.setattr(launch, "split_of", lambda n, k: launch.Split(8, 64, together))
        x, weight, _ = case(40, 144, 1408, torch.bfloat16, "cpu")
        # ways of the TMA kernel one by one, those that belong together, and all in one program
        for rows, many, alone in (
            (3, 16384, {}),
            (40, 16384, {}),
            (40, 16384, {(144, 1408): (40, 64, 9)}),
            (40, 1, {}),
        ):
            monkeypatch.setattr(launch, "MANY_WEIGHT_ROWS", many)
            monkeypatch.setattr(launch, "ONE_CTA_PER_SM", alone)
            if capability == (9, 0) and rows == 40:
                taken = launch.tile_of(144, 1408, rows, Gpu(capability, 132)).split_k
                assert taken == (None if many == 1 else together if alone else 1)

            def product(x: Tensor, rows: int = rows) -> Tensor:
                found: Tensor = packed.dispatch.packed_linear(x[:rows], weight, pdl=True, out_dtype=torch.float32)
                return found

            way = torch.arange(1408) // 64 % 8
            ways = [product(torch.where(way == each, x, 0)) for each in range(8)]
            groups = [sum(ways[first + 1 : first + together], ways[first]) for first in range(0, 8, together)]
            assert torch.equal(product(x), sum(groups[1:], groups[0])), (rows, many, alone)


@pytest.mark.parametrize("given", [{"gated": True}, {"whole": True}])
def test_a_program_that_needs_whole_sums_makes_them(given: dict[str, bool]) -> None:
    """No split of K over programs for a gate or the largest of a row's sums, whatever the tables of tiles say."""
    for n, k in plan.ONE_CTA_PER_SM:
        for rows in (9, 40, 100, 160):
            for split in (None, plan.split_for((n, k), tree=True)):
                tile = plan.tile_of(n, k, rows, Gpu((9, 0), 132), **given, split=split)
                assert isinstance(tile, plan.Tma)
                assert tile.split_k is None, (n, k, rows)


@pytest.mark.parametrize("late", [False, True])
def test_copies_may_land_at_any_time(late: bool) -> None:
    with modules("cpu", late=late) as packed:
        for rows, n, k in ((17, 144, 128), (33, 16, 4096), (64, 48, 896)):
            x, weight, arguments = case(rows, n, k, torch.bfloat16, "cpu", "norm+residual")
            error, bound = error_and_bound(
                packed.dispatch.packed_linear(x, weight, **arguments, pdl=True), x, weight, arguments
            )
            assert error <= bound, (rows, n, k)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("epilogue", ["plain", "norm+gated+residual"])
def test_values_that_are_not_numbers_stay_where_they_belong(epilogue: str, device: str) -> None:
    """A NaN in a row of x is in that row's result alone, one in a weight's row in that column."""
    with modules(device) as packed:
        for rows in (5, 12, 40):
            x, weight, arguments = case(rows, 64, 512, torch.bfloat16, device, epilogue)
            clean = packed.dispatch.packed_linear(x, weight, **arguments, pdl=PDL[device])
            x[3, 500] = NAN
            weight.data[1, 9, 5, 31] = NAN  # row 21; of an interleaved weight the gate of column 13
            dirty = packed.dispatch.packed_linear(x, weight, **arguments, pdl=PDL[device])
            column = 13 if "gated" in epilogue else 21
            assert dirty[3].isnan().all()
            assert dirty[:, column].isnan().all()
            others = torch.ones_like(clean, dtype=torch.bool)
            others[3], others[:, column] = False, False
            assert torch.equal(dirty[others], clean[others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_kernel_equals_its_torch_definition_at_real_sizes(epilogue: str, dtype: torch.dtype) -> None:
    from fastspec.kernels.product.dispatch import packed_linear

    for n, k in ((6144, 4096), (4096, 14336), (5120, 2880), (896, 4864), (3584, 18944)):
        for rows in (1, 6, 13, 24, 40, 100):
            x, weight, arguments = case(rows, n, k, dtype, "cuda", epilogue)
            error, bound = error_and_bound(packed_linear(x, weight, **arguments, pdl=False), x, weight, arguments)
            assert error <= bound, (rows, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["plain", "norm+bias+residual", "norm+gated", "norm+fp32"])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 8192), (5120, 2880)]
)
def test_bits_on_a_gpu(n: int, k: int, epilogue: str) -> None:
    """A row with 0 to 63 others and 99 others, and in random places among them, until 10^4 rows were compared."""
    from fastspec.kernels.product.dispatch import packed_linear

    x, weight, arguments = case(128, n, k, torch.bfloat16, "cuda", epilogue)
    alone = [some_rows(x, arguments, slice(row, row + 1)) for row in range(128)]
    expected = torch.cat([packed_linear(some, weight, **given, pdl=False) for some, given in alone])
    generator = torch.Generator().manual_seed(0)
    compared = 0
    while compared < 10_000:
        for rows in (*range(1, 65), 100):
            at = torch.randperm(128, generator=generator)[:rows].cuda()
            some, given = some_rows(x, arguments, at)
            assert torch.equal(packed_linear(some, weight, **given, pdl=False), expected[at]), rows
            compared += rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 12, 24, 40])
def test_a_chain_started_early_equals_one_that_waits(rows: int) -> None:
    """Layers that feed each other inside one graph, launched with programmatic dependence, over many replays."""
    from fastspec.kernels.gpu import has_pdl
    from fastspec.kernels.product.dispatch import packed_linear

    if not has_pdl(torch.device("cuda")):
        pytest.skip("programmatic dependent launch needs sm_90")
    hidden, inner, layers = 1024, 4096, 6
    first, _, _ = case(rows, 16, hidden, torch.bfloat16, "cuda")
    weights = [
        [
            case(1, n, k, torch.bfloat16, "cuda", kind, seed=10 * layer + place)[1]
            for place, (n, k, kind) in enumerate(parts)
        ]
        for layer in range(layers)
        for parts in [[(hidden, hidden, "plain"), (2 * inner, hidden, "gated"), (hidden, inner, "plain")]]
    ]
    gamma = torch.rand(hidden, device="cuda").bfloat16()

    def chain(pdl: bool) -> Tensor:
        x = first
        for mix, gate_up, down in weights:
            x = packed_linear(x, mix, norm=(gamma, 1e-5), residual=x, pdl=pdl)
            act = packed_linear(x, gate_up, norm=(gamma, 1e-5), gated=True, pdl=pdl)
            x = packed_linear(act, down, residual=x, pdl=pdl)
        return x

    expected = chain(False)
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(200):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, expected)


def test_nothing_is_launched_for_no_rows() -> None:
    with modules("cpu") as packed:
        x, weight, _ = case(0, 16, 128, torch.bfloat16, "cpu")
        assert packed.dispatch.packed_linear(x, weight, pdl=False).shape == (0, 16)
        assert packed.dispatch.packed_linear(x.view(2, 0, 128), weight, pdl=False).shape == (2, 0, 16)


def test_leading_dimensions_are_kept() -> None:
    with modules("cpu") as packed:
        x, weight, arguments = case(6, 32, 256, torch.bfloat16, "cpu", "norm+residual")
        flat = packed.dispatch.packed_linear(x, weight, **arguments, pdl=False)
        arguments["residual"] = arguments["residual"].view(2, 3, 32)
        assert torch.equal(
            packed.dispatch.packed_linear(x.view(2, 3, 256), weight, **arguments, pdl=False), flat.view(2, 3, 32)
        )


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"weight": Weight(torch.zeros(32, 256, dtype=torch.bfloat16))}, ValueError, "pack it first"),
        ({"weight": Weight(torch.zeros(2, 8, 16, 32), "packed")}, TypeError, "both must be"),
        ({"weight": Weight(torch.zeros(2, 5, 16, 32, dtype=torch.bfloat16), "packed")}, ValueError, "multiple of 64"),
        ({"x": torch.zeros(3, 128, dtype=torch.bfloat16)}, ValueError, "must be equal"),
        ({"x": torch.zeros(3, 256)}, TypeError, "both must be"),
        ({"bias": torch.zeros(16, dtype=torch.bfloat16)}, ValueError, "bias has shape"),
        ({"bias": torch.zeros(32)}, TypeError, "bias is"),
        ({"residual": torch.zeros(3, 16, dtype=torch.bfloat16)}, ValueError, "residual has shape"),
        ({"norm": (torch.zeros(128, dtype=torch.bfloat16), 1e-5)}, ValueError, "norm's weight has shape"),
        ({"norm": (torch.zeros(512, dtype=torch.bfloat16)[::2], 1e-5)}, ValueError, "contiguous"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], error: type[Exception], match: str) -> None:
    x, weight, _ = case(3, 32, 256, torch.bfloat16, "cpu")
    with modules("cpu") as packed, pytest.raises(error, match=match):
        packed.dispatch.packed_linear(**{"x": x, "weight": weight, "pdl": False, **change})


MODELS = [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3072, 2048), (2048, 8192), (151936, 896)]
MODELS += [(896, 4864), (9728, 896), (3584, 18944), (4608, 3584), (6144, 1024), (1024, 3072), (8192, 28672), (16, 64)]
MODELS += [(5120, 2880), (201088, 2880), (960, 320), (576, 1536)]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(("n", "k"), MODELS)
def test_every_weight_has_a_launch(n: int, k: int, capability: tuple[int, int]) -> None:
    with modules("cpu") as packed:
        launch = packed.plan
        split = launch.split_of(n, k)
        steps = -(-k // (split.split_k * split.k_tile))
        assert split.split_k % split.pairwise == 0
        for rows in ROWS:
            for whole in (False, True):
                tile = launch.tile_of(n, k, rows, Gpu(capability, 132), whole)
                if isinstance(tile, launch.FewRows):
                    assert rows <= tile.rows <= 32
                    assert 1 <= tile.row_depth <= tile.depth <= steps
                elif isinstance(tile, launch.Tma):
                    assert rows > 8
                    assert capability == (9, 0)
                    assert tile.split_k in ((None,) if whole else (None, 1, split.pairwise))
                    assert tile.rest < tile.rows <= 128
                    assert tile.rows + tile.rest <= launch.TMA_ROWS
                    assert tile.stages >= 3
                    assert sum(tile.boxes) == tile.weight_rows <= tile.room
                    assert tile.warps % 4 == 0
                    # one to a multiprocessor, with as many tiles as the others or one less
                    if tile.programs is not None:
                        tiles = -(-n // tile.weight_rows)
                        assert not whole
                        assert tile.split_k is None
                        assert tile.programs == -(-tiles // -(-tiles // 132)) <= 132
                else:
                    assert rows > 16
                    assert isinstance(tile, launch.ManyRows)
                    assert tile.depth >= 2


def test_the_plan_names_where_it_was_measured() -> None:
    from fastspec.kernels.product import plan

    assert set(plan.MEASURED_ON) == set(get_args(plan.Tile))
    assert [Gpu(each, 132).measured for each in ((8, 0), (9, 0), (10, 0))] == [False, True, False]
    kinds = {type(plan.tile_of(4096, 4096, rows, Gpu((9, 0), 132))) for rows in ROWS}
    assert all(plan.MEASURED_ON[kind] for kind in kinds), "a tile of a tested GPU is not measured"


def test_fewer_multiprocessors_have_fewer_programs() -> None:
    """The plan is made for the GPU it is given: those of an H100 PCIe, 114, never leave some without a program."""
    from fastspec.kernels.product import plan

    for sms in (114, 132):
        tile = plan.tile_of(28672, 4096, 160, Gpu((9, 0), sms), gated=True)
        assert isinstance(tile, plan.Tma)
        assert tile.programs is not None
        assert tile.programs <= sms


def test_which_gpus_are_supported() -> None:
    capabilities = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]
    assert [Gpu(each, 132).supported for each in capabilities] == [False, True, True, True, True]
