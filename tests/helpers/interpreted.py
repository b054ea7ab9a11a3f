"""Triton's interpreter, mended where it is less than a device promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def let_dots_be_row_invariant() -> None:
    """Products are added up in fp64 and rounded once.

    The interpreter hands a product to numpy's BLAS, which on some processors adds up a row in another order by where
    it lies in the tile. No tensor core does that, and tests of ours compare rows to the bit.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(*(_numbers(interpreter, each).astype(np.float64) for each in (a, b)))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _numbers(interpreter: Any, handle: Any) -> Any:
    """Numbers of a tensor. Those of bf16 are kept as their bits."""
    language = interpreter.tl
    if handle.dtype.scalar != language.bfloat16:
        return handle.data
    return interpreter._convert_float(handle.data, language.bfloat16, language.float32, None).view(np.float32)


def let_conditions_be_booleans() -> None:
    """A condition stays one where a scalar is spread over a tensor.

    The interpreter's handle of a comparison of scalars names the type of what was compared. Spread by that it becomes
    integers, which newer interpreters refuse as the mask of a load.
    """
    from triton.runtime import interpreter

    spread = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, scalar: Any) -> Any:
        handle = spread(self, kind, scalar)
        handle.data = handle.data.astype(scalar.data.dtype)
        return handle

    interpreter.InterpreterBuilder.create_splat = create_splat


def let_bf16_be_widened_exactly() -> None:
    """bf16 becomes fp32 by sixteen zeros behind its bits; the interpreter gets subnormal numbers wrong."""
    from triton.runtime import interpreter

    convert, language = interpreter._convert_float, interpreter.tl

    def converted(data: Any, kind: Any, other: Any, rounding: Any) -> Any:
        if (kind, other) != (language.bfloat16, language.float32):
            return convert(data, kind, other, rounding)
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    interpreter._convert_float = converted


def look_up_once() -> None:
    """The interpreter asks for the same things at every call of a device function, and at every value: they are kept.

    Functions of the language are exchanged for interpreted ones where that has not been done, members of a module are
    listed once, and so are the types of shapes. What is computed stays the same.
    """
    from triton.runtime import interpreter

    _exchange_once(interpreter)
    _name_types_once(interpreter)
    _make_shapes_once()


def _exchange_once(interpreter: Any) -> None:
    exchange, language = interpreter._patch_lang, interpreter.tl
    nothing: Any = getattr(interpreter, "_LangPatchScope", lambda: None)
    names: dict[int, list[str]] = {}
    owners: dict[Any, list[Any]] = {}
    for owner in (language, language.core, language.math, language.core.tensor, language.core.tensor_descriptor_base):
        names[id(owner)] = [name for name in dir(owner) if language.core.is_builtin(getattr(owner, name, None))]

    def owners_of(function: Any) -> list[Any]:
        modules = [each for each in function.__globals__.values() if each is language or each is language.core]
        more = [language.math] if language in modules else []
        return [*modules, *more, language.core.tensor, language.core.tensor_descriptor_base] if modules else []

    def exchanged(owner: Any) -> bool:
        # all of an owner's functions are exchanged and put back together: one speaks for them
        return not language.core.is_builtin(getattr(owner, names[id(owner)][0]))

    def patch_lang(function: Any) -> Any:
        if function not in owners:
            owners[function] = owners_of(function)
        known = owners[function]
        return nothing() if known and all(map(exchanged, known)) else exchange(function)

    def patch_builtin(owner: Any, builder: Any, *scope: Any) -> None:
        for name in names.get(id(owner), dir(owner)):
            member = getattr(owner, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, builder, *scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin


def _name_types_once(interpreter: Any) -> None:
    find, language = interpreter._get_np_dtype, interpreter.tl
    found: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        if isinstance(element, language.pointer_type):
            return find(element)
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    interpreter._get_np_dtype = np_dtype


def _make_shapes_once() -> None:
    from triton.language import core

    made: dict[tuple[int, ...], tuple[Any, ...]] = {}
    ours: dict[int, tuple[Any, ...]] = {}  # by the address of a shape that stays in `made`

    def of_shape(shape: Any) -> tuple[Any, ...]:
        if id(shape) in ours:
            return ours[id(shape)]
        sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if sizes not in made:
            count = core.validate_block_shape(sizes)
            constants = core.tuple([core.constexpr(size) for size in sizes])
            made[sizes] = found = core.tuple(sizes), constants, count, core.constexpr(count)
            ours.update({id(found[0]): found, id(found[1]): found})
        return made[sizes]

    of_scalars = of_shape(())

    class Block(core.block_type):  # type: ignore[misc]
        def __init__(self, element_ty: Any, shape: Any) -> None:
            self.element_ty = element_ty
            self.made = of_shape(shape)
            self.shape, _, self.numel, _ = self.made
            if not self.shape:
                raise TypeError("0d block_type is forbidden")

        @property
        def name(self) -> str:
            return f"<{self.shape}, {self.element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, _, self.numel = type.made if type.is_block() else of_scalars

    core.block_type.__init__, core.block_type.name = Block.__init__, Block.name
    core.tensor.__init__ = tensor


def let_addresses_be_checked() -> None:
    """Loads and stores outside of the memory of a launch's tensors are errors, as on a device without luck.

    On a device such a load finds other memory of the process nearly always, and an error is rare.
    """
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    enter, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    held: dict[str, Any] = {}

    def _init_args_hst(self: Any, args: Any, kwargs: Any) -> Any:
        found = enter(self, args, kwargs)
        ranges = np.array(sorted(set(_ranges(found))), dtype=np.int64).reshape(-1, 2)
        held.update(begins=ranges[:, 0], ends=ranges[:, 1])
        return found

    def check(pointers: Any, mask: Any) -> None:
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].astype(np.int64)
        nearest = held["begins"].searchsorted(at, side="right") - 1
        outside = int(((nearest < 0) | (at >= held["ends"][nearest])).sum()) if len(held["ends"]) else at.size
        if outside:
            raise IndexError(f"a kernel reads or writes {outside} elements outside of its tensors")

    def create_masked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *others)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    executor._init_args_hst = _init_args_hst
    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store


def _ranges(found: Any) -> Iterator[tuple[int, int]]:
    """Yields (first address, end) of the memory of each tensor in nested arguments of a launch."""
    if isinstance(found, torch.Tensor):
        storage = found.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif isinstance(found, dict):
        yield from _ranges(tuple(found.values()))
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _ranges(each)
