"""Weights of an MoE layer as the kernels read them: `ExpertStack`, the matrices of all experts for one product.

A layer has two stacks: gate and up projections, and down projections. `ExpertWeights` are the stacks and the router.

| form  | data                                                          | element [e, n, k] of a stack [E, N, K]     |
|-------|---------------------------------------------------------------|--------------------------------------------|
| rows  | [E, N, K] bf16, fp16 or fp32                                  | data[e, n, k]                              |
| mxfp4 | int32 [E, N/16, C, 16, 16], scales int32 [E, N/16, C, 16]     | e2m1(code) * 2^(scale - 127)               |
| codes | `PackedCodes` of one matrix [E N, 128 C], with padded columns | see `PackedCodes`                          |

OCP Microscaling Formats 1.0 defines mxfp4. A row is divided into C chunks of 128 values, which are packed as
code_packing.py packs "fp4". The last chunk is padded with zeros. A row's 128 codes of a chunk are 64 bytes, and 16 rows
of a chunk are contiguous.

A row has one int32 of scales for each chunk. Byte g of it belongs to values 32 g .. 32 g + 31 of the chunk. The byte is
the checkpoint's exponent plus `RAISED`. This is the exponent of a bf16, by which kernels multiply the codes. Codes that
are read as bf16 are 2^126 times too small.

In the forms mxfp4 and codes, rows of gate and up are interleaved: 8 of the gate, then the matching 8 of up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.code_packing import FIELDS, PackedCodes, can_pack_codes
from fastspec.kernels.common.codes import Codes, CodesKind, e2m1
from fastspec.kernels.common.weights import Weight

MXFP4 = CodesKind("fp4", (1, 32))
CHUNK = 128  # values of a row whose codes are packed together
RAISED = 64  # added to the stored exponents of mxfp4 scales
LOWERED = 126 - RAISED  # sums of products with mxfp4 codes and their stored scales are 2^LOWERED times too small
_NO_ZERO = 8  # zero point of padded int4 columns
_BIAS = 127  # bias of a scale's exponent
_MAX_EXPONENT = 254 - RAISED  # biased exponent of the largest scale that fits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """One matrix [N, K] for each of E experts; y = x W^T.

    Attributes:
        data: values [E, N, K], or a view [E, 2, N/2, K] with some rows of each gate and of each up. For a quantised
            stack, the codes: int32 words [E, N/16, C', 16, 16], with C' chunks of a row.
        scales: for mxfp4, int32 [E, N/16, C, 16] with four exponents in each int32. None in all other forms.
        dtype: dtype of the values. For a quantised stack, dtype of the activations that it multiplies.
        width: K.
        gated: True if the stack is quantised and has interleaved rows of gate and up. Stacks of float values have the
            gate's N/2 rows first.
        codes: quantised matrices of all experts, in any other format than mxfp4. `codes.gated` is False, because the
            rows are interleaved before they are packed. None: the stack has float values or is in mxfp4.
    """

    data: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    width: int
    gated: bool = False
    codes: PackedCodes | None = None

    @classmethod
    def of(cls, values: Tensor) -> ExpertStack:
        """Makes an expert stack of float values [E, N, K]. The tensor is not copied."""
        return cls(values, None, values.dtype, values.shape[-1])

    @classmethod
    def empty_codes(
        cls,
        shape: tuple[int, int, int],
        kind: CodesKind,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool = False,
    ) -> ExpertStack:
        """Allocates a quantised expert stack. `fill_codes` writes mxfp4, `fill_all` writes all other kinds.

        Args:
            shape: (E, N, K); `can_stack_codes` returns True for (N, K).
            kind: format of each expert's matrix, and the blocks that share a scale.
            dtype: dtype of the activations.
            device: device of the stack.
            gated: True if rows 0 .. N/2 - 1 of an expert's matrix in the checkpoint are the gate, and the others up.
        """
        count, rows, width = shape
        chunks = -(-width // CHUNK)
        if kind != MXFP4:
            codes = PackedCodes.empty((count * rows, chunks * CHUNK), _padded(kind, width), False, device)
            codes.form = "off8" if kind.format == "int8" else codes.form
            return cls(codes.words.unflatten(0, (count, -1)), None, dtype, width, gated, codes)
        pieces = count, rows // 16, chunks, 16
        data = torch.empty(*pieces, 16, dtype=torch.int32, device=device)
        return cls(data, torch.empty(pieces, dtype=torch.int32, device=device), dtype, width, gated)

    def copy_from(self, other: ExpertStack) -> None:
        """Copies another stack of the same shape and form."""
        if self.codes is not None and other.codes is not None:
            self.codes.copy_from(other.codes)
            return
        self.data.copy_(other.data)
        if self.scales is not None and other.scales is not None:
            self.scales.copy_(other.scales)

    @property
    def in_codes(self) -> bool:
        """True if the stack is quantised, in mxfp4 or another format."""
        return self.scales is not None or self.codes is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of experts, rows and columns: (E, N, K)."""
        rows = 16 * self.data.shape[1] if self.in_codes else self.data.shape[1:-1].numel()
        return len(self.data), rows, self.width

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        if self.codes is not None:
            return self.codes.nbytes
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def fill_all(self, experts: Iterable[Codes]) -> None:
        """Writes the matrices of all experts to a quantised stack in any other format than mxfp4.

        Args:
            experts: matrix [N, K] of each expert, in order. Gate rows come first.

        Raises:
            ValueError: the codes are of another kind, or have scales that cannot be stored; see `PackedCodes.fill`.
        """
        packed, (count, rows, width) = self.codes, self.shape
        assert packed is not None, "made by `empty_codes`"
        order = self._places(torch.arange(rows, device=self.data.device)).argsort()
        end = -width % CHUNK
        scales, zeros = [], []
        for expert, codes in enumerate(experts):
            if _padded(codes.kind, width) != packed.kind:
                raise ValueError(f"codes are {codes.kind}; wanted {packed.kind}")
            mine = codes.in_order(order)
            packed.fill_words(expert * rows // 16, F.pad(mine.codes, (0, end)))
            groups = -(-(width + end) // packed.kind.block[1])
            scales.append(F.pad(mine.scales, (0, groups - mine.scales.shape[1])))
            if mine.zeros is not None:
                zeros.append(F.pad(mine.zeros, (0, groups - mine.zeros.shape[1]), value=_NO_ZERO))
        assert len(scales) == count, "codes of every expert"
        packed.fill_scales(torch.cat(scales), torch.cat(zeros) if zeros else None)

    def fill_codes(self, expert: int, first: int, codes: Codes) -> None:
        """Writes some rows of one expert's matrix to a stack in mxfp4.

        Args:
            expert: index of the expert.
            first: index of the first row, in the checkpoint's order, in which gate rows come first.
            codes: the rows, [rows, K] with scales [rows, K/32].

        Raises:
            ValueError: the codes are of another kind, or a scale is not a power of two from 2^-127 to 2^63.
        """
        assert self.scales is not None, "a stack of values has no room for codes"
        if codes.kind != MXFP4:
            raise ValueError(f"codes are {codes.kind}; wanted {MXFP4}")
        bits = codes.scales.view(torch.int32)
        exponents = bits >> 23  # 0 for 2^-127, which is subnormal
        wrong = (
            ((bits & 0x7FFFFF) != 0).logical_and(codes.scales != 2.0**-_BIAS) | (exponents > _MAX_EXPONENT) | (bits < 0)
        )
        if bool(wrong.any()):
            raise ValueError("a scale of mxfp4 is no power of two from 2^-127 to 2^63; use a checkpoint without codes")
        rows = self._places(torch.arange(first, first + codes.shape[0], device=self.data.device))
        at = expert, rows // 16, slice(None), rows % 16
        end = -self.width % CHUNK
        self.data[at] = _words(F.pad(codes.codes, (0, end)))
        raised = F.pad(exponents + RAISED, (0, end // 32)).unflatten(1, (-1, 4)).to(torch.uint8)
        self.scales[at] = raised.view(torch.int32)[..., 0]

    def values(self, experts: Tensor | int) -> Tensor:
        """Returns the matrix [N, K] of one expert, or [..., N, K] for a tensor of expert ids, in `dtype`."""
        if self.codes is not None:
            _, count, width = self.shape
            first = torch.as_tensor(experts, dtype=torch.int64, device=self.data.device)[..., None] * count
            ids = first + self._places(torch.arange(count, device=self.data.device))
            return self.codes.rows(ids, self.dtype)[..., :width]
        if self.scales is None:
            values = self.data[experts]
            return values if self.data.dim() == 3 else values.flatten(-3, -2)
        codes = _codes(self.data[experts].transpose(-3, -2))  # [..., N/16, 16, K']
        words = self.scales[experts].transpose(-2, -1)[..., None]  # [..., N/16, 16, C, 1]
        exponents = words.view(torch.uint8).flatten(-2).int() - RAISED
        values = e2m1(codes) * power_of_two(exponents).repeat_interleave(32, -1)
        rows = values.flatten(-3, -2)[..., : self.width].to(self.dtype)
        return rows[..., self._places(torch.arange(rows.shape[-2], device=rows.device)), :]

    def _places(self, rows: Tensor) -> Tensor:
        """Converts indices of rows of an expert's matrix in the checkpoint to indices in the stack.

        rows: indices, in a tensor of any shape. The result has the same shape.
        """
        if not self.gated:
            return rows
        half = self.shape[1] // 2
        return rows % half // 8 * 16 + rows // half * 8 + rows % half % 8


def can_stack_codes(shape: tuple[int, int], kind: CodesKind) -> bool:
    """True if the quantised matrices (N, K) of experts can be stored as a quantised `ExpertStack`.

    kind: format of each matrix, and the blocks that share a scale.
    """
    rows, width = shape
    if rows % 16 or width % 64:
        return False
    whole = -(-width // CHUNK) * CHUNK
    return kind == MXFP4 or can_pack_codes((rows, whole), _padded(kind, width))


def _padded(kind: CodesKind, width: int) -> CodesKind:
    """Returns the kind of a quantised matrix after its rows of `width` columns are padded to whole chunks.

    If each row has one scale before, each padded row has one scale.
    """
    rows, columns = kind.block
    return CodesKind(kind.format, (rows, -(-width // CHUNK) * CHUNK if columns >= width else columns))


def _words(codes: Tensor) -> Tensor:
    """Packs fp4 codes, uint8 [rows, 128 C], into int32 [rows, C, 16] as code_packing.py describes."""
    apart = codes.to(torch.int16).unflatten(1, (-1, 4, 4, 4, 2))  # k: i, t, c, h
    halves = torch.zeros_like(apart[:, :, 0])
    for i, moves in enumerate(FIELDS["fp4"]):
        for first, bits, place in moves:
            halves |= ((apart[:, :, i] >> first) & (2**bits - 1)) << place
    return halves.view(torch.int32).flatten(2)


def _codes(words: Tensor) -> Tensor:
    """Undoes `_words`: returns int16 codes [..., 128 C] of int32 [..., C, 16]."""
    halves = words.contiguous().view(torch.int16)
    parts = []
    for moves in FIELDS["fp4"]:
        code = torch.zeros_like(halves)
        for first, bits, place in moves:
            code |= ((halves >> place) & (2**bits - 1)) << first
        parts.append(code)
    return torch.stack(parts, -2).flatten(-3)


def power_of_two(exponents: Tensor) -> Tensor:
    """Computes 2^(e - 127) in fp32 for biased exponents e of any shape."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Router and routed experts of one MoE layer: E experts of intermediate size I.

    Attributes:
        router: [E, hidden].
        router_bias: [E].
        correction: fp32 [E], added to the router's scores only to choose experts (DeepSeek-V3, arXiv 2412.19437).
        gate_up: [E, 2 * I, hidden], gate rows first.
        gate_up_bias: [E, 2 * I]. After `columns` selected I' of the I columns, it is [E, 2, I'].
        down: [E, hidden, I].
        down_bias: [E, hidden].
        shared_gate: [1, hidden], gate of the shared expert, whose matrices are `gate_up` and `down` of `LayerWeights`.
        latent_in, latent_out: [latent, hidden] and [hidden, latent], projections before and after the experts. The
            experts' own matrices then have `latent` in place of `hidden`. None: there are no projections.
        joined: True if the shared expert is stored as the last experts in `gate_up` and `down`, one or more of them.
            Its gate, if it has one, is the last row of the router, and `shared_gate` is None. The router is then
            row-major.

    A bias, `correction` or `shared_gate` is None if the model does not have it.
    """

    router: Weight
    gate_up: ExpertStack
    down: ExpertStack
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_gate: Weight | None = None
    latent_in: Weight | None = None
    latent_out: Weight | None = None
    joined: bool = False

    def columns(self, cut: slice) -> ExpertWeights:
        """Returns views of the experts' weights for a range `cut` of their I intermediate columns.

        In the result, `gate_up` and its bias have these rows of each gate and of each up. `down` has these columns. The
        weights must not be quantised.
        """
        bias = self.gate_up_bias
        return replace(
            self,
            gate_up=ExpertStack.of(self.gate_up.data.unflatten(1, (2, -1))[:, :, cut]),
            gate_up_bias=None if bias is None else bias.unflatten(1, (2, -1))[:, :, cut],
            down=ExpertStack.of(self.down.data[:, :, cut]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        held = [getattr(self, field.name) for field in fields(self) if field.name != "joined"]
        return sum(each.nbytes for each in held if each is not None)
