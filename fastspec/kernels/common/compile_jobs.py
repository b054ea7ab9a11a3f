"""Compile jobs: the sources of one kernel as text, and the process that compiles them.

A job is JSON: a kernel by module and name, the types and constants of its arguments, the target and Triton's options.
Only names in `fastspec` and `triton` are looked up, wherever the text comes from.
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

_ROOTS: Final = ("fastspec", "triton")
_NO_LAUNCHER: Final = (
    *(AssertionError, AttributeError, ImportError, OSError, RuntimeError),
    subprocess.CalledProcessError,
)
_PLAIN: Final = (bool, int, float, str, type(None))


class NotSendable(TypeError):
    """A job has an argument without a text. Its own process compiles it."""


def job_of(compiling: Callable[[], Any]) -> bytes:
    """Text of a call that Triton hands to an executor.

    Args:
        compiling: Triton's closure over the source, the target, the options and its settings.

    Raises:
        NotSendable: another version of Triton, or an argument without a text.
    """
    held = getclosurevars(compiling).nonlocals
    try:
        source = held["src"]
        parts = source.fn, source.signature, source.constants, source.attrs
        target, options, settings = held["target"], held["options"].__dict__, held["env_vars"]
    except (KeyError, AttributeError) as error:
        raise NotSendable(f"this Triton compiles from something else: {error}") from error
    gluon = type(source).__name__ == "GluonASTSource"
    return json.dumps([gluon, *map(_told, (*parts, target, options, settings))]).encode()


def is_cached(compiling: Callable[[], Any]) -> bool:
    """True if Triton's disk cache has the kernel of this call, or if this cannot be known."""
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
    """The source, the target, the options and the settings of a job.

    Raises:
        NotSendable: a name that is not in `fastspec` or `triton`.
    """
    gluon, *told = json.loads(job)
    kernel, signature, constants, attrs, target, options, settings = map(_made, told)
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
    """Computes the cache keys of a kernel's callees before its own key, unless the kernel has one.

    Triton's disk cache is looked up by a kernel's key. In Triton 3.6 a key depends on whether the keys of its callees
    existed before: constants that callees read are included or not. Another process, or another order of launches,
    would then not find the cached kernel. With this order a key depends only on the kernel.
    """
    if getattr(kernel, "hash", "") is None:
        _hash_in_order(kernel, set())


def _hash_in_order(function: Any, begun: set[int]) -> None:
    """Hashes a function and those that it calls, in order. `begun` stops functions that call each other."""
    begun.add(id(function))
    cells = zip(function.fn.__code__.co_freevars, function.fn.__closure__ or (), strict=False)
    scope = function.fn.__globals__ | {name: cell.cell_contents for name, cell in cells}
    for each in _called(function.fn.__code__, scope):
        if each.hash is None and id(each) not in begun:
            _hash_in_order(each, begun)
    _ = function.cache_key


def _called(code: CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Triton functions among the names in a function's code, and in modules among these."""
    from triton.runtime.jit import JITCallable

    for name in code.co_names + code.co_freevars:
        found = scope.get(name)
        within = [getattr(found, each, None) for each in code.co_names] if isinstance(found, ModuleType) else []
        yield from (each for each in (found, *within) if isinstance(each, JITCallable))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _called(inner, scope)


def launcher_of(job: bytes) -> str:
    """The kind of launcher of a job's kernel. Kernels with the same argument types share one launcher."""
    _, _, signature, *_ = json.loads(job)
    return json.dumps([kind for _, kind in signature["dict"]])


def serve(kernels: str, cache: str, ends: list[int]) -> None:
    """Forks a process for each socket. It compiles the jobs that arrive there until the socket closes.

    Before it forks, it imports the modules with kernels, without torch. It also hashes Triton's own files, hundreds of
    megabytes, because names in Triton's cache contain that hash.

    Args:
        kernels: the module that imports all kernels.
        cache: the directory for machine code.
        ends: numbers of the open sockets.
    """
    leave_out_torch()
    import triton
    from triton.runtime.cache import triton_key

    hashing = threading.Thread(target=triton_key)
    hashing.start()
    import_module(kernels)
    with suppress(*_NO_LAUNCHER):
        from triton.backends.nvidia.driver import library_dirs

        library_dirs()
    triton.knobs.cache.dir = cache
    hashing.join()
    gc.disable()  # no process lives for long
    gc.freeze()
    for end in ends:
        if os.fork() == 0:
            for other in ends:
                if other != end:
                    os.close(other)
            _work(Connection(end))
            os._exit(0)
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


def _work(asked: Connection) -> None:
    import triton

    try:
        asked.send_bytes(b"ready")
        while True:
            launcher, job = bool(asked.recv_bytes()), asked.recv_bytes()
            try:
                source, target, options, settings = read_job(job)
                compiled = triton.compile(source, target=target, options=options, _env_vars=settings)
                if launcher:
                    _make_launcher(source, compiled)
            finally:
                asked.send_bytes(b"done")  # if it failed, the process that asked compiles it again and sees why
    except (EOFError, OSError):
        return


def _make_launcher(source: Any, compiled: Any) -> None:
    """Compiles the launcher of a kernel. In some versions of Triton it is a C module in the cache."""
    with suppress(*_NO_LAUNCHER):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, compiled.metadata)  # if it cannot be made here, the launching process makes it


def _told(value: Any) -> Any:
    """Converts a value to JSON. Plain values stay; others become an object with one field, which names their kind."""
    from triton.language import constexpr, dtype
    from triton.runtime.jit import JITCallable

    if isinstance(value, dtype):
        return {"dtype": value.name}
    if isinstance(value, JITCallable):
        return {"kernel": [value.__module__, value.__name__]}
    if isinstance(value, constexpr):
        return {"constexpr": _told(value.value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_told(key), _told(each)] for key, each in value.items()]}
    if type(value) is list:
        return [_told(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_told(each) for each in value]}
    kind = [type(value).__module__, type(value).__qualname__]
    if isinstance(value, tuple):
        return {"named": [kind, [_told(each) for each in value]]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"fields": [kind, {name: _told(getattr(value, name)) for name in fields}]}
    raise NotSendable(f"{type(value).__name__} has no text")


def _made(told: Any) -> Any:
    """Undoes `_told`."""
    if isinstance(told, list):
        return [_made(each) for each in told]
    if not isinstance(told, dict):
        return told
    ((what, inner),) = told.items()
    if what == "dict":
        return {_made(key): _made(each) for key, each in inner}
    if what == "tuple":
        return tuple(_made(each) for each in inner)
    if what == "named":
        return _named(*inner[0])(*map(_made, inner[1]))
    if what == "fields":
        return _named(*inner[0])(**{name: _made(each) for name, each in inner[1].items()})
    if what == "kernel":
        return _named(*inner)
    from triton.language import constexpr, dtype

    return dtype(inner) if what == "dtype" else constexpr(_made(inner))


def _named(module: str, name: str) -> Any:
    if module.split(".")[0] not in _ROOTS:
        raise NotSendable(f"{module} is not ours")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
