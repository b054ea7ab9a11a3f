"""Kernels compiled by processes, and the jobs that these get. Prints JSON lines.

Usage: python -m tests.helpers.compile_jobs keys 90     does every launch come back from its text as it was?
       python -m tests.helpers.compile_jobs processes   what two processes compile, and what this one finds
       python -m tests.helpers.compile_jobs behind      what processes compile while nobody waits
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import triton
from triton.compiler import get_cache_key, make_backend

from fastspec.kernels import select
from fastspec.kernels.common.compile_jobs import NotSendable, job_of, launcher_of
from fastspec.kernels.common.compilers import Compilers, nothing_compiled
from fastspec.kernels.common.launch import compiling, compiling_behind, launch
from tests.helpers import recorder
from tests.helpers.launches import GROUPS

KERNELS = 4  # of the quick ones
# as a process that compiles does it: without torch
READ = """
import json, sys
from fastspec.kernels.common.without_torch import leave_out_torch
leave_out_torch()
from triton.compiler import get_cache_key, make_backend
from fastspec.kernels.common.compile_jobs import read_job
for line in sys.stdin:
    source, target, options, settings = read_job(line)
    backend = make_backend(target)
    key = get_cache_key(source, backend, backend.parse_options(dict(options)), settings)
    print(json.dumps([source.name, key, type(source).__name__]))
assert "torch._C" not in sys.modules
"""


def key_of(source: Any, target: Any, options: dict[str, Any], settings: dict[str, Any]) -> str:
    """What Triton's cache on the disk is looked up by."""
    backend = make_backend(target)
    return str(get_cache_key(source, backend, backend.parse_options(dict(options)), settings))


class Telling(Executor):
    """Compiles nothing: keeps the text of each job, and the kernel's name and key."""

    def __init__(self) -> None:
        self.jobs, self.keys = list[bytes](), list[list[str]]()

    def submit(self, call: Callable[[], Any], /, *args: Any, **options: Any) -> Future[Any]:
        held = getclosurevars(call).nonlocals
        given = held["src"], held["target"], held["options"].__dict__, held["env_vars"]
        self.jobs.append(job_of(call))
        self.keys.append([given[0].name, key_of(*given), type(given[0]).__name__])
        done: Future[Any] = Future()
        done.set_result(None)
        return done


def launches(arch: int, groups: Iterator[str] | list[str]) -> Iterator[recorder.Launch]:
    for name in groups:
        found = recorder.record(arch, lambda name=name: GROUPS[name](arch))  # type: ignore[misc]
        yield from recorder.first_of_each(found, recorder.specialised)


def unclear(launched: list[recorder.Launch]) -> list[str]:
    """Kernels that read two constants of one name and of different values: Triton puts them into a key in any order."""
    found = set()
    for kernel in {each.kernel.__name__: each.kernel for each in launched}.values():
        values = dict[str, set[str]]()
        for (name, _), (value, _) in kernel.used_global_vals.items():
            values.setdefault(name, set()).add(str(value))
        found |= {f"{kernel.__name__} {name}" for name, each in values.items() if len(each) > 1}
    return sorted(found)


def keys(arch: int) -> dict[str, Any]:
    recorder.use(recorder.cuda(arch))
    telling, launched = Telling(), list(launches(arch, list(GROUPS)))
    with triton.AsyncCompileMode(telling, ignore_errors=True):
        for each in launched:
            each.kernel.warmup(*each.given, grid=each.grid, **each.options)
    jobs = b"\n".join(reversed(telling.jobs))  # another order, for keys must not depend on it
    done = subprocess.run([sys.executable, "-c", READ], input=jobs, stdout=subprocess.PIPE, check=True)
    read = [json.loads(line) for line in done.stdout.splitlines()]
    other = [told[0] for told, found in zip(reversed(telling.keys), read, strict=True) if told != found]
    return {
        "jobs": len(read),
        "other": other,
        "unclear": unclear(launched),
        "launchers": len({launcher_of(job) for job in telling.jobs}),
    }


