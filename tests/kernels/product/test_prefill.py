"""The product of prompt chunks against its torch twin: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices
from tests.helpers.modules import module_output
from tests.helpers.products import product_case, widened

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.product import prefill
from fastspec.kernels.product import prefill_sm90 as hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NAN = float("nan")
EPILOGUES = ["plain", "bias", "residual", "norm", "norm+bias+residual", "gated", "norm+gated", "fp32"]
# the interpreter has no bf16 products
DTYPES = {"cpu": [torch.float16], "cuda": [torch.float16, torch.bfloat16]}


def packed(rows: Tensor, gated: bool) -> Weight:
    """A packed weight of rows that are interleaved already, of any dtype and any K that is a multiple of 32."""
    n, k = rows.shape
    return Weight(rows.view(n // 16, 16, k // 32, 32).transpose(1, 2).contiguous(), "packed", gated)


def case(
    rows: int, n: int, k: int, dtype: torch.dtype, device: str, epilogue: str = "plain", seed: int = 0
) -> tuple[Tensor, Weight, dict[str, Any]]:
    """x, packed weight and keyword arguments of one call."""
    x, weight, arguments = product_case(rows, n, k, dtype, device, epilogue, seed, residual_width=n)
    return x, packed(weight, "gated" in epilogue), arguments


def error_and_bound(ours: Tensor, x: Tensor, weight: Weight, arguments: dict[str, Any]) -> tuple[float, float]:
    wide = {name: widened(value) for name, value in arguments.items() if name != "out_dtype"}
    truth = reference.prefill_linear(x.double(), widened(weight), **wide)
    torchs = (reference.prefill_linear(x, weight, **arguments).double() - truth).abs().max().item()
    # the rule of the house: twice what torch itself errs by; floored at a few fp32 ulp of values near four, for
    # torch's own sums may by chance be exact. Where the result is fp32 torch adds in IEEE fp32, and a tensor core cuts
    # off: up to 2^-23 of the running sum at each of K / 16 additions, half of that on average
    cut = x.shape[-1] / 16 * 2**-24 * truth.abs().max().item() if ours.dtype == torch.float32 else 0.0
    return (ours.double() - truth).abs().max().item(), max(2 * torchs, 4e-6, cut)


def test_the_twin_reads_packed_rows() -> None:
    """Against a loop over the definition: W[n, k] is weight[n // 16, k // 32, n % 16, k % 32]."""
    weight = torch.arange(2 * 2 * 16 * 32, dtype=torch.float32).view(2, 2, 16, 32)
    rows = reference.prefill_linear(torch.eye(64), Weight(weight, "packed")).t()
    for n, k in ((0, 0), (1, 0), (0, 31), (0, 32), (17, 40), (31, 63)):
        assert rows[n, k] == weight[n // 16, k // 32, n % 16, k % 32]
    gate, up = rows.view(2, 2, 8, 64).unbind(1)
    expected = torch.nn.functional.silu(gate.reshape(16, 64)) * up.reshape(16, 64)
    assert torch.equal(
        reference.prefill_linear(torch.eye(64), Weight(weight, "packed", True), gated=True).t(), expected
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 128), (70, 80, 64), (130, 272, 128)])
def test_the_kernel_equals_its_torch_definition(rows: int, n: int, k: int, epilogue: str, device: str) -> None:
    for dtype in DTYPES[device]:
        x, weight, arguments = case(rows, n, k, dtype, device, epilogue)
        ours = prefill.prefill_linear(x, weight, **arguments)
        assert ours.dtype == arguments.get("out_dtype", dtype)
        error, bound = error_and_bound(ours, x, weight, arguments)
        assert error <= bound, dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_the_kernel_equals_its_torch_definition_at_real_sizes(dtype: torch.dtype, epilogue: str) -> None:
    for rows, n, k in ((17, 4096, 4096), (64, 6144, 2048), (256, 4096, 4096), (1000, 10240, 2048), (2100, 2064, 1152)):
        x, weight, arguments = case(rows, n, k, dtype, "cuda", epilogue)
        error, bound = error_and_bound(prefill.prefill_linear(x, weight, **arguments), x, weight, arguments)
        assert error <= bound, (rows, n, k)


