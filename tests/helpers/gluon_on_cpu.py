"""Gluon kernels in Triton's interpreter: what they compute, without the layouts that they compute it in.

Gluon has no interpreter of its own. A kernel's source is run with Triton's language in the place of Gluon's: every
layout is ignored, a conversion between layouts is the identity, and a product of fragments is a batched product.
What only the compiler sees stays unseen here: that layouts fit, and what they cost.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl

import fastspec.kernels

SAME = (
    *(
        "atomic_add",
        "broadcast",
        "constexpr",
        "exp2",
        "expand_dims",
        "float32",
        "int16",
        "int32",
        "int64",
        "join",
        "load",
        "log2",
        "max",
    ),
    *(
        "maximum",
        "min",
        "minimum",
        "num_programs",
        "permute",
        "pointer_type",
        "program_id",
        "reshape",
        "rsqrt",
        "split",
        "static_range",
    ),
    *("store", "sum", "uint32", "uint8", "where"),
)


class _Shared:
    """Shared memory: what was stored in it, and parts of that."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> Any:
        return self.value.shape

    def store(self, value: Any) -> None:
        self.value = value

    def slice(self, start: Any, length: Any) -> _Shared:
        """Rows start .. start + length - 1."""
        start, length = int(getattr(start, "value", start)), int(getattr(length, "value", length))
        return _Shared(tl.core.tensor(_rows(self.value, start, length), _type_of(self.value, length)))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(tl.permute(self.value, order))

    def load(self, layout: object) -> Any:
        return self.value


def _rows(value: Any, start: int, length: int) -> Any:
    handle = value.handle
    return type(handle)(handle.data[start : start + length].copy(), handle.dtype)


def _type_of(value: Any, length: int) -> Any:
    return tl.block_type(value.type.element_ty, [length, *value.shape[1:]])


class _Language:
    """triton.language under Gluon's names; looked up at each use, for the interpreter replaces its functions."""

    def __getattr__(self, name: str) -> Any:
        if name not in SAME:
            raise AttributeError(f"Gluon's {name} has no counterpart here yet; add it")
        return getattr(tl, name)

    def arange(self, start: int, end: int, layout: object = None) -> Any:
        return tl.arange(start, end)

    def num_warps(self) -> int:
        """Of which only layouts depend."""
        return 4

    def full(self, shape: list[int], value: float, dtype: Any, layout: object = None) -> Any:
        return tl.full(shape, value, dtype)

    def zeros(self, shape: list[int], dtype: Any, layout: object = None) -> Any:
        return tl.zeros(shape, dtype)

    def convert_layout(self, x: Any, layout: object) -> Any:
        return x

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: object, value: Any) -> _Shared:
        return _Shared(value)

    def inline_asm_elementwise(self, *args: object, **options: object) -> None:
        """A prefetch, which changes nothing."""

    def layout(self, *args: object, **options: object) -> None:
        """Any layout."""

    BlockedLayout = SliceLayout = DotOperandLayout = NVMMADistributedLayout = DistributedLinearLayout = layout
    SwizzledSharedLayout = SharedLinearLayout = layout


gl = _Language()


def _of_constants(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of constants as kernels call it."""
    return lambda *given: function(*(getattr(each, "value", each) for each in given))


gluon = SimpleNamespace(jit=triton.jit, constexpr_function=_of_constants)


def product(a: Any, b: Any, acc: Any) -> Any:
    """The product of fragments a [S, M, K] and b [S, K, N] added to acc; fp32 without loss."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def fast_log2f(x: Any) -> Any:
    """The logarithm, here as it is."""
    return tl.log2(x)


@triton.jit
def thread_barrier() -> None:
    """Until every thread of a program is here."""
    tl.debug_barrier()


def interpreted(*stems: str) -> ModuleType:
    """One module with the content of these files of fastspec/kernels, of which each may import from those before it."""
    folder = Path(fastspec.kernels.__file__).parent
    text = "\n".join(_translated((folder / f"{stem}.py").read_text(encoding="utf-8")) for stem in stems)
    head = "import triton\nimport triton.language as tl\n"
    head += "from fastspec.kernels.attention.arguments import PagedCache\n"
    head += f"from {__name__} import fast_log2f, gl, gluon, product as mma_v2, thread_barrier\n"
    path = (
        Path(tempfile.mkdtemp()) / f"interpreted_{'_'.join(stem.rsplit('/')[-1] for stem in stems)}.py"
    )  # a file: the interpreter reads the source
    path.write_text(head + text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    # the layout of a tensor's type, which only a Gluon tensor has
    tl.block_type.layout = None  # type: ignore[attr-defined]
    return module


def _translated(source: str) -> str:
    """`source` without its imports: what they bring is there already."""
    source = source.replace("gl.constexpr", "tl.constexpr")  # by this name the interpreter knows it
    source = re.sub(r"^(\w+) = tl\.constexpr\(([^)]*)\)", r"\1 = \2", source, flags=re.MULTILINE)
    body = re.sub(r"^from [\w.]+ import (\([^)]*\)|[^\n(]*)\n", "", source, flags=re.MULTILINE)
    return re.sub(r'\A""".*?"""\n', "", body, flags=re.DOTALL)
