"""`fastspec doctor`: facts about this machine, a short self-check, faults and their fixes.

A probe that raises an error becomes a line of the report. So `doctor` itself does not fail. `python -m
fastspec.cli.doctor` prints the same report if the command line cannot be imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

import fastspec
from fastspec.cli.probes import BUDGET, NEW_TOKENS, THIS_MACHINE, GpuFacts, Probes, gib
from fastspec.cli.progress import Progress

# the lowest versions of pyproject.toml: a checkout that is not installed has no metadata to read them from
FLOORS: Mapping[str, str] = {
    "torch": "2.11",
    "triton": "3.6",
    "transformers": "5",
    "safetensors": "0.5",
    "huggingface_hub": "1.0",
    "psutil": "5.9",
    "tqdm": "4.66",
    "typer": "0.15",
}
PYTHON_FLOOR = "3.10"
SEEN_ON_GPUS = "3.6"  # Triton version with which all GPU tests and measurements were run
# allowed absolute error of the attention kernel: twice the rounding error of its softmax weights and its output. The
# inputs have standard deviation 1, and outputs are at most about 4
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.008, torch.float32: 1e-4}
REPORT_IT = "if no line marked ! explains it, please report it with this whole text"

Status = Literal["ok", "note", "warn", "fail"]
MARKS: Mapping[Status, str] = {"ok": "ok", "note": "-", "warn": "!", "fail": "FAIL"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """One finding of a report. Status "fail": decoding does not work. "warn": the finding may explain a fault."""

    status: Status
    name: str
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        """Formats the finding as one line, and its fix as a second line."""
        fix = f"\n         fix: {self.fix}" if self.fix else ""
        return f"  {MARKS[self.status]:<5}{self.name}: {self.text}{fix}"


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a report: findings under a title."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `diagnose`. `str()` formats it for the terminal."""

    sections: tuple[Section, ...]

    @property
    def ok(self) -> bool:
        """True if decoding works on every checked device."""
        return all(line.status != "fail" for section in self.sections for line in section.lines)

    def to_json(self) -> str:
        """Returns {"ok": bool, "sections": [{"title", "lines": [{"status", "name", "text", "fix"}]}]} as text."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        """Formats the sections one after the other."""
        parts = ["\n".join([section.title, *map(str, section.lines)]) for section in self.sections]
        return "\n\n".join(parts)


def diagnose(
    device: torch.device | str | None = None,
    *,
    probes: Probes = THIS_MACHINE,
    tell: Callable[[str], object] = lambda stage: None,
) -> Report:
    """Checks this machine and decodes a few tokens on it. Takes some seconds and never raises.

    On a slow machine the report lists the checks that did not finish in time.

    Args:
        device: the only device to check. Default: every CUDA device, and the CPU.
        probes: functions that read the facts about this machine. Tests replace them.
        tell: called with the name of each check before it runs.
    """
    tell("looking at this machine")
    fix = "update the driver, or use device='cpu'"
    found = _attempt(probes.gpus, "CUDA", "warn" if str(device) == "cpu" else "fail", fix)
    gpus = () if isinstance(found, Line) else found
    by_name = {f"cuda:{gpu.index}": gpu for gpu in gpus}
    facts = [
        _section("versions", lambda: _version_lines(probes, bool(gpus))),
        _section("devices", lambda: _device_lines(probes, found)),
        _section("triton", lambda: _triton_lines(probes, gpus)),
    ]
    start = time.perf_counter()
    checks = {}
    for name in [*by_name, "cpu"] if device is None else [str(device)]:
        tell(f"self-check on {name}")
        lines = partial(_check_lines, name, by_name.get(_first(name)), probes)
        checks[name] = _section(name, lines, "fail").lines
    compiling = "; the first time, kernels are compiled" if gpus else ""
    took = Line("note", "time", f"{time.perf_counter() - start:.1f} s{compiling}")
    return Report(
        (
            *facts,
            Section("self-check", (*(line for lines in checks.values() for line in lines), took)),
            Section("in short", (*_working(checks), *_not_working(checks, gpus, probes))),
        )
    )


def _first(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _section(title: str, lines: Callable[[], Iterator[Line]], worst: Status = "warn") -> Section:
    """Returns a section of the report with the lines that `lines()` yields.

    If `lines()` raises an error, the section has one line with the error and the status `worst`.
    """
    made = _attempt(lambda: tuple(lines()), title, worst, REPORT_IT)
    return Section(title, (made,) if isinstance(made, Line) else made)


def release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version without trailing zeros: "2.13.0a0+git" gives (2, 13)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _attempt(probe: Callable[[], T], name: str, status: Status, fix: str) -> T | Line:
    """Returns the result of `probe`. If it raises, returns a line with the error and the given status, name and fix."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001  on a broken machine a probe may raise anything, and the report shows it
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        return Line(status, name, _without_home(text), fix)


