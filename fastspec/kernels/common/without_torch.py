"""Lets processes that only compile kernels import the modules of kernels without torch.

They need only Triton, and torch is slow to import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Name(type):
    """Class of stand-ins for names of torch. They can be annotations and dict keys, but cannot be called."""

    def __getattr__(cls, name: str) -> _Name:
        return _named(f"{cls.__qualname__}.{name}", name)


class _Absent(MetaPathFinder, Loader):
    """Import finder that makes empty stand-in modules for torch and its submodules.

    Every name can be imported from a stand-in module, as a `_Name`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = lambda name: _named(f"{spec.name}.{name}", name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_out_torch() -> None:
    """Makes later imports of torch in this process return stand-ins, unless torch is already imported.

    Modules with kernels may name parts of torch while they are imported. To call such a name, or to use it as a number,
    is an error.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Absent())


def _named(qualname: str, name: str) -> _Name:
    if name.startswith("__"):
        raise AttributeError(f"{qualname}: torch is left out in processes that compile")
    return _Name(qualname, (), {})
