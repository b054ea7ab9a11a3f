"""Probes of `fastspec doctor`: one small function for each fact, which tests can replace.

A probe may raise; the doctor writes the error into its report.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import torch

from fastspec.demo import demo_pair
from fastspec.kernels import reference
from fastspec.kernels.cpu.blocked import is_supported
from fastspec.kernels.gpu import Gpu
from fastspec.output import Stats
from fastspec.shapes import AttentionRule
from fastspec.torch_settings import using_threads

NEW_TOKENS = 48
PROMPT = "def main():\n"
_GREEDY = ("plain", "speculative", "auto")  # runs of `self_check` that must give the same text
BUDGET = 30.0  # seconds that `self_check` may decode on one device


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Properties of one GPU as torch reports them.

    `free` and `total` are bytes of its memory. `shared` is the number of bytes of shared memory of a CTA.
    """

    index: int
    name: str
    capability: tuple[int, int]
    free: int
    total: int
    shared: int

    @property
    def generation(self) -> Gpu:
        """Compute capability of this device as a `Gpu`, without its number of SMs."""
        return Gpu(self.capability, 0)


@dataclass(frozen=True, slots=True)
class Check:
    """Result of `self_check`.

    Attributes:
        pair: name of the pair of models that ran.
        equal: True if all greedy runs gave the same text. None: fewer than two were completed.
        repeated: True if two sampled runs with one seed gave the same text. None: they were not completed.
        plain, speculative, auto: statistics of the greedy runs without drafts, with 4 drafts per step, and with
            num_speculative_tokens="auto". None: there was no time for the run.
        unfinished: names of the comparisons and runs that were not completed.
    """

    pair: str
    equal: bool | None
    repeated: bool | None
    plain: Stats | None
    speculative: Stats | None
    auto: Stats | None = None
    unfinished: tuple[str, ...] = ()


class _Deadline:
    """Streamer that ends `generate` after a time limit by raising `Passed`."""

    class Passed(Exception):
        """Raised by `put` after the time limit."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock, self._end = clock, clock() + seconds

    def put(self, value: object) -> None:
        """Raises Passed after the time limit. Ignores the tokens."""
        if self._clock() > self._end:
            raise self.Passed

    def end(self) -> None:
        """Does nothing."""


def gib(size: int) -> str:
    """Formats bytes as GiB."""
    return f"{size / 2**30:.1f}"


def installed_version(package: str) -> str | None:
    """Returns the version of an installed distribution. None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def without_bytecode() -> tuple[str, ...]:
    """Returns the names of large imported packages without compiled .pyc files.

    Python compiles the sources of these packages again at each start.
    """
    modules = {name: sys.modules.get(name) for name in ("torch", "transformers")}
    files = {name: module.__file__ for name, module in modules.items() if module is not None and module.__file__}
    return tuple(name for name, file in files.items() if not os.path.exists(cache_from_source(file)))


def torch_build() -> str:
    """Returns the platform of the torch build: "CPU", "CUDA 13.0" or "ROCm 7.0"."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def nvidia_driver() -> str | None:
    """Returns the driver version that nvidia-smi reports, even if torch cannot use the driver.

    Returns None if there is no nvidia-smi.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
    return next(iter(done.stdout.splitlines()), None)


def cpu_products() -> str:
    """Describes how matrix products run on the CPU, and the rate at which one thread reads memory."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    packed = [name for dtype, name in names.items() if is_supported(dtype)]
    values = torch.ones(2**24, dtype=torch.float32, device="cpu")
    with using_threads(1):
        values.sum()
        start = time.perf_counter()
        values.sum()
        rate = values.nbytes / (time.perf_counter() - start) / 1e9
    amx, bf16 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    hardware = "bf16 by AMX" if amx else "bf16 by AVX-512" if bf16 else "bf16 emulated: float32 is faster"
    found = f"packed by oneDNN in {' and '.join(packed)}" if packed else "8 rows at a time: no oneDNN here"
    return f"{found}; {hardware}; one thread reads {rate:.1f} GB/s"


def cpu() -> str:
    """Describes the CPU: name, cores and memory."""
    import psutil

    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = named[1].strip() if named else platform.processor() or platform.machine()
    memory = psutil.virtual_memory()
    cores = f"{os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads"
    return f"{name}, {cores}, {gib(memory.available)} of {gib(memory.total)} GiB memory free"


def cpu_load() -> tuple[float, int]:
    """Returns (number of cores that are busy now, number of cores), while this process sleeps for a moment."""
    import psutil

    cores = psutil.cpu_count() or 1
    return psutil.cpu_percent(interval=0.3) / 100 * cores, cores


def gpus() -> tuple[GpuFacts, ...]:
    """Returns every CUDA device that torch can use."""
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuFacts(index, properties.name, (properties.major, properties.minor), free, total, shared))
    return tuple(found)


def triton_cache() -> Path:
    """Returns the folder of kernels that Triton has compiled."""
    import triton

    return Path(triton.knobs.cache.dir)


def c_compiler() -> str | None:
    """Returns the path of the C compiler that Triton will use. None if there is none."""
    import triton

    asked: str | None = triton.knobs.build.cc  # set by the environment variable CC
    return shutil.which(asked) if asked else shutil.which("gcc") or shutil.which("clang")


def python_headers() -> bool:
    """True if Python.h is installed. Triton needs it to compile its launcher."""
    return Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def kernel_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the largest absolute difference between results of the Triton attention kernel and of torch.

    torch computes the same attention in fp32 on the CPU.
    """
    from fastspec.kernels.attention.prefill import paged_attention

    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    given = {
        "query": normal(2, 5, 8, 64),  # [B, Q, H, D]
        "keys": normal(11, 64, 2, 64),  # [pages, page_size, Hkv, D]
        "values": normal(11, 64, 2, 64),
        "block_table": torch.arange(1, 11, device="cpu").view(2, 5),
        "positions": torch.stack([torch.arange(at, at + 5, device="cpu") for at in (0, 295)]),
    }
    there: dict[str, Any] = {name: x.to(device) for name, x in given.items()}
    wide: dict[str, Any] = {name: x.float() if x.is_floating_point() else x for name, x in given.items()}
    ours = paged_attention(**there, num_blocks=2, rule=AttentionRule())
    twin = reference.paged_attention(**wide, num_blocks=2, rule=AttentionRule())
    return (ours.cpu().float() - twin).abs().max().item()


