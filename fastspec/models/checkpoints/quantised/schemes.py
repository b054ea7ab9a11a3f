"""Layouts in which tools store a quantised matrix, called schemes, and the conversion of each to `Codes`.

| scheme        | written by                               | stored tensors of a matrix [N, K]                       |
|---------------|------------------------------------------|--------------------------------------------------------|
| Float8        | compressed-tensors, fp8, ModelOpt        | weight e4m3 [N, K], a scale                             |
| Int8          | compressed-tensors                       | weight int8 [N, K], a scale                             |
| PackedInt     | compressed-tensors (pack-quantized)      | weight_packed int32 [N, K bits/32], scale, zero points  |
| Float4        | compressed-tensors and ModelOpt (NVFP4), | weight_packed or weight uint8 [N, K/2], block scales,   |
|               | compressed-tensors (MXFP4)               | and for NVFP4 one global scale                          |
| Awq           | AWQ, version gemm                        | qweight int32 [K, N/8], qzeros, scales                  |
| Gptq          | GPTQ v1 and v2                           | qweight int32 [K bits/32, N], qzeros, scales, g_idx     |

The decoded number is multiplied by its scale. But it is divided by the global scale in NVFP4 of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.common.codes import Codes, CodesKind

SCALES = ("F32", "BF16", "F16")
POWERS = "F8_E8M0"  # dtype of scales that are powers of two
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word, in nibbles, of column j of eight


Over = tuple[tuple[Literal["N", "K"], int], ...]


class StoredPart(NamedTuple):
    """Description of one of the tensors that store a quantised matrix [N, K].

    Attributes:
        shapes: permitted shapes.
        dtypes: permitted dtypes, by the names of safetensors.
        required: False if the tensor may be missing.
        over: a pair (axis of the matrix, count) for each axis of the tensor. The axis is "N" or "K". An element of the
            tensor belongs to `count` rows (N) or columns (K) of the matrix. If the tensor's axis has size 1, the
            element belongs to all of them. Empty: the tensor belongs to the whole matrix.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    required: bool = True
    over: Over = (("N", 1), ("K", 1))


class Scheme(Protocol):
    """Layout in which a quantised matrix is stored."""

    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        """Returns descriptions of the tensors that store a matrix of shape (N, K).

        The keys are the last parts of their names, such as "weight_scale". The name of the module comes before them.
        """

    def kind(self, shape: tuple[int, int]) -> CodesKind:
        """Returns the quantised format of the `Codes` of a matrix of shape (N, K)."""

    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        """Converts the stored tensors of a matrix to `Codes`, on the device of the tensors.

        Args:
            tensors: last part of a tensor's name -> tensor.
            shape: (N, K) of the matrix.

        Raises:
            ValueError: a tensor has values that the layout does not allow. The message names them.
        """

    def describe(self) -> str:
        """Describes the layout in a few words, for messages."""


@dataclass(frozen=True, slots=True)
class Float8(Scheme):
    """Codes are e4m3 floats. There is one scale for the matrix, for each row, or for each block.

    Attributes:
        block: rows and columns that share a scale. None: a row, or the whole matrix; the shape of the scale says which.
        scale: last part of the name of the tensor with the scale.
    """

    block: tuple[int, int] | None
    scale: str = "weight_scale"

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        return {
            "weight": StoredPart((shape,), ("F8_E4M3",)),
            self.scale: StoredPart(_scale_shapes(shape, self.block), (*SCALES, POWERS), over=_over(self.kind(shape))),
            **_unused(shape, self.block),
        }

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("fp8", self.block or (1, shape[1]))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        _check_no_zeros(tensors)
        codes = tensors["weight"].view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise ValueError("weight holds NaN")
        return Codes(self.kind(shape), codes, _scales(tensors[self.scale], self.kind(shape), shape))

    @override
    def describe(self) -> str:
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"