def _has_triton(probes: Probes) -> bool:
    return isinstance(_attempt(partial(probes.version, "triton"), "triton", "warn", ""), str)


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def _version_lines(probes: Probes, on_gpu: bool) -> Iterator[Line]:
    yield Line("ok", "fastspec", fastspec.__version__)
    yield _version_line("Python", probes.python, PYTHON_FLOOR, f" on {probes.machine}", "install a newer Python")
    for package, floor in FLOORS.items():
        version = _attempt(partial(probes.version, package), package, "warn", f"pip install -U {package}")
        if isinstance(version, Line):
            yield version
        elif version is not None:
            build = f", {probes.torch_build()} build" if package == "torch" else ""
            yield _version_line(package, version, floor, build, f'pip install -U "{package}>={floor}"')
        elif package == "triton" and not probes.system.startswith("linux"):
            yield Line("note", package, "not installed; there is none for this system, so torch is used instead")
        elif package == "triton":
            text = "not installed; attention on CUDA uses the slower torch code"
            yield Line("warn" if on_gpu else "note", package, text, "pip install triton")
        else:
            yield Line("warn", package, f"not installed; needed: {floor} or newer", f"pip install {package}")
    missing = _attempt(probes.without_bytecode, "start", "note", REPORT_IT)
    if isinstance(missing, Line):
        yield missing
    elif missing:
        text = (
            f"no compiled files of {' and '.join(missing)} are kept, so every start compiles their sources, for seconds"
        )
        fix = "run python -m compileall -q on site-packages, or set PYTHONPYCACHEPREFIX to a folder that stays"
        yield Line("note", "start", text, f"{fix}; PYTHONDONTWRITEBYTECODE must not be set then")


def _version_line(name: str, version: str, floor: str, more: str, fix: str) -> Line:
    if release(version) >= release(floor):
        return Line("ok", name, f"{version}{more} (needed: {floor} or newer)")
    return Line("warn", name, f"{version}{more} is too old; needed: {floor} or newer", fix)


def _device_lines(probes: Probes, gpus: tuple[GpuFacts, ...] | Line) -> Iterator[Line]:
    name = _attempt(probes.cpu, "CPU", "warn", "pip install -U psutil")
    yield name if isinstance(name, Line) else Line("ok", "CPU", name)
    products = _attempt(probes.cpu_products, "CPU products", "warn", REPORT_IT)
    yield products if isinstance(products, Line) else Line("note", "CPU products", products)
    yield from _load_lines(probes)
    driver = _attempt(probes.driver, "driver", "warn", "reinstall the NVIDIA driver, or restart the machine")
    if isinstance(driver, Line):
        yield driver
        driver = "unknown"
    if isinstance(gpus, Line):
        yield gpus
        return
    build = probes.torch_build()
    for gpu in gpus:
        status, support, fix = _support(gpu, build)
        memory = f"{gib(gpu.free)} of {gib(gpu.total)} GiB free"
        shared = f"{gpu.shared // 1024} KiB shared memory per block"
        text = f"{gpu.name}, compute capability {_dotted(gpu)}, {memory}, driver {driver}, {shared}: {support}"
        yield Line(status, f"cuda:{gpu.index}", text, fix)
    if not gpus and driver not in (None, "unknown"):
        text = f"torch's {build} build finds no CUDA device, but there is an NVIDIA driver ({driver})"
        fix = "install a CUDA build of torch (pytorch.org names the line) that this driver can run"
        yield Line("warn", "CUDA", text, f"{fix}; check CUDA_VISIBLE_DEVICES")
    elif not gpus:
        yield Line("note", "CUDA", "no device; everything runs on the CPU")


