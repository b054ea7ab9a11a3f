"""Triton's interpreter, mended where it is less than a device promises."""

from __future__ import annotations

from typing import Any

import numpy as np


def let_dots_be_row_invariant() -> None:
    """Products are added up in fp64 and rounded once.

    The interpreter hands a product to numpy's BLAS, which on some processors adds up a row in another order by where
    it lies in the tile. No tensor core does that, and tests of ours compare rows to the bit.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


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
