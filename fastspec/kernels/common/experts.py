"""The experts of a layer in the format of kernels: one stack of matrices for each of their two products.

| form  | data                                                         | element [e, n, k] of the stack             |
|-------|--------------------------------------------------------------|--------------------------------------------|
| rows  | [E, N, K] bf16, fp16 or fp32                                 | [e, n, k]                                  |
| mxfp4 | int32 [E, N/16, C, 16, 16], scales int32 [E, N/16, C, 16]    | e2m1(code) * 2^(scale - 127), packed       |
| codes | `PackedCodes` of one matrix [E N, 128 C], with padded columns | as in `PackedCodes`                        |

OCP Microscaling Formats 1.0 defines mxfp4. C chunks of 128 values of K are packed as `code_packing` packs "fp4"; the
last chunk is padded with zeros. A row's 128 codes are 64 bytes, and 16 rows of a chunk are contiguous.

Byte g of a row's word of scales belongs to values 32 g .. 32 g + 31. It is the checkpoint's exponent plus `RAISED`: the
exponent of a bf16, by which codes are multiplied. As bf16, codes are 2^126 times too small.

Rows of a gated stack are interleaved: 8 of the gate, then the matching 8 of up.
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
RAISED = 64  # added to the stored exponents of scales
LOWERED = 126 - RAISED  # sums of products are 2^LOWERED times too small
_NO_ZERO = 8  # zero point of int4 codes without one
_BIAS = 127  # of a scale's exponent
_MAX_EXPONENT = 254 - RAISED  # biased exponent of the largest scale that fits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """One matrix [N, K] for each of E experts; y = x W^T.

    Attributes:
        data: values [E, N, K], or [E, 2, N/2, K] for some rows of the gate and of up. For codes their int32 words
            [E, N/16, C', 16, 16].
        scales: for mxfp4 int32 [E, N/16, C, 16], four exponents a word; else None.
        dtype: dtype of the values; for codes, dtype of the activations that they multiply.
        width: K.
        gated: rows of codes are interleaved. Values have the gate's N/2 rows first.
        codes: codes of all experts other than mxfp4. Their rows are not `gated`, but already interleaved.
    """

    data: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    width: int
    gated: bool = False
    codes: PackedCodes | None = None

    @classmethod
    def of(cls, values: Tensor) -> ExpertStack:
        """Makes a stack of values [E, N, K]. The tensor is not copied."""
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
        """Allocates a stack of shape (E, N, K) in codes: mxfp4, which `fill_codes` fills, or others, for `fill_all`.

        Args:
            shape: `can_stack_codes` returns True for (N, K).
            kind: format and blocks of each matrix.
            dtype: dtype of the activations.
            device: device of the stack.
            gated: rows 0 .. N/2 - 1 are the gate, the others are up.
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

    @property
    def in_codes(self) -> bool:
        """True if the stack is in codes, mxfp4 or others."""
        return self.scales is not None or self.codes is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        rows = 16 * self.data.shape[1] if self.in_codes else self.data.shape[1:-1].numel()
        return len(self.data), rows, self.width

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        if self.codes is not None:
            return self.codes.nbytes
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def fill_all(self, experts: Iterable[Codes]) -> None:
        """Writes all experts' codes [N, K], other than mxfp4, in the order of experts. The gate's rows come first.

        Raises:
            ValueError: codes of another kind, or scales that this form cannot hold; see `PackedCodes.fill`.
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
        """Writes rows of one expert, from row `first` on, as mxfp4.

        Args:
            expert: its number.
            first: row of the first code in the checkpoint's order, in which the gate's rows come first.
            codes: [rows, K] with scales [rows, K/32].

        Raises:
            ValueError: the codes are of another kind, or a scale is not a power of two from 2^-127 to 2^63.
        """
        assert self.scales is not None, "a stack of values has no room for codes"
        if codes.kind != MXFP4:
            raise ValueError(f"codes are {codes.kind}; wanted {MXFP4}")
        bits = codes.scales.view(torch.int32)
        exponents = bits >> 23  # 2^-127 has none
        wrong = (
            ((bits & 0x7FFFFF) != 0).logical_and(codes.scales != 2.0**-_BIAS) | (exponents > _MAX_EXPONENT) | (bits < 0)
        )
        if bool(wrong.any()):
            raise ValueError("a scale is no power of two from 2^-127 to 2^63")
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
        """Converts row numbers of the checkpoint to row numbers of the stack."""
        if not self.gated:
            return rows
        half = self.shape[1] // 2
        return rows % half // 8 * 16 + rows // half * 8 + rows % half % 8


def can_stack_codes(shape: tuple[int, int], kind: CodesKind) -> bool:
    """True if a stack of quantised matrices (N, K) has a form in codes."""
    rows, width = shape
    if rows % 16 or width % 64:
        return False
    whole = -(-width // CHUNK) * CHUNK
    return kind == MXFP4 or can_pack_codes((rows, whole), _padded(kind, width))


def _padded(kind: CodesKind, width: int) -> CodesKind:
    """Returns the kind of codes whose rows are padded to whole chunks. One scale per row stays one."""
    rows, columns = kind.block
    return CodesKind(kind.format, (rows, -(-width // CHUNK) * CHUNK if columns >= width else columns))


def _words(codes: Tensor) -> Tensor:
    """Packs uint8 codes [rows, K'] into int32 [rows, C, 16]; K' is a multiple of 128."""
    apart = codes.to(torch.int16).unflatten(1, (-1, 4, 4, 4, 2))  # k: i, t, c, h
    halves = torch.zeros_like(apart[:, :, 0])
    for i, moves in enumerate(FIELDS["fp4"]):
        for first, bits, place in moves:
            halves |= ((apart[:, :, i] >> first) & (2**bits - 1)) << place
    return halves.view(torch.int32).flatten(2)


def _codes(words: Tensor) -> Tensor:
    """Undoes `_words`: int16 codes [..., K'] of int32 [..., C, 16]."""
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
    """Router and experts of one layer: E experts of intermediate size I.

    Attributes:
        router: [E, hidden].
        router_bias: [E].
        correction: fp32 [E], added to the scores only to choose experts (DeepSeek-V3, arXiv 2412.19437).
        gate_up: [E, 2 * I, hidden], gate rows first.
        gate_up_bias: [E, 2 * I], or [E, 2, I] of some columns.
        down: [E, hidden, I].
        down_bias: [E, hidden].
        shared_gate: [1, hidden], gate of the shared expert. `gate_up` and `down` of `LayerWeights` are its matrices.
        latent_in, latent_out: [latent, hidden] and [hidden, latent], products before and after the experts, whose own
            `hidden` is then `latent`. None: there are none.
        joined: True if the shared expert is expert number E of gate_up and down, which then have E + 1 experts. Its
            gate, if any, is the last row of the router, and `shared_gate` is None. The router is then stored as rows.
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
        """Views the same experts with a range of the I columns between their two products.

        Codes cannot be viewed like that.
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
