"""Gives each expert's matrices their own names, for all ways in which checkpoints and live modules store them.

| stored as, for N experts of width I                      | by                                       |
|----------------------------------------------------------|------------------------------------------|
| `mlp.experts.3.gate_proj.weight` and so on               | publishers; the names that are used here |
| `feed_forward.experts.3.w1.weight`, w3 and w2            | publishers of LFM2                       |
| `mixer.experts.3.up_proj.weight` and `down_proj`         | publishers of Nemotron-H                 |
| `block_sparse_moe.input_linear` and `output_linear`      | Granite 4's publishers, as gate_up_proj  |
| `block_sparse_moe.experts.3.w1.weight`, w3 and w2        | publishers of Mixtral                    |
| `mlp.experts.gate_up_proj` [N, 2 I, hidden], `down_proj` | transformers 5 in memory                 |
| `mlp.experts.gate_up_proj`, `down_proj`, transposed      | publishers of Qwen3-VL                   |
| transposed as above, gate and up interleaved, and biases | gpt-oss in 16 bits                       |
| `gate_up_proj_blocks` and `_scales`, `down_proj_...`     | gpt-oss in mxfp4                         |
| `gate_up_proj` in fp8 and `gate_up_proj_scale_inv`       | transformers 5 in fp8                    |
| `gate_up_proj` in bytes and `gate_up_proj_weight_scale`  | ModelOpt in NVFP4, also transposed       |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from fastspec.errors import CheckpointError
from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.experts import MXFP4, power_of_two
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource
from fastspec.models.families import FAMILIES
from fastspec.shapes import ClampedGate

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.checkpoints.quantised.configs import Quantisation
    from fastspec.models.config import ModelSpec
    from fastspec.models.families.plan import ExpertsPlan

PLACE: Final = re.compile(r"(.*layers\.\d+\.)(mlp|block_sparse_moe|feed_forward|mixer)\.(.+)")
NAMED_MLP: Final = ("mlp", "block_sparse_moe")  # all tensors of these modules get the prefix mlp, not only experts
GRANITE: Final = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
}
MIXTRAL: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
BLOCKS, SCALES = "_blocks", "_scales"
# tensors beside a quantised stack: end of the name -> last part of the name for one expert's matrix
BESIDE: Final = {
    "_scale_inv": "weight_scale_inv",
    "_activation_scale": "activation_scale",
    **{f"_{leaf}": leaf for leaf in ("weight_scale", "weight_scale_2", "input_scale")},
}
BYTES: Final = "U8"  # dtype of stacks with two codes of four bits in a byte
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_CODES_OF_BLOCK = 16  # bytes for 32 values


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Location of one expert's matrix or bias in a stored tensor that contains those of all experts.

    Attributes:
        stored: name of the stored tensor. For mxfp4 without the suffix `_blocks`.
        expert: index of the expert on the tensor's first axis.
        rows: range of rows of the expert's matrix after it was transposed back, or of elements of its bias. None: the
            expert has one number, or all experts have the same.
        transposed: True if the expert's matrix is stored transposed.
    """

    stored: str
    expert: int
    rows: slice | None
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the expert's matrix or bias as a view of `tensor`, which is the stored tensor."""
        mine = tensor if tensor.dim() == 0 else tensor[self.expert]
        return mine if self.rows is None else (mine.t() if self.transposed else mine)[self.rows]


def by_expert(source: TensorSource, spec: ModelSpec, name: str) -> TensorSource:
    """Returns a source with separate tensors for each expert. If the spec has no experts, returns `source` itself.

    Args:
        source: the stored tensors.
        spec: spec of the model.
        name: name of the checkpoint, for messages.
    """
    return ExpertTensors(source, spec, name) if any(plan.experts for plan in spec.plans) else source