def _load_lines(probes: Probes) -> Iterator[Line]:
    """Yields a line if other processes use cores that torch's threads need."""
    load = _attempt(probes.cpu_load, "CPU load", "note", "pip install -U psutil")
    if isinstance(load, Line):
        yield load
        return
    (busy, cores), threads = load, probes.torch_threads()
    free = max(1, round(cores - busy))
    if threads > free:
        text = f"other processes keep {busy:.1f} of {cores} cores busy, and torch has {threads} threads, which wait for"
        fix = f"set OMP_NUM_THREADS={free}, or torch.set_num_threads({free}); OMP_WAIT_POLICY=PASSIVE helps, too"
        yield Line("warn", "CPU load", f"{text} each other: decoding on the CPU is slow", fix)


def _dotted(gpu: GpuFacts) -> str:
    return ".".join(map(str, gpu.capability))


def _support(gpu: GpuFacts, build: str) -> tuple[Status, str, str | None]:
    """Returns (status, text, fix) of the line about a GPU. `build`: see `torch_build`."""
    if build.startswith("ROCm"):
        return "warn", "AMD devices are untested", "if it fails, use device='cpu'"
    if not gpu.generation.usable:
        return (
            "warn",
            "refused: 7.0 or newer is needed",
            "use device='cpu', or a GPU of compute capability 8.0 or newer",
        )
    if not gpu.generation.supported:
        return "warn", "untested, and float16 only", "pass dtype='float16'; if it fails, use device='cpu'"
    if gpu.generation.measured:
        return "ok", "supported and tested", None
    return "ok", "supported; tests run on 9.0", None


def _triton_lines(probes: Probes, gpus: tuple[GpuFacts, ...]) -> Iterator[Line]:
    if not _has_triton(probes):
        yield Line("note", "attention", "torch on every device, because triton is not installed")
        return
    if not gpus:
        yield Line("note", "attention", "torch: Triton kernels run on CUDA only, and the lines below are about them")
    elif release(str(probes.version("triton")))[:2] != release(SEEN_ON_GPUS):
        text = f"tested and measured on GPUs with Triton {SEEN_ON_GPUS} only; their speed with another is not known"
        yield Line("note", "kernels", text)
    worse: Status = "warn" if gpus else "note"
    cache = _attempt(probes.cache, "cache", worse, 'pip install -U "triton>=3.6"')
    yield cache if isinstance(cache, Line) else _cache_line(cache, worse)
    compiler = _attempt(probes.compiler, "C compiler", worse, "install gcc")
    if isinstance(compiler, Line):
        yield compiler
    elif compiler is None:
        text = "none found; Triton needs one at the first launch of a kernel"
        yield Line(worse, "C compiler", text, "install gcc (apt install gcc, dnf install gcc), or name one in CC")
    else:
        yield Line("ok", "C compiler", Path(compiler).name)
    headers = _attempt(probes.headers, "Python.h", worse, "install Python's development files")
    if isinstance(headers, Line):
        yield headers
    elif not headers:
        fix = "install Python's development files (apt install python3-dev, dnf install python3-devel)"
        yield Line(worse, "Python.h", "not found; Triton needs it at the first launch of a kernel", fix)


def _cache_line(cache: Path, worse: Status) -> Line:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    shown = _without_home(str(cache))
    if os.access(there, os.W_OK):
        return Line("ok", "cache", f"{shown} is writable")
    return Line(worse, "cache", f"{shown} is not writable", "set TRITON_CACHE_DIR to a directory that is")


