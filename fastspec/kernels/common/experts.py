"""The experts of a layer as kernels read them: one stack of matrices for each of their two products.

| form  | data                                   | element [e, n, k] of the stack                                      |
|-------|----------------------------------------|---------------------------------------------------------------------|
| rows  | [E, N, K] bf16, fp16 or fp32           | [e, n, k]                                                           |
| mxfp4 | uint8 [E, N, K/2], scales [E, N, K/32] | e2m1(code) * 2^(scale - 127); of each 64 values of a row, value i   |
|       |                                        | and value 32 + i are the low and the high four bits of one byte     |

mxfp4 is defined by OCP Microscaling Formats 1.0. A byte of a checkpoint holds two neighbouring values; here it holds
two values 32 apart, so that a kernel gets two contiguous runs of values by shifts and masks alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fastspec.kernels.common.codes import Codes, CodesKind, e2m1
from fastspec.kernels.common.weights import Weight

MXFP4 = CodesKind("fp4", (1, 32))
_RUN = 64  # values whose codes are laid out together
_BIAS = 127  # of a scale's exponent


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The same matrix [N, K] of E experts; y = x W^T.

    Attributes:
        data: values [E, N, K], or for mxfp4 uint8 [E, N, K/2], two codes a byte.
        scales: for mxfp4 uint8 [E, N, K/32], biased exponents; None for values.
        dtype: of the values; for mxfp4, of the activations that they multiply.
    """

    data: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> ExpertStack:
        """A stack of values [E, N, K]; the tensor is kept, not copied."""
        return cls(values, None, values.dtype)

    @classmethod
    def empty_codes(cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> ExpertStack:
        """An uninitialised mxfp4 stack of shape (E, N, K), to be filled by `fill_codes`; K is a multiple of 64."""
        count, rows, width = shape
        data = torch.empty(count, rows, width // 2, dtype=torch.uint8, device=device)
        return cls(data, torch.empty(count, rows, width // 32, dtype=torch.uint8, device=device), dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        count, rows, width = self.data.shape
        return count, rows, width if self.scales is None else 2 * width

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def fill_codes(self, expert: int, first: int, codes: Codes) -> None:
        """Writes rows of one expert, from row `first` on, as mxfp4.

        Args:
            expert: its number.
            first: row of the first code.
            codes: [rows, K] with scales [rows, K/32].

        Raises:
            ValueError: the codes are of another kind, or a scale is not a power of two from 2^-127 on.
        """
        assert self.scales is not None, "a stack of values has no room for codes"
        if codes.kind != MXFP4:
            raise ValueError(f"codes are {codes.kind}; wanted {MXFP4}")
        bits = codes.scales.view(torch.int32)
        if bool(((bits & 0x7FFFFF) != 0).logical_and(codes.scales != 2.0**-_BIAS).any()) or bool((bits < 0).any()):
            raise ValueError("a scale is no power of two from 2^-127 on")
        here = slice(first, first + codes.shape[0])
        runs = codes.codes.unflatten(1, (-1, 2, _RUN // 2))
        self.data[expert, here] = (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)
        self.scales[expert, here] = (bits >> 23).to(torch.uint8)

    def values(self, experts: Tensor | int) -> Tensor:
        """The matrix of one expert [N, K], or of an index tensor of experts [..., N, K], in `dtype`."""
        if self.scales is None:
            return self.data[experts]
        data = self.data[experts].unflatten(-1, (-1, 1, _RUN // 2))
        codes = torch.cat((data & 15, data >> 4), dim=-2).flatten(-3)
        factors = power_of_two(self.scales[experts]).repeat_interleave(32, -1)
        return (e2m1(codes) * factors).to(self.dtype)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) in fp32, of biased uint8 exponents e of any shape."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Router and experts of one layer: E experts of intermediate size I.

    Attributes:
        router: [E, hidden]. router_bias: [E].
        correction: fp32 [E], added to the scores only to choose experts (as in DeepSeek-V3).
        gate_up: [E, 2 * I, hidden], gate rows first. gate_up_bias: [E, 2 * I].
        down: [E, hidden, I]. down_bias: [E, hidden].
        shared_gate: [1, hidden], gate of the shared expert, whose matrices are `gate_up` and `down` of `LayerWeights`.
    """

    router: Weight
    gate_up: ExpertStack
    down: ExpertStack
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_gate: Weight | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        held = [getattr(self, field.name) for field in fields(self)]
        return sum(each.nbytes for each in held if each is not None)