def check_mxfp4(source: object, quantisation: Quantisation | None, name: str) -> None:
    """Refuses a checkpoint if only one of these is true: its config says mxfp4, and its experts are stored in mxfp4.

    Args:
        source: result of `by_expert`.
        quantisation: quantisation settings of the config. None: it has none.
        name: name of the checkpoint, for messages.

    Raises:
        CheckpointError: only one is true. The message has the stored format and that of the config.
    """
    said = quantisation is not None and quantisation.method == "mxfp4"
    found = isinstance(source, ExpertTensors) and source.quantised
    if said != found:
        stored = "in mxfp4" if found else "as plain values"
        asked = "says mxfp4" if said else "does not say mxfp4"
        raise CheckpointError(
            f"{name}: experts are stored {stored}, and quantization_config {asked}; take config.json and weights of "
            "one commit"
        )


class ExpertTensors(WrappedSource):
    """Tensors of a source, in which each expert's matrices and biases are separate tensors.

    Args:
        source: `ShardTensors` or `ModuleTensors`.
        spec: spec of a model whose layers have experts.
        name: name of the checkpoint, for messages.

    Raises:
        CheckpointError: a tensor with all experts does not have the shape that follows from the config, a scale is
            missing, or a parameter is stored twice.
    """

    def __init__(self, source: TensorSource, spec: ModelSpec, name: str) -> None:
        super().__init__(source)
        self._name = name
        plan = next(plan.experts for plan in spec.plans if plan.experts is not None)
        self._plan, self._hidden = plan, plan.latent or spec.hidden_size
        self._interleaved = isinstance(plan.activation, ClampedGate)
        may_be_transposed = FAMILIES[spec.family].transposed_experts
        self._transposed = self._interleaved or (may_be_transposed and self._look_transposed(source.infos()))
        self._bytes_transposed = self._look_transposed(source.infos(), packed=True)
        self._names: dict[str, str] = {}
        self._parts: dict[str, ExpertPart] = {}
        self._infos: dict[str, TensorInfo] = {}
        for stored, info in source.infos().items():
            self._take(stored, info)
        self._left: dict[str, set[str]] = {}
        for here, part in self._parts.items():
            self._left.setdefault(part.stored, set()).add(here)
        self.unnamed = frozenset(here for here in self._infos if self._names[here] in source.unnamed)

    @property
    def quantised(self) -> bool:
        """True if experts are stored as mxfp4."""
        return any(part.stored + BLOCKS in self._source.infos() for part in self._parts.values())

    def _look_transposed(self, infos: Mapping[str, TensorInfo], packed: bool = False) -> bool:
        """True if the shapes show that the matrices of experts are stored transposed.

        The shape of a square matrix does not show it. But no layer has only square ones.

        Args:
            infos: properties of the stored tensors, by name.
            packed: True for stacks with two codes in a byte, False for all others.
        """
        for stored, info in infos.items():
            name = found[3].removeprefix("experts.") if (found := PLACE.fullmatch(stored)) else ""
            if name not in _STACKS:
                continue
            rows, width = self._size(name)
            width = width // 2 if packed else width
            if (info.dtype == BYTES) == packed and rows != width and info.shape == (self._plan.count, width, rows):
                return True
        return False

    def _size(self, kind: str) -> tuple[int, int]:
        """Returns (rows, columns) of one expert's matrix in the tensor named `kind`, which is one of `_STACKS`."""
        width = self._plan.width
        first = 2 * width if kind == "gate_up_proj" else width
        return (self._hidden, width) if kind == "down_proj" else (first, self._hidden)

    def _take(self, stored: str, info: TensorInfo) -> None:
        """Registers a stored tensor under its usual name. A tensor of all experts gets one name for each expert's part.

        Args:
            stored: stored name of the tensor.
            info: properties of the tensor.
        """
        found = PLACE.fullmatch(stored)
        if found is None:
            self._enter(stored, stored, info)
            return
        before, module, name = found.groups()
        if module == "block_sparse_moe":
            name = GRANITE.get(name, name.replace("router.layer.", "router.", 1))
        words = name.split(".")
        if words[0] != "experts" and module not in NAMED_MLP:
            self._enter(stored, stored, info)
            return
        if words[0] == "experts" and len(words) == 2:
            self._take_all(f"{before}mlp.experts", words[1], stored, info)
            return
        if words[0] == "experts" and len(words) == 4:
            words[2] = MIXTRAL.get(words[2], words[2])
        self._enter(f"{before}mlp." + ".".join(words), stored, info)

    def _enter(self, here: str, stored: str, info: TensorInfo) -> None:
        if here in self._infos:
            both = f"{self._inner(here)!r} and {stored!r}"
            raise CheckpointError(f"{self._name}: {both} are both the parameter {here}; keep one")
        self._names[here], self._infos[here] = stored, info

    def _take_all(self, experts: str, name: str, stored: str, info: TensorInfo) -> None:
        """Registers each expert's part of a stored tensor that contains all experts.

        Args:
            experts: prefix of the parts' names.
            name: last part of the tensor's stored name.
            stored: whole stored name of the tensor.
            info: properties of the tensor.
        """
        if name.endswith(SCALES):
            return  # registered with the tensor of its blocks
        for end, leaf in BESIDE.items():
            if name.endswith(end) and name.removesuffix(end) in _STACKS:
                self._take_beside(experts, name.removesuffix(end), leaf, stored, info)
                return
        blocks, bias = name.endswith(BLOCKS), name.endswith("_bias")
        kind = name.removesuffix(BLOCKS).removesuffix("_bias")
        if kind not in _STACKS:
            self._enter(f"{experts}.{name}", stored, info)
            return
        plan, up = self._plan, kind == "gate_up_proj"
        rows, width = self._size(kind)
        packed = info.dtype == BYTES and not blocks
        transposed = self._bytes_transposed if packed else self._transposed and not blocks and not bias
        width = width // 2 if packed else width
        if packed and self._interleaved:
            raise CheckpointError(
                f"{self._name}: {stored} in {info.where} has codes of experts whose gate and up rows alternate; wanted "
                "mxfp4, or 16-bit values. Use the checkpoint that the model's authors publish"
            )
        self._check(stored, info, self._shape(plan, rows, width, blocks, bias, transposed))
        step = 2 if self._interleaved else 1
        halves = {
            "gate_proj": slice(0, rows, 2) if step == 2 else slice(0, rows // 2),
            "up_proj": slice(1, rows, 2) if step == 2 else slice(rows // 2, rows),
        }
        dtype: torch.dtype | str = torch.float32 if blocks else info.dtype
        for part, where in halves.items() if up else [(kind, slice(0, rows))]:
            size = rows // 2 if up else rows
            shown = TensorInfo((size,) if bias else (size, width), dtype, info.where)
            for expert in range(plan.count):
                here = f"{experts}.{expert}.{part}.{'bias' if bias else 'weight'}"
                self._enter(here, stored, shown)
                self._parts[here] = ExpertPart(stored.removesuffix(BLOCKS), expert, where, transposed)
        if blocks:
            self._check_scales(stored.removesuffix(BLOCKS) + SCALES, (plan.count, rows, width // 32))

    def _take_beside(self, experts: str, kind: str, leaf: str, stored: str, info: TensorInfo) -> None:
        """Registers each expert's part of a tensor beside a quantised stack, such as the scales of its blocks.

        The shape of each part is checked later, with that of its matrix.

        Args:
            experts: prefix of the parts' names.
            kind: name of the stack, one of `_STACKS`.
            leaf: last part of the parts' names.
            stored: whole stored name of the tensor.
            info: properties of the tensor.
        """
        names, count = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,), self._plan.count
        flat, transposed = len(info.shape) < 2, self._bytes_transposed if leaf == "weight_scale" else self._transposed
        rows = info.shape[2 if transposed else 1] if len(info.shape) == 3 else 1
        splits = rows == 1 or rows % len(names) == 0
        if (
            info.shape[:1] not in ((), (count,))
            or len(info.shape) == 2
            or len(info.shape) > 3
            or not splits
            or (self._interleaved and not flat)
        ):
            raise CheckpointError(
                f"{self._name}: {stored} in {info.where} has shape {list(info.shape)}, wanted [{count}], one number, "
                "or one matrix for each expert, of which one half is the gate's and the other half that of up"
            )
        other = info.shape[1 if transposed else 2] if not flat else 0
        each = rows if rows == 1 else rows // len(names)  # a single scale belongs to both halves
        for at, part in enumerate(names):
            first = 0 if rows == 1 else at * each
            shown = TensorInfo(() if flat else (each, other), info.dtype, info.where)
            where = None if flat else slice(first, first + each)
            for expert in range(count):
                here = f"{experts}.{expert}.{part}.{leaf}"
                self._enter(here, stored, shown)
                self._parts[here] = ExpertPart(stored, expert, where, transposed)

    def _shape(
        self, plan: ExpertsPlan, rows: int, width: int, blocks: bool, bias: bool, transposed: bool
    ) -> tuple[int, ...]:
        if bias:
            return plan.count, rows
        if blocks:
            return plan.count, rows, width // 32, _CODES_OF_BLOCK
        return (plan.count, width, rows) if transposed else (plan.count, rows, width)

    def _check(self, stored: str, info: TensorInfo, wanted: tuple[int, ...]) -> None:
        if info.shape != wanted:
            raise CheckpointError(
                f"{self._name}: {stored} in {info.where} has shape {list(info.shape)}, wanted {list(wanted)} from the "
                f"config ({self._plan.count} experts of width {self._plan.width}, hidden_size={self._hidden})"
            )

    def _check_scales(self, stored: str, wanted: tuple[int, ...]) -> None:
        info = self._source.infos().get(stored)
        if info is None:
            raise CheckpointError(f"{self._name}: {stored} is missing; the mxfp4 experts beside it need it")
        self._check(stored, info, wanted)

    def _inner(self, name: str) -> str:
        return self._names[name]

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns the properties of every tensor. Each expert's matrices have their own names."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns the tensor `name` on the source's device. An mxfp4 matrix is dequantised to fp32 on the CPU."""
        codes = self.codes(name, torch.device("cpu"))
        if codes is not None:
            return codes.dequantise(torch.float32)
        part, whole = self._parts.get(name), super().read(name)
        return whole if part is None else part.of(whole)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`."""
        if name in self._parts:
            return self.read(name)[(rows, columns)[: len(self._infos[name].shape)]]
        return super().read_part(name, rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format of the matrix `name`: `MXFP4` for experts in mxfp4. None: not quantised."""
        if self._in_blocks(name):
            return MXFP4
        return None if name in self._parts else super().kind(name)

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns the quantised matrix `name` on a device, without dequantising it. None: it is not quantised."""
        if not self._in_blocks(name):
            return None if name in self._parts else super().codes(name, device)
        return self._codes_of(name, slice(None), slice(None), device)

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Returns a range of rows and columns of the quantised matrix `name`. None: it is not quantised.

        If the columns do not begin and end between blocks of an mxfp4 matrix, the whole matrix is read and then cut.
        """
        if not self._in_blocks(name):
            return None if name in self._parts else super().codes_part(name, rows, columns, device)
        height, width = self._infos[name].shape
        start, stop = columns.indices(width)[:2]
        size = MXFP4.block[1]
        if start % size == stop % size == 0:
            return self._codes_of(name, rows, slice(start // size, stop // size), device)
        top, bottom = rows.indices(height)[:2]
        return self._codes_of(name, slice(None), slice(None), device).part([(top, bottom)], (start, stop))

    def _codes_of(self, name: str, rows: slice, blocks: slice, device: torch.device) -> Codes:
        """Returns a range of rows, and of blocks of 32 columns, of an expert's matrix in mxfp4."""
        part = self._parts[name]
        packed = part.of(self._source.read(part.stored + BLOCKS))[rows, blocks].to(device)
        exponents = part.of(self._source.read(part.stored + SCALES))[rows, blocks].to(device)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        return Codes(MXFP4, codes, power_of_two(exponents))

    def _in_blocks(self, name: str) -> bool:
        return name in self._parts and self._names[name].endswith(BLOCKS)

    def release(self, names: list[str]) -> None:
        """Frees the memory of these tensors in the source.

        A stored tensor of all experts is freed when this and earlier calls have named all its parts.
        """
        free = [self._names[name] for name in names if name not in self._parts]
        for name in names:
            if name in self._parts:
                stored = self._parts[name].stored
                self._left[stored].discard(name)
                if not self._left[stored]:
                    free.append(stored)
        self._source.release(free)