@pytest.mark.parametrize("device", devices())
def test_every_tile_of_the_table(device: str) -> None:
    """What one device never takes by its rows or its memory."""
    x, weight, _arguments = case(150, 304, 128, torch.float16, device)
    truth = reference.prefill_linear(x.double(), widened(weight))
    for launch in {entry for table in prefill.LAUNCH.values() for _, entry in table}:
        out = torch.full((150, 304), NAN, dtype=torch.float16, device=device)
        prefill.run(x, weight, None, None, out, False, launch)
        # one rounding of values below 8 to fp16 is at most 2^-9
        assert (out.double() - truth).abs().max().item() <= 2**-9, launch


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("tile", hopper.TILES, ids=str)
def test_every_tile_of_hopper(tile: hopper.PrefillTile, epilogue: str) -> None:
    """Rings shorter and longer than a tile is deep, programs with no tile, one and several, edges on both sides."""
    for rows, n, k, programs in ((1, 48, 64, 132), (150, 1072, 64, 3), (300, 560, 1152, 1), (130, 2576, 2048, 132)):
        x, weight, arguments = case(rows, n, k, torch.bfloat16, "cuda", epilogue)
        normed, out_dtype = arguments.pop("norm", None), arguments.pop("out_dtype", torch.bfloat16)
        gated = arguments.pop("gated", False)
        if normed:
            x = reference.rms_norm(x, *normed)
        out = torch.full((rows, n // 2 if gated else n), NAN, dtype=out_dtype, device="cuda")
        bias, residual = arguments.get("bias"), arguments.get("residual")
        hopper.run(x, weight, bias, residual, out, gated, tile, programs)
        error, bound = error_and_bound(out, x, weight, {**arguments, "gated": gated, "out_dtype": out_dtype})
        assert error <= bound, (rows, n, k)


def test_calls_reach_every_tile_of_hopper() -> None:
    """And each gated and not: tests/kernels/test_compile.py looks at what they compile to."""
    reports = module_output("tests.helpers.compile_launches", "90", "prompts")
    found = {
        (each["constants"]["ROWS"], each["constants"]["COLUMNS"], each["constants"]["GATED"])
        for each in reports
        if each["kernel"] == "_hopper_kernel"
    }
    assert found == {(tile.rows, tile.columns, gated) for tile in hopper.TILES for gated in (False, True)}


@pytest.mark.gpu
def test_a_new_number_of_rows_compiles_nothing() -> None:
    """But for the few tiles there are: prompts come in every length."""
    from triton import knobs

    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["repr"])
    try:
        for rows in (1, 2, 15, 16, 17, 100, 128, 129, 333, 512, 800, 1111):
            x, weight, arguments = case(rows, 272, 192, torch.bfloat16, "cuda", "norm")
            prefill.prefill_linear(x, weight, **arguments)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert 1 <= len(compiled) <= 1 + max(len(hopper.TILES), *map(len, prefill.LAUNCH.values()))


@pytest.mark.parametrize("device", devices())
def test_rows_keep_to_themselves(device: str) -> None:
    """NaN in a row stays there, strided and offset rows are read where they are, and every element is written."""
    x, weight, _ = case(20, 80, 64, torch.float16, device)
    clean = prefill.prefill_linear(x, weight)
    wide = torch.full((20, 3, 67), NAN, dtype=torch.float16, device=device)
    wide[:, 1, 3:] = x
    assert torch.equal(prefill.prefill_linear(wide[:, 1, 3:], weight), clean)
    assert torch.equal(prefill.prefill_linear(x.view(4, 5, 64), weight).view(20, 80), clean)
    x[7] = NAN
    spoiled = prefill.prefill_linear(x, weight)
    assert spoiled[7].isnan().all()
    others = torch.arange(20, device=device) != 7
    assert torch.equal(spoiled[others], clean[others])


def test_tables_fit_their_devices() -> None:
    for least, table in prefill.LAUNCH.items():
        assert table[-1][0] == 0
        for _, launch in table:
            assert launch.shared <= max(least, 99 * 1024)
    assert prefill.launch_of(10**6, 101_376) == prefill.LAUNCH[0][-1][1]
    assert prefill.launch_of(1, 232_448) == prefill.LAUNCH[200_000][0][1]
    for rows in (1, 64, 200, 1024, 5000):
        assert hopper.tile_of(rows, 4096, 132) in hopper.TILES


def test_wrong_arguments_are_refused_by_name() -> None:
    x, weight, _ = case(2, 16, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match="pack it first"):
        prefill.prefill_linear(x, Weight(weight.unpack()))
    with pytest.raises(ValueError, match="wanted both"):
        prefill.prefill_linear(x.float(), Weight(weight.data.float(), "packed"))
    with pytest.raises(ValueError, match="K a multiple of 64"):
        prefill.prefill_linear(x[:, :32], Weight(weight.data[:, :1].contiguous(), "packed"))
    with pytest.raises(ValueError, match="gated"):
        prefill.prefill_linear(x, weight, gated=True, residual=x)
    with pytest.raises(ValueError, match="residual"):
        prefill.prefill_linear(x, weight, residual=x)
    assert prefill.prefill_linear(x[:0], weight).shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bias": torch.ones(3)}, r"bias is float32 \[3\]; wanted contiguous float32 \[16\]"),
        ({"bias": torch.ones(32)[::2]}, r"strides \[2\].*pass bias.contiguous"),
        ({"norm": (torch.ones(3), 1e-5)}, r"norm\[0\] is float32 \[3\]"),
        ({"norm": (torch.ones(128)[::2], 1e-5)}, r"norm\[0\].*strides"),
    ],
)
def test_what_would_be_misread_is_refused(change: dict[str, Any], match: str) -> None:
    x, weight, _ = case(2, 16, 64, torch.float16, "cpu")
    with pytest.raises(ValueError, match=match):
        prefill.prefill_linear(x, weight, **change)
