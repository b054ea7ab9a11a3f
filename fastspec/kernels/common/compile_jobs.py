"""Compile jobs: the description of a Triton compilation as text, and the processes that compile such jobs.

A job is JSON: the kernel's module and name, the types and constants of its arguments, the target and Triton's options.
Names outside `fastspec` and `triton` are refused, because the text comes from another process.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from inspect import getclosurevars
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any, Final

from fastspec.kernels.common.without_torch import leave_out_torch

EARLY_PART: Final = 3  # one in three processes compiles the kernels of `Behind.begin_early`
_FORKED_EARLY: Final = 2  # processes that begin before the others, with the two kernels that take longest to compile
# modules with these kernels
_SAMPLED: Final = ("fastspec.kernels.sampling.draw", "fastspec.kernels.sampling.sampled_commit")
_ROOTS: Final = ("fastspec", "triton")
_NO_LAUNCHER: Final = (
    *(AssertionError, AttributeError, ImportError, OSError, RuntimeError),
    subprocess.CalledProcessError,
)
_PLAIN: Final = (bool, int, float, str, type(None))


class NotSendable(TypeError):
    """Error: a compilation cannot be converted to the text of a job.

    The process that needs the kernel must compile it itself.
    """


def job_of(compiling: Callable[[], Any]) -> bytes:
    """Converts a call of Triton's compiler to the text of a job.

    Args:
        compiling: the function that Triton submits to an executor to compile a kernel. It is a closure with the source,
            the target, the options and the environment settings of the compilation.

    Raises:
        NotSendable: this version of Triton is unknown, or an argument cannot be converted to text.
    """
    held = getclosurevars(compiling).nonlocals
    try:
        source = held["src"]
        parts = source.fn, source.signature, source.constants, source.attrs
        target, options, settings = held["target"], held["options"].__dict__, held["env_vars"]
    except (KeyError, AttributeError) as error:
        raise NotSendable(f"this version of Triton describes a compilation by something else: {error}") from error
    gluon = type(source).__name__ == "GluonASTSource"
    return json.dumps([gluon, *map(_to_json, (*parts, target, options, settings))]).encode()


def is_cached(compiling: Callable[[], Any]) -> bool:
    """True if Triton's disk cache has the kernel that `compiling` would compile, or if that cannot be determined."""
    from triton.compiler import get_cache_key, make_backend
    from triton.runtime.cache import get_cache_manager

    held = getclosurevars(compiling).nonlocals
    with suppress(AttributeError, KeyError, OSError, TypeError):
        source = held["src"]
        key = get_cache_key(source, make_backend(held["target"]), held["options"], held["env_vars"])
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return manager.get_file(f"{source.name[:150]}.json") is not None
    return True


def read_job(job: bytes) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Reads the text of a job. Returns its source, target, options and environment settings for `triton.compile`.

    Raises:
        NotSendable: the job names a module outside `fastspec` and `triton`.
    """
    gluon, *values = json.loads(job)
    kernel, signature, constants, attrs, target, options, settings = map(_from_json, values)
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(kernel, signature, None, attrs)
    source.constants.update(constants)
    for each in (kernel, *constants.values()):
        hash_in_order(each)
    return source, target, options, settings


def hash_in_order(kernel: Any) -> None:
    """Computes Triton's cache keys of the functions that a kernel calls, then the kernel's own key.

    Does nothing if the kernel already has a key. Triton finds a kernel in its disk cache by this key. In Triton 3.6 the
    key covers the constants of a called function only if that function has no key yet. So the key depends on the order
    of launches, and another process would not find the cached kernel. If the called functions always get their keys
    first, the key depends on the kernel alone.
    """
    if getattr(kernel, "hash", "") is None:
        _hash_in_order(kernel, set())


def _hash_in_order(function: Any, begun: set[int]) -> None:
    """Computes the keys of the functions that `function` calls, then the key of `function`.

    begun: ids (`id`) of functions whose keys are being computed. They are skipped, because a function may call itself.
    """
    begun.add(id(function))
    cells = zip(function.fn.__code__.co_freevars, function.fn.__closure__ or (), strict=False)
    scope = function.fn.__globals__ | {name: cell.cell_contents for name, cell in cells}
    for each in _called(function.fn.__code__, scope):
        if each.hash is None and id(each) not in begun:
            _hash_in_order(each, begun)
    _ = function.cache_key


def _called(code: CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the Triton functions that a function's code names, directly or as attributes of modules.

    scope: values of the names that the code can see.
    """
    from triton.runtime.jit import JITCallable

    for name in code.co_names + code.co_freevars:
        found = scope.get(name)
        within = [getattr(found, each, None) for each in code.co_names] if isinstance(found, ModuleType) else []
        yield from (each for each in (found, *within) if isinstance(each, JITCallable))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _called(inner, scope)


def launcher_of(job: bytes) -> str:
    """Returns a key that identifies the launcher of a job's kernel: the host function by which Triton launches it.

    Kernels with the same argument types share one launcher, and have the same key. Types of elements do not matter.
    """
    _, _, signature, *_ = json.loads(job)
    return json.dumps([_without_elements(kind) for _, kind in signature["dict"]])


