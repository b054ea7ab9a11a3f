"""Rounding and packing in one launch, against their definition: to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastspec import demo_pair
from fastspec.kernels.common import rounding
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import FORMATS, kind_for
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import round_codes
from fastspec.kernels.round_codes import pack_rounded

BF16, CPU = torch.bfloat16, torch.device("cpu")
GROUPS = (32, 64, 128)
FORMS = [*(("int4", group) for group in GROUPS), ("int8", 0), ("fp8", 0)]


def kind(form: str, group: int, width: int) -> CodesKind:
    return CodesKind(form, (1, group or width))  # type: ignore[arg-type]


def check(values: Tensor, kind: CodesKind, gated: bool = False, runs: tuple[int, ...] = ()) -> PackedCodes:
    """What the kernel packs, a number of rows at a time, is what the definition packs, on its device and on a CPU."""
    shape = (values.shape[0], values.shape[1])
    found, wanted, whole = (
        PackedCodes.empty(shape, kind, gated, device) for device in (values.device, CPU, values.device)
    )
    found.fill_rounded(_runs(values, gated, runs), pack_rounded)
    wanted.fill_rounded(_runs(values.cpu(), gated, runs), rounding.pack_rounded)
    whole.fill(rounding.rounded(values, kind))
    for other in (wanted, whole):
        assert found.form == other.form == kind.format
        assert torch.equal(found.words.cpu(), other.words.cpu())
        assert torch.equal(found.factors.cpu(), other.factors.cpu())
        assert (found.scales is None) == (other.scales is None) == (kind.format != "int4")
        if found.scales is not None and other.scales is not None:
            assert found.scales.dtype == other.scales.dtype
            assert torch.equal(found.scales.cpu(), other.scales.cpu())
    return found


def _runs(values: Tensor, gated: bool, sizes: tuple[int, ...]) -> list[tuple[int, Tensor]]:
    found, first = [], 0
    for size in sizes or (len(values),):
        part = values.unflatten(0, (2, -1))[:, first // 2 : (first + size) // 2].flatten(0, 1)
        found.append((first // 16, part if gated else values[first : first + size]))
        first += size
    return found


@pytest.fixture
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for each; the last one of some has less than all its rows."""
    if device == "cpu":
        monkeypatch.setattr(round_codes, "ROWS", 32)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("dtype", "gated"), [(BF16, True), (BF16, False), (torch.float16, False), (torch.float32, True)]
)
@pytest.mark.parametrize(("form", "group"), FORMS)
def test_rounding_random_values_equals_the_definition(
    form: str, group: int, dtype: torch.dtype, gated: bool, device: str
) -> None:
    """Of rows of all sizes, in runs, and of a width that leaves a part of a block."""
    generator = torch.Generator().manual_seed(0)
    width = 1152 if dtype == BF16 else 128
    values = torch.randn(64, width, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    check(values.to(device, dtype), kind(form, group, width), gated, (16, 48))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("form", "group"), FORMS)
def test_rounding_extreme_values_equals_the_definition(form: str, group: int, device: str) -> None:
    """Zeros, one huge value, subnormal numbers, the largest there are, and halves between codes."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(32, 256, generator=generator)
    values[0] = 0.0
    values[1, :128], values[2] = 0.0, -0.0
    values[3, 7], values[4, 200] = 1e4, -3e38
    values[5:8] *= 1e-39
    values[8, 3:] = 0.0
    values[9], values[10] = 1e-45, 9.2e-41
    values[11] = torch.finfo(BF16).max
    values[12] = values[12].sign()  # all as large
    values[13] = torch.arange(256) / 2 - 63.5
    values[14] = (torch.arange(256) % 16 - 8) / 2
    values[15] = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    values[16] = values[15] * 1.0625
    values[17:20] = torch.randn(3, 256, generator=generator) * torch.logspace(-38, 38, 256)
    values[20], values[20, 5] = 0.0, -7.0  # -7 and -8 of int4 by two scales, and both as they are: the first wins
    found = check(values.to(device, BF16), kind(form, group, 256))
    zeros = found.dequantise(torch.float32)[[0, 2]]
    assert torch.equal(zeros, torch.zeros_like(zeros))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("device", devices())
def test_numbers_between_codes_of_fp8(device: str) -> None:
    """Every bf16 up to the largest code, in most rows under a scale of one: ties go to even codes, and signs stay."""
    bits = torch.arange(0, 0x43E1, dtype=torch.int32)  # 448
    values = torch.cat((bits, bits | 0x8000)).to(torch.uint16).view(BF16)
    rows = torch.zeros(len(values) // 120 // 16 * 16 + 16, 128, dtype=BF16)
    rows[:, 120] = 448.0
    spread = torch.zeros(rows.shape[0] * 120, dtype=BF16)
    spread[: len(values)] = values
    rows[:, :120] = spread.view(-1, 120)
    check(rows.to(device), kind("fp8", 0, 128))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMATS)
def test_rounding_the_shipped_draft_equals_the_definition(form: str, device: str) -> None:
    """Of its last layer each matrix that has a packed form."""
    tensors = load_file(Path(demo_pair()[1]) / "model.safetensors")
    last = max(name for name in tensors if name.endswith("mlp.down_proj.weight")).split("mlp")[0]
    checked = 0
    for name, tensor in tensors.items():
        found = kind_for(form, (tensor.shape[0], tensor.shape[1])) if tensor.dim() == 2 else None
        if name.startswith(last) and found is not None and tensor.shape[1] % 128 == 0:
            check(tensor.to(device, BF16), found)
            checked += 1
    assert checked >= 5
