"""The doctor on machines made of probes, and on this one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

import fastspec
from fastspec.cli.app import app
from fastspec.cli.doctor import (
    FLOORS,
    PYTHON_FLOOR,
    TOLERANCE,
    Line,
    Report,
    Section,
    diagnose,
    release,
)
from fastspec.cli.probes import THIS_MACHINE, Check, GpuFacts, Probes, kernel_difference, self_check, without_bytecode
from fastspec.models.checkpoints.quantised.configs import SUPPORTED, UNSUPPORTED
from fastspec.output import RowStats, Stats

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton ships for Linux only")
STATS = Stats.of((RowStats(12, 0, 48, 36, 48, 0, (0, 0, 0, 12, 0)),), 4, 0.5)
GOOD = Check("shipped pair", equal=True, repeated=True, plain=STATS, speculative=STATS)
VERSIONS = {name: f"{floor}.9" for name, floor in FLOORS.items()}
H100 = GpuFacts(0, "H100", (9, 0), 70 * 2**30, 80 * 2**30, 227 * 1024)
T4 = GpuFacts(0, "T4", (7, 5), 14 * 2**30, 15 * 2**30, 64 * 1024)
P40 = GpuFacts(0, "P40", (6, 1), 22 * 2**30, 24 * 2**30, 48 * 1024)


def machine(**changes: Any) -> Probes:
    """A healthy Linux machine without a GPU, with some facts changed."""
    healthy = Probes(
        system="linux",
        machine="Linux 6",
        python="3.12.1",
        version=VERSIONS.get,
        without_bytecode=tuple,
        torch_build=lambda: "CUDA 13.0",
        driver=lambda: None,
        cpu=lambda: "some CPU, 8 cores",
        cpu_products=lambda: "packed by oneDNN; one thread reads 12.0 GB/s",
        cpu_load=lambda: (0.4, 8),
        torch_threads=lambda: 8,
        gpus=tuple,
        cache=lambda: Path("/"),
        compiler=lambda: "/usr/bin/gcc",
        headers=lambda: True,
        self_check=lambda device, dtype: GOOD,
        kernel_difference=lambda device, dtype: 0.0,
    )
    return replace(healthy, **changes)


def with_gpu(gpu: GpuFacts, **changes: Any) -> Probes:
    return machine(gpus=lambda: (gpu,), driver=lambda: "580.1", **changes)


def lacking(*packages: str) -> Any:
    return {name: version for name, version in VERSIONS.items() if name not in packages}.get


def lines(report: Report, name: str) -> list[Line]:
    return [line for section in report.sections for line in section.lines if line.name == name]


def line(report: Report, name: str) -> Line:
    (found,) = lines(report, name)
    return found


def refusals(report: Report) -> str:
    return "\n".join(f"{found.text} -> {found.fix}" for found in lines(report, "will not"))


def raises(error: Exception) -> Any:
    def probe(*_: object) -> NoReturn:
        raise error

    return probe


def test_this_machine_decodes_on_its_cpu() -> None:
    report = diagnose("cpu")
    assert report.ok, str(report)
    assert line(report, "fastspec").text == fastspec.__version__
    assert torch.__version__.split("+")[0] in line(report, "torch").text
    assert line(report, "CPU").status == "ok"
    assert "48 greedy tokens in float32" in line(report, "cpu greedy").text
    assert "48 tokens in" in line(report, "cpu plain").text
    assert re.search(r"acceptance \d", line(report, "cpu speculative").text)
    assert "k = auto (" in line(report, "cpu auto").text
    assert line(report, "works").text.endswith("on cpu")
    assert [section.title for section in report.sections] == ["versions", "devices", "triton", "self-check", "in short"]


@pytest.mark.parametrize(
    ("busy", "cores", "threads", "free"),
    [(0.4, 8, 8, None), (2.1, 8, 4, None), (2.0, 2, 1, None), (2.0, 2, 2, 1), (5.0, 8, 8, 3), (8.0, 8, 2, 1)],
)
def test_threads_that_wait_for_busy_cores_are_named(busy: float, cores: int, threads: int, free: int | None) -> None:
    report = diagnose("cpu", probes=machine(cpu_load=lambda: (busy, cores), torch_threads=lambda: threads))
    if free is None:
        assert lines(report, "CPU load") == []
        return
    found = line(report, "CPU load")
    assert found.status == "warn"
    assert found.text.startswith(f"other processes keep {busy:.1f} of {cores} cores busy, and torch has {threads} ")
    assert (found.fix or "").startswith(f"set OMP_NUM_THREADS={free}, or torch.set_num_threads({free})")
    assert report.ok


def test_what_it_says_of_quantised_weights_is_so() -> None:
    (said,) = (each for each in lines(diagnose("cpu"), "will not") if "quantised by" in each.text)
    named = set(re.split(", | or ", said.text.partition("quantised by ")[2].lower()))
    assert len(named) == 4
    assert named <= set(UNSUPPORTED)
    read = {"compressed-tensors", "awq", "gptq", "fp8"}
    assert read <= {each.strip() for each in said.fix.lower().partition(" or ")[0].split(",")}
    assert read <= set(SUPPORTED.split(", "))


def test_the_check_leaves_torchs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    self_check(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_start_that_compiles_sources_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lines(diagnose(probes=machine()), "start")
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path))
    assert without_bytecode()[0] == "torch"
    kept = Path(cache_from_source(str(torch.__file__)))
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert "torch" not in without_bytecode()
    found = line(diagnose(probes=machine(without_bytecode=lambda: ("torch", "transformers"))), "start")
    assert (found.status, "of torch and transformers are kept" in found.text) == ("note", True)
    assert "PYTHONPYCACHEPREFIX" in str(found.fix)


def test_floors_are_those_of_pyproject() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.split("\ndependencies = [")[1].split("\n]")[0]
    assert dict(re.findall(r'"(\w+)>=([\d.]+)', listed)) == dict(FLOORS)
    assert f'requires-python = ">={PYTHON_FLOOR}"' in text


@pytest.mark.parametrize(
    ("older", "newer"),
    [("2.9", "2.11"), ("2.9.1+cu130", "2.11"), ("4.57.3", "5"), ("0.4.9", "0.5"), ("2.10.99", "2.11.0a0+git1234")],
)
def test_versions_compare_by_number(older: str, newer: str) -> None:
    assert release(older) < release(newer)


@pytest.mark.parametrize(("one", "other"), [("5", "5.0.0"), ("2.11", "2.11.0+cpu"), ("1.0", "1")])
def test_trailing_zeros_do_not_count(one: str, other: str) -> None:
    assert release(one) == release(other)


def test_an_old_version_is_flagged_with_its_fix() -> None:
    versions = {**VERSIONS, "torch": "2.9.1+cpu"}
    found = line(diagnose(probes=machine(version=versions.get, python="3.9.2")), "torch")
    assert found.status == "warn"
    assert "2.9.1+cpu, CUDA 13.0 build is too old; needed: 2.11 or newer" in found.text
    assert found.fix == 'pip install -U "torch>=2.11"'
    assert line(diagnose(probes=machine(python="3.9.2")), "Python").status == "warn"


def test_a_missing_package_is_told() -> None:
    found = line(diagnose(probes=machine(version=lacking("safetensors"))), "safetensors")
    assert (found.status, found.fix) == ("warn", "pip install safetensors")


@pytest.mark.parametrize(("version", "told"), [("3.6.0", False), ("3.6.1", False), ("3.9.0", True), ("4.0", True)])
def test_a_triton_that_no_figure_is_of_is_told(version: str, told: bool) -> None:
    versions: Any = {**VERSIONS, "triton": version}.get
    assert bool(lines(diagnose(probes=with_gpu(H100, version=versions)), "kernels")) == told
    assert not lines(diagnose(probes=machine(version=versions)), "kernels")


def test_missing_triton_is_told_where_it_matters() -> None:
    def kernel_check(device: torch.device, dtype: torch.dtype) -> NoReturn:
        raise AssertionError("there is no kernel to check")

    on_gpu = diagnose(probes=with_gpu(H100, version=lacking("triton"), kernel_difference=kernel_check))
    assert on_gpu.ok
    assert (line(on_gpu, "triton").status, line(on_gpu, "triton").fix) == ("warn", "pip install triton")
    assert "use its Triton kernel" in refusals(on_gpu)
    on_windows = line(diagnose(probes=machine(system="win32", version=lacking("triton"))), "triton")
    assert (on_windows.status, on_windows.fix) == ("note", None)
    assert "torch is used instead" in on_windows.text


def test_a_hopper_gpu_is_described_and_checked() -> None:
    asked: list[tuple[str, torch.dtype]] = []

    def check(device: torch.device, dtype: torch.dtype) -> Check:
        asked.append((str(device), dtype))
        return GOOD

    report = diagnose(probes=with_gpu(H100, self_check=check))
    assert report.ok
    assert asked == [("cuda:0", torch.bfloat16), ("cpu", torch.float32)]
    for part in ("H100", "capability 9.0", "70.0 of 80.0 GiB", "driver 580.1", "227 KiB", "supported and tested"):
        assert part in line(report, "cuda:0").text
    assert len([name for name in ("bfloat16", "float32") if lines(report, f"cuda:0 attention kernel, {name}")]) == 2
    assert [found.text.rsplit(" ", 1)[1] for found in lines(report, "works")] == ["cuda:0", "cpu"]


def test_an_old_gpu_takes_float16_only() -> None:
    asked: list[torch.dtype] = []

    def check(device: torch.device, dtype: torch.dtype) -> Check:
        asked.append(dtype)
        return GOOD

    report = diagnose("cuda", probes=with_gpu(T4, self_check=check))
    assert asked == [torch.float16]
    assert "untested, and float16 only" in line(report, "cuda:0").text
    assert "take bfloat16 on cuda:0 -> pass dtype='float16'" in refusals(report)


def test_a_gpu_below_the_least_capability_is_not_even_tried() -> None:
    def check(device: torch.device, dtype: torch.dtype) -> Check:
        assert device.type == "cpu", "a refused device was used"
        return GOOD

    probes = with_gpu(P40, self_check=check)
    report = diagnose(probes=probes)
    assert not report.ok
    assert "decode reliably on cuda:0: refused: compute capability 6.1" in refusals(report)
    assert diagnose("cpu", probes=probes).ok


def test_a_driver_without_a_cuda_torch_is_told() -> None:
    found = line(diagnose(probes=machine(driver=lambda: "535.2", torch_build=lambda: "CPU")), "CUDA")
    assert found.status == "warn"
    assert "torch's CPU build finds no CUDA device, but there is an NVIDIA driver (535.2)" in found.text
    assert found.fix is not None
    assert "CUDA build of torch" in found.fix


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"compiler": lambda: None}, "C compiler", "install gcc"),
        ({"headers": lambda: False}, "Python.h", "python3-dev"),
        ({"cache": lambda: Path("/proc/none")}, "cache", "TRITON_CACHE_DIR"),
    ],
)
def test_what_triton_needs(changes: dict[str, Any], name: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/proc")  # root may write anywhere
    found = line(diagnose(probes=with_gpu(H100, **changes)), name)
    assert found.status == "warn"
    assert fix in (found.fix or "")


def test_a_failing_self_check_is_named() -> None:
    report = diagnose(probes=machine(self_check=raises(ZeroDivisionError("by\nzero"))))
    assert not report.ok
    assert line(report, "cpu").text == "ZeroDivisionError: by zero"
    assert "decode reliably on cpu: ZeroDivisionError: by zero" in refusals(report)
    assert lines(report, "works") == []
    assert "FAIL cpu: ZeroDivisionError" in str(report)


@pytest.mark.parametrize(("name", "what"), [("equal", "DIFFER"), ("repeated", "two texts")])
def test_unequal_texts_fail(name: str, what: str) -> None:
    report = diagnose(probes=machine(self_check=lambda device, dtype: replace(GOOD, **{name: False})))
    assert not report.ok
    assert what in refusals(report)


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_a_wrong_kernel_fails(difference: float) -> None:
    report = diagnose(probes=with_gpu(H100, kernel_difference=lambda device, dtype: difference))
    assert not report.ok
    assert "differs from torch by" in refusals(report)


@pytest.mark.parametrize("probe", ["version", "torch_build", "driver", "cpu", "gpus", "cache", "compiler", "headers"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_probe_can_make_the_doctor_fail(probe: str, device: str | None) -> None:
    probes = machine(**{probe: raises(OSError(f"{Path.home()}/secret is gone"))})
    if probe != "gpus":
        probes = replace(probes, gpus=lambda: (H100,))
    text = str(diagnose(device, probes=probes))
    assert "OSError: ~/secret is gone" in text
    assert str(Path.home() / "secret") not in text
    if device == "cpu":
        assert diagnose(device, probes=probes).ok


@pytest.mark.parametrize("device", ["tpu", "", "mps"])
def test_an_unknown_device_is_a_finding(device: str) -> None:
    assert not diagnose(device, probes=machine(self_check=THIS_MACHINE.self_check)).ok


def test_report_as_text_and_json() -> None:
    report = Report((Section("one", (Line("ok", "a", "fine"), Line("warn", "b", "old", "renew it"))),))
    assert str(report) == "one\n  ok   a: fine\n  !    b: old\n         fix: renew it"
    parsed = json.loads(report.to_json())
    assert parsed["ok"] is True
    assert parsed["sections"][0]["lines"][1] == {"status": "warn", "name": "b", "text": "old", "fix": "renew it"}


def test_the_command() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--device", "cpu"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["ok"] is True
    refused = CliRunner().invoke(app, ["doctor", "--device", "tpu"])
    assert refused.exit_code == 1
    assert "FAIL tpu: RuntimeError" in refused.stdout


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is bound to its compiler here")
def test_the_kernel_check_in_the_interpreter() -> None:
    assert kernel_difference(torch.device("cpu"), torch.float32) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_this_machines_gpu() -> None:
    report = diagnose()
    assert report.ok, str(report)
    assert torch.cuda.get_device_name(0) in line(report, "cuda:0").text
    if find_spec("triton") is not None:
        kernels = [x for section in report.sections for x in section.lines if "attention kernel" in x.name]
        assert kernels
        assert all(found.status == "ok" for found in kernels), str(report)
