"""The portable product against its torch twin: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices
from tests.helpers.products import EPILOGUES, product_case, widened

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common import launch as launching
from fastspec.kernels.product.portable import products as tile

NAN = float("nan")
# the interpreter has no bf16 products
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


def exact(x: Tensor, weight: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The twin in fp64."""
    wide = {name: widened(value) for name, value in arguments.items() if name != "out_dtype"}
    return reference.tile_linear(x.double(), weight.double(), **wide)


def error_and_bound(ours: Tensor, x: Tensor, weight: Tensor, arguments: dict[str, Any]) -> tuple[float, float]:
    truth = exact(x, weight, arguments)
    torchs = (reference.tile_linear(x, weight, **arguments).double() - truth).abs().max().item()
    # the rule of the house: twice what torch itself errs by; floored at a few fp32 ulp of values near four, for
    # torch's own sums may by chance be exact. x * gamma is rounded once where torch rounds twice, but before an
    # fp32 result that torch keeps unrounded as well
    return (ours.double() - truth).abs().max().item(), max(2 * torchs, 4e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 62, 32), (2, 38, 200), (9, 34, 33), (18, 18, 131), (66, 10, 64)])
def test_the_kernel_equals_its_torch_definition(rows: int, n: int, k: int, epilogue: str, device: str) -> None:
    for dtype in DTYPES[device]:
        x, weight, arguments = product_case(rows, n, k, dtype, device, epilogue)
        ours = tile.tile_linear(x, weight, **arguments)
        assert ours.dtype == arguments.get("out_dtype", dtype)
        error, bound = error_and_bound(ours, x, weight, arguments)
        assert error <= bound, dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_kernel_equals_its_torch_definition_at_real_sizes(dtype: torch.dtype, epilogue: str) -> None:
    for rows, n, k in ((1, 4096, 4096), (3, 10240, 2048), (6, 2048, 8192), (33, 9000, 512), (300, 998, 1111)):
        x, weight, arguments = product_case(rows, n, k, dtype, "cuda", epilogue)
        error, bound = error_and_bound(tile.tile_linear(x, weight, **arguments), x, weight, arguments)
        assert error <= bound, (rows, n, k)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("epilogue", ["plain", "norm+bias+residual", "norm+gated"])
def test_a_row_does_not_feel_what_runs_beside_it(epilogue: str, device: str) -> None:
    """To the bit: alone, in every tile that rows come in, normed in the product or in front of it, anywhere."""
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES[device]:
        count, n = (70, 300) if device == "cuda" else (36, 10)
        x, weight, arguments = product_case(count, n, 300, dtype, device, epilogue)
        if device == "cpu":
            # the interpreter multiplies by numpy, whose order follows the shape: small integers have one sum only
            x, weight = (3 * x).round(), (30 * weight).round()
            if "norm" in arguments:
                arguments["norm"] = ((2 * arguments["norm"][0]).round(), 1e-5)
        whole = tile.tile_linear(x, weight, **arguments)
        for rows in (1, 3, 8, 9, 16, 17, 33, 64) if device == "cuda" else (1, 9, 17):
            at = torch.randperm(count, generator=generator)[:rows].to(device)
            some = {**arguments, "residual": arguments["residual"][at]} if "residual" in arguments else arguments
            assert torch.equal(tile.tile_linear(x[at], weight, **some), whole[at]), (dtype, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (16384, 2048), (500, 1000)])
@pytest.mark.parametrize("epilogue", ["plain", "norm", "norm+gated"])
def test_bits_over_many_rows(epilogue: str, n: int, k: int, dtype: torch.dtype) -> None:
    """10^4 rows in one call against the same rows 1..64 at a time, in random places."""
    generator = torch.Generator().manual_seed(2)
    x, weight, arguments = product_case(10_000, n, k, dtype, "cuda", epilogue)
    whole = tile.tile_linear(x, weight, **arguments)
    order = torch.randperm(10_000, generator=generator).cuda()
    start = 0
    for rows in [*range(1, 65), *torch.randint(1, 65, (60,), generator=generator).tolist()]:
        at = order[start : start + rows]
        start += rows
        assert torch.equal(tile.tile_linear(x[at], weight, **arguments), whole[at]), rows


@pytest.mark.parametrize("device", devices())
def test_what_is_not_of_a_row_is_not_read(device: str) -> None:
    """NaN in other rows stays there; the result holds nothing else of what torch.empty found."""
    x, weight, _ = product_case(5, 34, 65, torch.float32, device)
    clean = tile.tile_linear(x, weight)
    x[3] = NAN
    for norm in (None, (torch.ones(65, device=device), 1e-6)):
        out = tile.tile_linear(x, weight, norm=norm)
        assert out[3].isnan().all()
        assert out[[0, 1, 2, 4]].isfinite().all()
    assert torch.equal(tile.tile_linear(x, weight)[:3], clean[:3])


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = product_case(9, 35, 40, torch.float32, "cpu")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))
    assert tile.tile_linear(x, weight).isfinite().all()
    assert tile.tile_linear(x.expand(2, 9, 40), weight).shape == (2, 9, 35)