def _without_elements(kind: Any) -> Any:
    """Returns the type of an argument without the types of the elements that pointers and TMA descriptors point to.

    Of a TMA descriptor's blocks only the number of axes remains: the launcher gets a size and a stride for each.
    """
    if isinstance(kind, list):
        return [_without_elements(each) for each in kind]
    if isinstance(kind, dict):
        return {name: _without_elements(each) for name, each in kind.items()}
    if isinstance(kind, str) and kind.startswith("tensordesc"):
        block = kind[kind.index("[") : kind.index("]")]
        return f"tensordesc of {block.count(',') + 1}"
    return "*" if isinstance(kind, str) and kind.startswith("*") else kind


def serve(kernels: str, cache: str, ends: list[int]) -> None:
    """Forks one process per pipe. A process compiles the jobs from its pipe until the pipe closes. Waits for all.

    Before it forks, it imports the modules with kernels, without torch. It also hashes Triton's own files (hundreds of
    MB), because the file names in Triton's disk cache depend on this hash. Two processes are forked as soon
    as the kernels of sampled steps are imported. They import what else their jobs need themselves.

    Args:
        kernels: name of the module that imports all kernels.
        cache: directory of Triton's disk cache.
        ends: file descriptors of this process's ends of the pipes.
    """
    leave_out_torch()
    import triton
    from triton.runtime.cache import triton_key

    hashing = threading.Thread(target=triton_key)
    hashing.start()
    for module in _SAMPLED:
        import_module(module)
    with suppress(*_NO_LAUNCHER):
        from triton.backends.nvidia.driver import library_dirs

        library_dirs()
    triton.knobs.cache.dir = cache
    hashing.join()
    gc.disable()  # these processes do not live long
    early = min(_FORKED_EARLY, len(ends) // EARLY_PART)
    _fork(ends[:early], ends)
    import_module(kernels)
    _fork(ends[early:], ends)
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


def _fork(own: list[int], ends: list[int]) -> None:
    """Forks a process for each pipe in `own`, which compiles the jobs from that pipe. `ends` are the ends of all."""
    gc.freeze()
    for end in own:
        if os.fork() == 0:
            for other in ends:
                if other != end:
                    os.close(other)
            _work(Connection(end))
            os._exit(0)


def _work(asked: Connection) -> None:
    try:
        asked.send_bytes(b"ready")
        while True:
            launcher, job = bool(asked.recv_bytes()), asked.recv_bytes()
            try:
                _compile(job, launcher=launcher)
            finally:
                # sent after a failure, too: the process that asked then compiles the kernel itself and gets the error
                asked.send_bytes(b"done")
    except (EOFError, OSError):
        return


def _compile(job: bytes, *, launcher: bool) -> None:
    """Compiles a job, and with `launcher` the host function that launches its kernel.

    The C compiler takes about a second for the launcher. It runs while Triton compiles the kernel, unless an argument
    is a TMA descriptor: then the launcher depends on the compiled kernel.
    """
    import triton

    source, target, options, settings = read_job(job)
    early = launcher and "tensordesc" not in launcher_of(job)
    beside = threading.Thread(target=_make_launcher, args=(source, None))
    if early:
        beside.start()
    try:
        compiled = triton.compile(source, target=target, options=options, _env_vars=settings)
    finally:
        if early:
            beside.join()
    if launcher and not early:
        _make_launcher(source, compiled.metadata)


def _make_launcher(source: Any, metadata: Any) -> None:
    """Compiles the host function that launches a kernel, and stores it in Triton's disk cache.

    Does nothing if this version of Triton has no such function.

    Args:
        source: source of the kernel.
        metadata: metadata of the compiled kernel. None: there is none yet. Triton then stores the function and raises
            an AttributeError, which is ignored.
    """
    with suppress(*_NO_LAUNCHER):
        from triton.backends.nvidia.driver import CudaLauncher

        # if this fails, the process that launches the kernel makes the launcher
        CudaLauncher(source, metadata)


def _to_json(value: Any) -> Any:
    """Converts a value to types that JSON has.

    Numbers, strings, None and lists stay. Any other type becomes a dict with one key, which names the type.
    """
    from triton.language import constexpr, dtype
    from triton.runtime.jit import JITCallable

    if isinstance(value, dtype):
        return {"dtype": value.name}
    if isinstance(value, JITCallable):
        return {"kernel": [value.__module__, value.__name__]}
    if isinstance(value, constexpr):
        return {"constexpr": _to_json(value.value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(key), _to_json(each)] for key, each in value.items()]}
    if type(value) is list:
        return [_to_json(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_to_json(each) for each in value]}
    kind = [type(value).__module__, type(value).__qualname__]
    if isinstance(value, tuple):
        return {"named": [kind, [_to_json(each) for each in value]]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"fields": [kind, {name: _to_json(getattr(value, name)) for name in fields}]}
    raise NotSendable(f"a value of type {type(value).__name__} cannot be converted to text")


def _from_json(value: Any) -> Any:
    """Converts the result of `_to_json` back to the value."""
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((what, inner),) = value.items()
    if what == "dict":
        return {_from_json(key): _from_json(each) for key, each in inner}
    if what == "tuple":
        return tuple(_from_json(each) for each in inner)
    if what == "named":
        return _named(*inner[0])(*map(_from_json, inner[1]))
    if what == "fields":
        return _named(*inner[0])(**{name: _from_json(each) for name, each in inner[1].items()})
    if what == "kernel":
        return _named(*inner)
    from triton.language import constexpr, dtype

    return dtype(inner) if what == "dtype" else constexpr(_from_json(inner))


def _named(module: str, name: str) -> Any:
    if module.split(".")[0] not in _ROOTS:
        raise NotSendable(f"a job names the module {module}; wanted one of {' and '.join(_ROOTS)}")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