def _check_lines(name: str, gpu: GpuFacts | None, probes: Probes) -> Iterator[Line]:
    """Runs the self-check on one device, and yields its findings.

    Args:
        name: name of the device for torch.
        gpu: properties of the device. None: it is the CPU, or torch does not list it.
        probes: functions that read the facts.
    """
    on_gpu = name.startswith("cuda")
    if gpu is not None and not gpu.generation.usable and not probes.torch_build().startswith("ROCm"):
        yield Line("fail", name, f"refused: compute capability {_dotted(gpu)}, 7.0 is the least", "use device='cpu'")
        return
    dtype = torch.float32 if not on_gpu else torch.bfloat16 if gpu and gpu.generation.supported else torch.float16
    fix = f"use device='cpu' meanwhile; {REPORT_IT}" if on_gpu else f"read the lines marked !; {REPORT_IT}"
    result = _attempt(lambda: probes.self_check(torch.device(name), dtype), name, "fail", fix)
    if isinstance(result, Line):
        yield result
        return
    kind = f"{NEW_TOKENS} greedy tokens in {str(dtype).removeprefix('torch.')} with the {result.pair}"
    if result.unfinished:
        text = f"not finished in {BUDGET:.0f} s: {', '.join(result.unfinished)}"
        yield Line("warn", f"{name} time", text, "this machine is slow or busy; run it again when it is idle")
    if result.equal is None:
        pass
    elif result.equal:
        yield Line("ok", f"{name} greedy", f"{kind}: speculative and plain text are equal")
    else:
        yield Line("fail", f"{name} greedy", f"{kind}: speculative and plain text DIFFER", REPORT_IT)
    for kind, stats in (("plain", result.plain), ("speculative", result.speculative), ("auto", result.auto)):
        if stats is not None:
            yield Line("note", f"{name} {kind}", str(stats))
    if result.repeated is None:
        pass
    elif result.repeated:
        yield Line("ok", f"{name} sampling", "two runs with one seed gave the same text")
    else:
        yield Line("fail", f"{name} sampling", "one seed gave two texts", REPORT_IT)
    if on_gpu and _has_triton(probes):
        yield from (_kernel_line(name, kernel_dtype, probes) for kernel_dtype in (dtype, torch.float32))


def _kernel_line(device: str, dtype: torch.dtype, probes: Probes) -> Line:
    name = f"{device} attention kernel, {str(dtype).removeprefix('torch.')}"
    measured = _attempt(lambda: probes.kernel_difference(torch.device(device), dtype), name, "fail", REPORT_IT)
    if isinstance(measured, Line):
        return measured
    text = f"differs from torch by {measured:.2g} at most (allowed: {TOLERANCE[dtype]:g})"
    if measured <= TOLERANCE[dtype]:  # False for NaN
        return Line("ok", name, text)
    return Line("fail", name, text, REPORT_IT)


def _working(checks: Mapping[str, tuple[Line, ...]]) -> Iterator[Line]:
    for name, lines in checks.items():
        if all(line.status in ("ok", "note") for line in lines):
            yield Line("ok", "works", f"greedy and sampled decoding, plain and speculative, on {name}")


def _not_working(checks: Mapping[str, tuple[Line, ...]], gpus: tuple[GpuFacts, ...], probes: Probes) -> Iterator[Line]:
    def will_not(text: str, fix: str) -> Line:
        return Line("note", "will not", text, fix)

    for name, lines in checks.items():
        for failed in (line for line in lines if line.status == "fail"):
            yield will_not(f"decode reliably on {name}: {failed.text}", failed.fix or REPORT_IT)
    for gpu in gpus:
        if gpu.generation.usable and not gpu.generation.supported:
            yield will_not(f"take bfloat16 on cuda:{gpu.index}", "pass dtype='float16'")
    if not gpus:
        system = "" if probes.system.startswith("linux") else "; its Triton kernels also need Linux"
        yield will_not("use a GPU here", f"an NVIDIA GPU of compute capability 8.0 or newer, with a CUDA torch{system}")
    elif not _has_triton(probes):
        yield will_not(
            "use its Triton kernel, or capture steps as CUDA graphs: slower torch code is used",
            "pip install triton, on Linux",
        )
    if probes.system == "darwin":
        yield will_not("run on Apple's GPU (MPS)", "use device='cpu', the default there")
    yield will_not("run Triton kernels on the CPU", "none needed: torch computes the same there")
    yield will_not(
        "split a hosted model over several GPUs (tensor_parallel) if transformers has no base_model_tp_plan for it",
        "one process per GPU, each with its own prompts",
    )
    yield will_not(
        "load weights quantised by bitsandbytes, HQQ, EXL3 or torchao",
        "compressed-tensors, AWQ, GPTQ, FP8 or NVFP4 weights, or 16-bit ones, which `fastspec quantize` rounds",
    )


if __name__ == "__main__":
    with Progress() as progress:
        report = diagnose(tell=progress.stage)
    sys.stdout.write(f"{report}\n")
    sys.exit(not report.ok)