def test_fp16_sums_beyond_its_range_are_normed() -> None:
    """60000 * 2 is no fp16 number; the normed row is. A row of 2^-10 keeps its precision beside it."""
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)
    x[1] = 2.0**-10
    gamma = torch.full((64,), 2.0, dtype=torch.float16)
    out = tile.tile_linear(x, torch.eye(64, dtype=torch.float16), norm=(gamma, 1e-12), out_dtype=torch.float32)
    # 2^-11: one rounding to fp16
    assert torch.allclose(out, torch.full_like(out, 2.0), rtol=2**-11, atol=0.0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_pick_equals_its_twin(rows: int, normed: bool, device: str) -> None:
    """Of the very logits that `tile_linear` writes: the same arithmetic, so equality and no tolerance."""
    for dtype in DTYPES[device]:
        x, weight, arguments = product_case(rows, 111, 65, dtype, device, "norm" if normed else "plain")
        logits = tile.tile_linear(x, weight, out_dtype=torch.float32, **arguments)
        scratch = torch.zeros(65, dtype=torch.int64, device=device)
        for limit in (1, 16, 33, 70, 111):
            ids = tile.tile_argmax(x, weight, limit, scratch, **arguments)
            assert torch.equal(ids, logits[:, :limit].argmax(dim=-1)), (dtype, limit)
            assert not scratch.any(), "the scratch is left as it was found"


@pytest.mark.parametrize("device", devices())
def test_pick_of_ties_and_nan(device: str) -> None:
    """Logits of one-hot rows are the weight's own numbers."""
    columns = {
        "ties": ([1.0, 5.0, 5.0, 2.0, 5.0], 1),
        "all negative": ([-9.0, -3.0, -2.0, -4.0, -2.0], 2),
        "NaN is largest": ([1.0, float("inf"), NAN, 2.0, NAN], 2),
        "negative NaN too": ([1.0, float("inf"), 3.0, -NAN, 2.0], 3),
        "nothing finite": ([-float("inf")] * 5, 0),
        "beyond the limit": ([1.0, 2.0, 1.0, 2.0, 0.0, 9.0, NAN], 1),
    }
    scratch = torch.zeros(2, dtype=torch.int64, device=device)
    for name, (values, wanted) in columns.items():
        # far apart: ties meet between programs as well as within one
        for gap in (1, 40):
            weight = torch.full((gap * 7, 1), -float("inf"), device=device)
            weight[: gap * len(values) : gap, 0] = torch.tensor(values, device=device)
            x = torch.ones(1, 1, device=device)
            ids = tile.tile_argmax(x, weight, gap * 4 + 1, scratch, out=torch.full((1,), -1, device=device))
            assert ids.tolist() == [wanted * gap], name
            twin = reference.tile_argmax(x, weight, gap * 4 + 1)
            assert torch.equal(ids, twin), name
            assert not scratch.any()


@pytest.mark.parametrize("device", devices())
def test_pick_of_zeros_of_both_signs(device: str) -> None:
    """A square beyond fp32 makes the norm's scale 0, and logits zeros with the signs of the sums."""
    x, weight = torch.full((1, 1), 1e30, device=device), torch.tensor([[-1.0], [1.0], [1.0]], device=device)
    norm = torch.ones(1, device=device), 1e-5
    logits = tile.tile_linear(x, weight, norm=norm)
    assert logits.signbit().tolist() == [[True, False, False]]
    ids = tile.tile_argmax(x, weight, 3, torch.zeros(2, dtype=torch.int64, device=device), norm=norm)
    assert ids.tolist() == [0]
    assert torch.equal(ids, reference.tile_argmax(x, weight, 3, norm=norm))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pick_at_real_sizes(dtype: torch.dtype) -> None:
    scratch = torch.zeros(65, dtype=torch.int64, device="cuda")
    for rows in (1, 6, 17, 64):
        x, weight, arguments = product_case(rows, 50_000, 512, dtype, "cuda", "norm")
        logits = tile.tile_linear(x, weight, out_dtype=torch.float32, **arguments)
        for _ in range(20):
            assert torch.equal(tile.tile_argmax(x, weight, 49_999, scratch, **arguments), logits[:, :49_999].argmax(-1))
        assert not scratch.any()


def test_tables_are_complete() -> None:
    for (itemsize, _wide), tiles in tile.LAUNCH.items():
        assert itemsize in tile.BLOCK_K
        assert [each.rows for each in tiles] == sorted({each.rows for each in tiles})
        if itemsize == 2:
            # 64 rows of the left operand would change the instruction on Hopper, by the number of rows beside them
            assert max(each.block_n for each in tiles) <= 32
            assert any(each.rows == tile.FUSED_ROWS for each in tiles)
        else:
            # where a thread's numbers of k lie follows from the warps
            assert {(each.num_warps, each.block_n) for each in tiles} == {(4, 8)}


def test_wrong_arguments_are_refused_by_name() -> None:
    x, weight, _ = product_case(2, 16, 32, torch.float32, "cpu")
    scratch = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        tile.tile_linear(x, weight.t().contiguous().t())
    with pytest.raises(ValueError, match="wanted one dtype"):
        tile.tile_linear(x, weight.half())
    with pytest.raises(ValueError, match="gate; up"):
        tile.tile_linear(x, weight[:15], gated=True)
    with pytest.raises(ValueError, match="residual"):
        tile.tile_linear(x, weight, residual=x)
    with pytest.raises(ValueError, match="limit"):
        tile.tile_argmax(x, weight, 17, scratch)
    assert tile.tile_linear(x[:0], weight).shape == (0, 16)
    assert tile.tile_argmax(x[:0], weight, 16, scratch).shape == (0,)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bias": torch.ones(3)}, r"bias is float32 \[3\]; wanted contiguous float32 \[16\]"),
        ({"bias": torch.ones(32)[::2]}, r"strides \[2\].*pass bias.contiguous"),
        ({"norm": (torch.ones(3), 1e-5)}, r"norm\[0\] is float32 \[3\]"),
        ({"norm": (torch.ones(64)[::2], 1e-5)}, r"norm\[0\].*strides"),
    ],
)
def test_what_would_be_misread_is_refused(change: dict[str, Any], match: str) -> None:
    x, weight, _ = product_case(2, 16, 32, torch.float32, "cpu")
    with pytest.raises(ValueError, match=match):
        tile.tile_linear(x, weight, **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scratch": torch.zeros(2, dtype=torch.int64)}, r"scratch is int64 \[2\]; wanted .*\[3\] or longer"),
        ({"scratch": torch.zeros(3, dtype=torch.int32)}, "scratch is int32"),
        ({"scratch": torch.zeros(6, dtype=torch.int64)[::2]}, "scratch .*strides"),
        ({"norm": (torch.ones(64)[::2], 1e-5)}, r"norm\[0\].*strides"),
        ({"out": torch.zeros(3, dtype=torch.int64)}, r"out is int64 \[3\]; wanted contiguous int64 \[2\]"),
        ({"out": torch.zeros(2, dtype=torch.int32)}, "out is int32"),
        ({"out": torch.zeros(2, 3, dtype=torch.int64)[:, 1]}, "strides.*leave it out"),
    ],
)
def test_what_a_pick_would_overrun_is_refused(change: dict[str, Any], match: str) -> None:
    x, weight, _ = product_case(2, 16, 32, torch.float32, "cpu")
    with pytest.raises(ValueError, match=match):
        tile.tile_argmax(**{"x": x, "weight": weight, "limit": 16, "scratch": torch.zeros(3).long(), **change})