def compile_all(executor: Executor, found: list[recorder.Launch]) -> list[bool]:
    """Whether each kernel was there when this process looked."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    with executor, compiling(executor):
        for _ in range(2):  # the second layer of a model: nothing that is not begun
            for each in found:
                launch(each.kernel, each.grid, *each.given, **each.options)
    return hits


def processes() -> Iterator[dict[str, Any]]:
    recorder.use(recorder.cuda(90))
    every = list(launches(90, ["steps"]))
    # and one that reads constants in functions of other modules
    found = [*every[: KERNELS - 1], next(each for each in every if each.name == "_commit_kernel")]
    yield {"what": "empty", "empty": nothing_compiled()}
    first = Compilers(2, kernels=select.KERNELS, now=True)
    yield {"what": "processes", "hits": compile_all(first, found), "empty": nothing_compiled()}
    assert first._process is not None
    yield {"what": "ended", "status": first._process.returncode}
    for each in found:
        each.kernel.device_caches.clear()
    yield {
        "what": "once more",
        "hits": compile_all(later := Compilers(2, kernels=select.KERNELS), found),
        "begun": later._process is not None,
    }
    found[0].kernel.device_caches.clear()
    triton.knobs.cache.dir += "/another"
    compile_all(missed := Compilers(1, kernels=select.KERNELS), found[:1])
    yield {"what": "not there", "begun": missed._process is not None}


def broken() -> Iterator[dict[str, Any]]:
    """Processes that are killed before they have compiled anything; and a job that has no text."""
    recorder.use(recorder.cuda(90))
    found = list(launches(90, ["steps"]))[:KERNELS]
    executor = Compilers(1, kernels=select.KERNELS, now=True)
    assert executor._process is not None
    os.killpg(executor._process.pid, signal.SIGKILL)
    yield {"what": "killed", "hits": compile_all(executor, found)}
    for each in found:
        each.kernel.device_caches.clear()
    triton.knobs.cache.dir += "/again"
    with Compilers(1, kernels=select.KERNELS, now=True) as executor:
        asked = executor._places.get()  # when it is ready
        assert executor._process is not None
        maps = Path(f"/proc/{executor._process.pid}/maps").read_text()
        os.killpg(executor._process.pid, signal.SIGKILL)
        executor._places.put(asked)
        yield {
            "what": "killed when it was ready",
            "hits": compile_all(executor, found),
            "mapped": ["libtriton" in maps, "libtorch" in maps],
        }
    try:
        job_of(lambda: None)
    except NotSendable as error:
        yield {"what": "no text", "error": str(error)}


def begun_behind(executor: Executor, found: list[recorder.Launch]) -> list[bool]:
    """Compiles the first kernel, and the others behind it. Returns, for each that was waited for, if it was there."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    with executor, compiling(executor):
        launch(found[0].kernel, found[0].grid, *found[0].given, **found[0].options)
        with compiling_behind() as uncached:
            assert uncached is not None
            for each in found:
                launch(each.kernel, each.grid, *each.given, **each.options)
            assert uncached()
    return hits


def behind() -> Iterator[dict[str, Any]]:
    recorder.use(recorder.cuda(90))
    found = list(launches(90, ["steps"]))[:KERNELS]
    executor = Compilers(1, kernels=select.KERNELS, now=True)
    hits = begun_behind(executor, found)
    assert executor._process is not None
    assert executor.behind is not None
    yield {"what": "first", "hits": hits, "running": executor._process.returncode is None}
    later = Compilers(1, kernels=select.KERNELS)
    yield {"what": "later", "hits": compile_all(later, found), "begun": later._process is not None}
    ended = threading.Event()
    executor.behind.at_end(ended.set)
    assert ended.wait(60)
    executor.shutdown()
    yield {"what": "ended", "status": executor._process.returncode}
    for each in found:
        each.kernel.device_caches.clear()
    triton.knobs.cache.dir += "/another"
    broken, works = found[1], found[2]
    options = broken.options | {"QUERIES": 3}  # no power of two, which the compiler refuses
    begun_behind(Compilers(1, kernels=select.KERNELS, now=True), [found[0], replace(broken, options=options), works])
    error = ""
    try:
        with compiling():
            launch(broken.kernel, broken.grid, *broken.given, **options)
    except RuntimeError as raised:
        error = str(raised)
    with compiling():
        launch(works.kernel, works.grid, *works.given, **works.options)
    yield {"what": "failed", "error": error, "works": recorder.compiled(works).asm["ptx"] != ""}


def main() -> None:
    with tempfile.TemporaryDirectory() as caches:
        triton.knobs.cache.dir = caches
        what = {"keys": lambda: [keys(int(sys.argv[2]))], "processes": processes, "broken": broken, "behind": behind}
        for line in what[sys.argv[1]]():  # type: ignore[operator]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