def self_check(
    device: torch.device, dtype: torch.dtype, budget: float = BUDGET, clock: Callable[[], float] = time.monotonic
) -> Check:
    """Decodes one prompt without draft tokens, with 4 per step, with "auto", and sampled twice with the same seed.

    Args:
        device, dtype: device and dtype of target and draft model.
        budget: time limit in seconds for all runs together. It stops the current run, and no other run is started.
        clock: returns the time in seconds.
    """
    from fastspec.generator import FastSpecGenerator

    shipped = all((directory / "model.safetensors").is_file() for directory in demo_pair())
    target, draft = demo_pair() if shipped else _random_pair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides the warning that models without tokenizers are assumed to share one
        generator = FastSpecGenerator(
            target, draft, device=device, dtype=dtype, max_batch_size=1, max_length=96, progress=False
        )
    found: dict[str, Any] = {}
    with generator:
        prompt = generator.tokenizer(PROMPT)["input_ids"] if generator.has_tokenizer else [1, 2, 3, 4]
        deadline: Any = _Deadline(clock, budget)

        def run(name: str, new_tokens: int = NEW_TOKENS, **options: Any) -> None:
            options.update(max_new_tokens=new_tokens, eos_token_id=None, return_dict_in_generate=True)
            with suppress(_Deadline.Passed):
                # without a seed, the call would advance torch's global random generator
                found[name] = generator.generate([prompt], seed=1, streamer=deadline, **options)

        for drafts in (0, 4):
            # this run compiles kernels and allocates memory
            run("untimed", 8, do_sample=False, num_speculative_tokens=drafts)
        run("plain", do_sample=False, num_speculative_tokens=0)
        run("speculative", do_sample=False)
        run("auto", do_sample=False, num_speculative_tokens="auto")
        for name in ("draw", "the same draw"):
            run(name, NEW_TOKENS // 2, do_sample=True, temperature=1.0)
    return _summary(found, "shipped pair" if shipped else "random pair (the shipped one is missing)")


def _summary(found: dict[str, Any], pair: str) -> Check:
    """Returns the `Check` of the completed runs.

    Args:
        found: outputs of `generate` by the names of the runs.
        pair: name of the pair of models that ran.
    """
    greedy = [found[name].new_tokens for name in _GREEDY if name in found]
    draws = [found[name].new_tokens for name in ("draw", "the same draw") if name in found]
    missing = [name for name in _GREEDY if name not in found]
    plain, speculative, auto = (found[name].stats if name in found else None for name in _GREEDY)
    unfinished = [f"{name} decoding" for name in missing] + ["two draws with one seed"] * (len(draws) < 2)
    equal = all(one == greedy[0] for one in greedy) if len(greedy) > 1 else None
    repeated = draws[0] == draws[1] if len(draws) > 1 else None
    return Check(pair, equal, repeated, plain, speculative, auto, tuple(unfinished))


def _random_pair() -> tuple[Any, Any]:
    """Makes two tiny random models. The draft is the first layer of the target, so that some drafts are accepted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(layers: int) -> Any:
        """Makes a tiny Llama model with random weights."""
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers,
                vocab_size=256,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.15,
            )
        )

    with torch.random.fork_rng(devices=[]):  # restores the caller's random generator afterwards
        torch.manual_seed(0)
        target, draft = model(2), model(1)
    draft.load_state_dict({name: tensor for name, tensor in target.state_dict().items() if ".layers.1." not in name})
    return target, draft


@dataclass(frozen=True, slots=True)
class Probes:
    """Facts about this machine, and the functions from which `doctor` gets all other facts."""

    system: str = sys.platform
    machine: str = f"{platform.system()} {platform.release()} ({platform.machine()})"
    python: str = platform.python_version()
    version: Callable[[str], str | None] = installed_version
    without_bytecode: Callable[[], tuple[str, ...]] = without_bytecode
    torch_build: Callable[[], str] = torch_build
    driver: Callable[[], str | None] = nvidia_driver
    cpu: Callable[[], str] = cpu
    cpu_products: Callable[[], str] = cpu_products
    cpu_load: Callable[[], tuple[float, int]] = cpu_load
    torch_threads: Callable[[], int] = torch.get_num_threads
    gpus: Callable[[], tuple[GpuFacts, ...]] = gpus
    cache: Callable[[], Path] = triton_cache
    compiler: Callable[[], str | None] = c_compiler
    headers: Callable[[], bool] = python_headers
    self_check: Callable[[torch.device, torch.dtype], Check] = self_check
    kernel_difference: Callable[[torch.device, torch.dtype], float] = kernel_difference


THIS_MACHINE = Probes()