@dataclass(frozen=True, slots=True)
class Int8(Scheme):
    """Codes are int8 numbers. There is one scale for the matrix, for each row, or for each group of columns.

    Attributes:
        group: columns of a row that share a scale. None: a row, or the whole matrix; the shape of the scale says which.
    """

    group: int | None = None

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        block = None if self.group is None else (1, self.group)
        return {
            "weight": StoredPart((shape,), ("I8",)),
            "weight_scale": StoredPart(_scale_shapes(shape, block), SCALES, over=_over(self.kind(shape))),
            **_unused(shape, block),
        }

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("int8", (1, self.group or shape[1]))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        _check_no_zeros(tensors)
        scales = _scales(tensors["weight_scale"], self.kind(shape), shape)
        return Codes(self.kind(shape), tensors["weight"].view(torch.uint8), scales)

    @override
    def describe(self) -> str:
        return "int8" if self.group is None else f"int8 in groups of {self.group}"


@dataclass(frozen=True, slots=True)
class PackedInt(Scheme):
    """Codes of 4 or 8 bits. A stored 32-bit word has several codes along K, lowest bits first.

    Stored codes are unsigned: half of their range is added to them.

    Attributes:
        bits: bits of a code, 4 or 8.
        group: columns of a row that share a scale. None: the whole row.
        symmetric: True if no zero points are stored. Then every zero point is half of the range.
    """

    bits: int
    group: int | None
    symmetric: bool

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        rows, columns = shape
        scales = self.kind(shape).scales_shape(shape)
        per_word = 32 // self.bits
        found = {
            "weight_packed": StoredPart(((rows, -(-columns // per_word)),), ("I32",), over=(("N", 1), ("K", per_word))),
            "weight_scale": StoredPart((scales,), SCALES, over=_over(self.kind(shape))),
            "weight_shape": StoredPart(((2,),), ("I64", "I32"), required=False, over=()),
            "weight_g_idx": StoredPart(((columns,),), ("I32", "I64"), required=False, over=(("K", 1),)),
        }
        if not self.symmetric:
            over: Over = (("N", per_word), ("K", self.kind(shape).block[1]))
            found["weight_zero_point"] = StoredPart(((-(-rows // per_word), scales[1]),), ("I32",), over=over)
        return found

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("int4" if self.bits == 4 else "int8", (1, self.group or shape[1]))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        kind = self.kind(shape)
        stored = tensors.get("weight_shape")
        if stored is not None and tuple(stored.tolist()) != shape:
            raise ValueError(f"weight_shape says {stored.tolist()}, and the config {list(shape)}")
        _check_groups(tensors.get("weight_g_idx"), kind.block[1], shape[1])
        codes = unpacked(tensors["weight_packed"], self.bits)[:, : shape[1]]
        scales = _scales(tensors["weight_scale"], kind, shape)
        if self.bits == 8:
            return Codes(kind, codes ^ 0x80, scales)  # subtracts 128: the result is an int8
        if self.symmetric:
            return Codes(kind, codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))
        zeros = unpacked(tensors["weight_zero_point"].t(), 4).t()[: shape[0]]
        return Codes(kind, codes, scales, zeros.contiguous())

    @override
    def describe(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits} in groups of {self.group}"


@dataclass(frozen=True, slots=True)
class Float4(Scheme):
    """Codes are e2m1 floats, two in a byte, low bits first.

    Attributes:
        group: columns of a row that share a scale: 16 for NVFP4, whose scales are e4m3, or 32 for MXFP4, whose scales
            are powers of two (e8m0).
        weight: last part of the name of the tensor with codes.
        overall: last part of the name of the tensor with NVFP4's global scale. None: MXFP4.
        divides: True if numbers are divided by the global scale, False if they are multiplied by it.
    """

    group: int
    weight: str = "weight_packed"
    overall: str | None = None
    divides: bool = False

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        rows, columns = shape
        found = {
            self.weight: StoredPart(((rows, columns // 2),), ("U8",), over=(("N", 1), ("K", 2))),
            "weight_scale": StoredPart(
                ((rows, columns // self.group),),
                ("F8_E4M3",) if self.overall else ("U8", POWERS),
                over=_over(self.kind(shape)),
            ),
        }
        if self.overall:
            found[self.overall] = StoredPart(((), (1,)), ("F32",))
        for name in ("input_scale", "input_global_scale"):
            found[name] = StoredPart(((), (1,)), SCALES, required=False)
        return found

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("fp4", (1, self.group))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        packed, kind = tensors[self.weight], self.kind(shape)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        if self.overall is None:
            exponents = tensors["weight_scale"].view(torch.uint8)
            if bool((exponents == 255).any()):
                raise ValueError("weight_scale holds NaN")
            return Codes(kind, codes, torch.exp2(exponents.double() - 127).float())
        overall = tensors[self.overall].float().reshape(1, 1)
        scales = tensors["weight_scale"].float()
        scales = scales / overall if self.divides else scales * overall
        return Codes(kind, codes, _finite(scales, "weight_scale"))

    @override
    def describe(self) -> str:
        return "nvfp4" if self.overall else "mxfp4"


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    """Codes of 4 bits with zero points. A stored 32-bit word has eight codes along N, in the order `AWQ_ORDER`.

    Attributes:
        group: columns of a row that share a scale and a zero point. None: the whole row.
    """

    group: int | None

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        rows, columns = shape
        group = self.group or columns
        groups = -(-columns // group)
        return {
            "qweight": StoredPart(((columns, rows // 8),), ("I32",), over=(("K", 1), ("N", 8))),
            "qzeros": StoredPart(((groups, rows // 8),), ("I32",), over=(("K", group), ("N", 8))),
            "scales": StoredPart(((groups, rows),), SCALES, over=(("K", group), ("N", 1))),
        }

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("int4", (1, self.group or shape[1]))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        kind = self.kind(shape)
        scales = _scales(tensors["scales"].t(), kind, shape)
        return Codes(kind, self._in_order(tensors["qweight"]), scales, self._in_order(tensors["qzeros"]))

    def _in_order(self, words: Tensor) -> Tensor:
        nibbles: Tensor = unpacked(words, 4).unflatten(1, (-1, 8))
        return nibbles[:, :, AWQ_ORDER].flatten(1).t().contiguous()

    @override
    def describe(self) -> str:
        return "int4" if self.group is None else f"int4 in groups of {self.group}"


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    """Codes of 4 or 8 bits. A stored 32-bit word has several codes along K, or several zero points along N.

    Attributes:
        bits: bits of a code, 4 or 8. With 8 bits every zero point must be 128.
        group: columns of a row of the matrix that share a scale and a zero point. None: the whole row.
        less_one: True if one was subtracted from every zero point before it was stored (GPTQ v1).
        symmetric: True if the config says that quantisation is symmetric. Then every 4-bit zero point must be 8.
    """

    bits: int
    group: int | None
    less_one: bool
    symmetric: bool = False

    @override
    def parts(self, shape: tuple[int, int]) -> dict[str, StoredPart]:
        rows, columns = shape
        group, per_word = self.group or columns, 32 // self.bits
        groups = -(-columns // group)
        return {
            "qweight": StoredPart(((columns // per_word, rows),), ("I32",), over=(("K", per_word), ("N", 1))),
            "qzeros": StoredPart(((groups, rows // per_word),), ("I32",), over=(("K", group), ("N", per_word))),
            "scales": StoredPart(((groups, rows),), SCALES, over=(("K", group), ("N", 1))),
            "g_idx": StoredPart(((columns,),), ("I32",), required=False, over=(("K", 1),)),
        }

    @override
    def kind(self, shape: tuple[int, int]) -> CodesKind:
        return CodesKind("int4" if self.bits == 4 else "int8", (1, self.group or shape[1]))

    @override
    def codes(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        kind = self.kind(shape)
        _check_groups(tensors.get("g_idx"), kind.block[1], shape[1])
        codes = unpacked(tensors["qweight"].t(), self.bits)
        zeros = unpacked(tensors["qzeros"], self.bits).t()
        if self.less_one:
            zeros = zeros + 1 & (1 << self.bits) - 1
        scales = _scales(tensors["scales"].t(), kind, shape)
        if self.bits == 4:
            if self.symmetric and bool((zeros != 8).any()):
                stored = "7, zero points less one" if self.less_one else "8"
                raise ValueError(
                    f"sym is true, and qzeros are not all {stored}: libraries read such a matrix differently; "
                    "set checkpoint_format to the one that wrote it (gptq or gptq_v2), or sym to false"
                )
            return Codes(kind, codes, scales, zeros.contiguous())
        if bool((zeros != 128).any()):
            raise ValueError("qzeros of 8 bits are not all 128; wanted symmetric quantisation")
        return Codes(kind, codes ^ 0x80, scales)

    @override
    def describe(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits} in groups of {self.group}"


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks int32 words [..., W] to codes uint8 [..., W * 32 / bits]. The lowest bits of a word come first."""
    mask, shifts = (1 << bits) - 1, range(0, 32, bits)
    return torch.stack([(words >> shift & mask).to(torch.uint8) for shift in shifts], dim=-1).flatten(-2)


def _over(kind: CodesKind) -> Over:
    """Returns the value of `StoredPart.over` for the scales of a quantised format."""
    return ("N", kind.block[0]), ("K", kind.block[1])


def _scale_shapes(shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    if block is None:
        return (shape[0], 1), (shape[0],), (1,), (), (1, 1)
    return (CodesKind("fp8", block).scales_shape(shape),)


def _unused(shape: tuple[int, int], block: tuple[int, int] | None) -> dict[str, StoredPart]:
    """Returns descriptions of tensors that may be stored and have no effect: activation scales, and zero points of 0.

    Args:
        shape: (N, K) of the matrix.
        block: rows and columns that share a scale. None: see `Float8.block`.
    """
    over = _over(CodesKind("int8", block or (1, shape[1])))
    zeros = StoredPart(_scale_shapes(shape, block), ("I8", "I32", "I64", "F8_E4M3", *SCALES), required=False, over=over)
    inputs = StoredPart(((), (1,)), SCALES, required=False)
    return {"input_scale": inputs, "activation_scale": inputs, "weight_zero_point": zeros}


def _check_no_zeros(tensors: Mapping[str, Tensor]) -> None:
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and bool((zeros.float() != 0).any()):
        raise ValueError("weight_zero_point is not 0 everywhere; wanted symmetric quantisation of 8 bits")


def _scales(stored: Tensor, kind: CodesKind, shape: tuple[int, int]) -> Tensor:
    """Converts stored scales to fp32, in the shape that the quantised format wants.

    One scale for the whole matrix becomes one for each row or block.

    Args:
        stored: the stored scales.
        kind: the quantised format.
        shape: (N, K) of the matrix.
    """
    wanted, scales = kind.scales_shape(shape), _finite(stored.float(), "scales")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(wanted).contiguous()
    return scales.reshape(wanted).contiguous()


def _finite(scales: Tensor, name: str) -> Tensor:
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name} are not finite")
    return scales


def _check_groups(g_idx: Tensor | None, group: int, columns: int) -> None:
    if g_idx is None or bool((g_idx < 0).all()):  # -1 everywhere: groups in order, as compressed-tensors writes it
        return
    if not torch.equal(g_idx.long(), torch.arange(columns, device=g_idx.device) // group):
        raise ValueError(
            "columns are grouped in the order of activations (act-order), which is not supported; take a checkpoint "
            "quantised with desc_act=false"
        )