@pytest.mark.parametrize("compiled_only", [False, True])
def test_ids_can_be_looked_up_while_kernels_are_compiled(compiled_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs then, and a later op may index with what the pick returned: it is 0 in every row."""
    monkeypatch.setattr(tile, "launch", lambda *arguments, **options: None)
    x, weight = torch.ones(3, 32), torch.ones(20, 32)
    token = launching._compiling.set(set() if compiled_only else None)
    torch.use_deterministic_algorithms(True)  # fills new memory, with the largest number for integers
    try:
        picked = tile.tile_argmax(x, weight, 20, torch.zeros(4, dtype=torch.int64))
    finally:
        torch.use_deterministic_algorithms(False)
        launching._compiling.reset(token)
    assert picked.tolist() == [0] * 3 if compiled_only else min(picked.tolist()) > 20


@pytest.mark.parametrize("setting", [torch.backends, torch.backends.cuda.matmul])
def test_tf32_is_refused_where_bits_are_promised(setting: Any) -> None:
    """The kernel of steps multiplies as it always does; a library's product of a prompt would follow the setting."""
    from fastspec.kernels.triton_ops import TRITON_OPS
    from fastspec.shapes import UNTILED, Tiling

    prompt, weight, before = torch.ones(1, 64, 16), torch.ones(8, 16), setting.fp32_precision
    expected = TRITON_OPS.linear(prompt, Weight(weight), tiling=Tiling(64, 64))
    setting.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match=r"float32 in tf32; .* IEEE.*'highest'.*exact=False"):
            TRITON_OPS.linear(prompt, Weight(weight), tiling=Tiling(64, 64))
        few = prompt[:, :3].contiguous()
        assert torch.equal(TRITON_OPS.linear(few, Weight(weight), tiling=Tiling(64, 8)), expected[:, :3])
        assert torch.equal(TRITON_OPS.linear(prompt, Weight(weight), tiling=UNTILED), expected)
    finally:
        setting.fp32_precision = before
    assert torch.equal(TRITON_OPS.linear(prompt, Weight(weight), tiling=Tiling(64, 64)), expected)
