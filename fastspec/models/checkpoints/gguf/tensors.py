"""Weights of a GGUF file, by the names of the model's parameters. Values are those of `gguf.quants.dequantize`.

These formats are quantised in blocks of 32 values. q is the stored code of a value. d and m are stored once per block.

| format | value of a code q                  | as `Codes`                                       |
|--------|------------------------------------|--------------------------------------------------|
| Q4_0   | d (q - 8)                          | int4 in groups of 32, each zero point 8          |
| Q8_0   | d q                                | int8 in groups of 32                             |
| Q4_1   | d q + m, m any fp16                | not possible: a zero point is a whole number     |

A matrix in one of the first two formats stays quantised if `Ops.keeps_codes` says so. Other quantised tensors are
dequantised while they are read.

The package `gguf` has tables from a model's parameter names to the names in the file. llama.cpp stores the q and k
projections of some architectures in another order of rows, and the norms of Gemma as 1 + w.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.common.codes import BITS, Codes, CodesKind
from fastspec.models.checkpoints.gguf.config import ROPE_TENSORS, gguf_arch
from fastspec.models.checkpoints.gguf.header import CODES, GGUF_SUFFIX, MAGIC, GgufHeader
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource
from fastspec.models.layer_table import EMBED, tensor_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastspec.models.config import ModelSpec

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED_AS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
_JOINED: Final = 16  # largest number of rows that are joined to one before `gguf` dequantises them
_SCALE: Final = 2  # bytes of the fp16 scale at the beginning of a block
_TOKENS: Final = "tokenizer.ggml.tokens"
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_ROPED: Final = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


class GgufTensors(TensorSource):
    """Tensors of a GGUF file, by the names of the model's parameters.

    Quantised tensors have dtype float32 in `infos`, the dtype of their dequantised values.

    Args:
        header: header of the file.
        spec: spec of the model, made from the file's metadata.
        in_codes: False to dequantise every matrix, because its values will be rounded to another format.

    Raises:
        CheckpointError: the file has a tensor that is not one of the model's, or another number of experts.
        UnsupportedModel: a tensor has a format that `gguf` cannot dequantise.
    """

    def __init__(self, header: GgufHeader, spec: ModelSpec, *, in_codes: bool = True) -> None:
        self.directory = header.path.parent
        self._in_codes = in_codes
        self._header, self._arch = header, gguf_arch(header)
        self._heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
        self._stored: dict[str, tuple[str, int | None]] = {}
        self._infos: dict[str, TensorInfo] = {}
        names = _names(header, spec.num_layers)
        for parameter, wanted in tensor_shapes(spec).items():
            place = _place(parameter, names)
            if place is None or place[0] not in header.tensors:
                continue  # `check_tensors` reports it
            self._stored[parameter] = place
            self._infos[parameter] = self._info(parameter, wanted, spec)
        used = {*ROPE_TENSORS, *(stored for stored, _ in self._stored.values())}
        others = [stored for stored in header.tensors if stored not in used]
        if others:
            raise CheckpointError(
                f"{header.path}: {listing(others)} unexpected; a {spec.family} model with {spec.num_layers} layers has "
                "no place for them; take the original checkpoint"
            )

    def _info(self, parameter: str, wanted: tuple[int, ...], spec: ModelSpec) -> TensorInfo:
        stored, expert = self._stored[parameter]
        tensor = self._header.tensors[stored]
        shape = tensor.shape
        if expert is not None:
            counts = {plan.experts.count for plan in spec.plans if plan.experts is not None}
            if shape[0] not in counts:
                raise CheckpointError(
                    f"{self._header.path}: {stored} has shape {list(shape)}, wanted {sorted(counts)} experts first"
                )
            shape = shape[1:]
        if wanted == (1, *shape):
            shape = wanted  # llama.cpp drops the one row of a shared expert's gate
        if tensor.kind not in _PLAIN and not _dequantises(tensor.kind):
            raise UnsupportedModel(
                f"{self._header.path}: {stored} is stored as {tensor.kind}, which the package gguf cannot dequantise; "
                "take a file in another format"
            )
        return TensorInfo(shape, _PLAIN.get(tensor.kind, torch.float32), self._header.path.name)

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype of the embedding. bfloat16 if the embedding is quantised."""
        stored, _ = self._stored[EMBED]
        return _PLAIN.get(self._header.tensors[stored].kind, torch.bfloat16)

    def describe(self) -> str:
        """Describes the quantised formats of the file's tensors, with sizes, for messages. Empty: none is quantised."""
        kinds: Counter[str] = Counter()
        for tensor in self._header.tensors.values():
            if tensor.kind not in _PLAIN:
                kinds[tensor.kind] += tensor.nbytes
        return ", ".join(f"{size / 2**20:.1f} MiB of GGUF's {kind}" for kind, size in kinds.most_common())

    @override
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @override
    def read(self, name: str) -> Tensor:
        return self.read_part(name, slice(None), slice(None))

    @override
    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`. Dequantises only these rows."""
        stored, shape = self._stored[name][0], self._infos[name].shape
        kind = self._header.tensors[stored].kind
        if len(shape) == 1:
            values = _values(self._bytes(name).reshape(1, -1), kind)[0]
            order = self._order(stored, shape[0])
            values = (values if order is None else values[torch.from_numpy(order)])[rows]
        else:
            values = _values(self._row_bytes(name, rows), kind)[:, columns]
        if self._arch.plus_one and stored.endswith("norm.weight"):
            return values - 1
        return values

    @override
    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format of the matrix `name`. None: it is not quantised, or is dequantised when read."""
        found = CODES.get(self._header.tensors[self._stored[name][0]].kind)
        return found if self._in_codes and len(self._infos[name].shape) == 2 else None

    @override
    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns the quantised matrix `name` on a device, without dequantising it. None: see `kind`.

        Raises:
            CheckpointError: a scale is not finite.
        """
        return self.codes_part(name, slice(None), slice(None), device)

    @override
    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        kind = self.kind(name)
        if kind is None:
            return None
        codes = _codes(torch.from_numpy(np.ascontiguousarray(self._row_bytes(name, rows))).to(device), kind)
        if not bool(codes.scales.isfinite().all()):
            raise CheckpointError(
                f"{self._header.path}: {self._stored[name][0]} has a scale that is not finite; download it again"
            )
        width = codes.shape[1]
        left, right, _ = columns.indices(width)
        return codes if (left, right) == (0, width) else codes.part([(0, codes.shape[0])], (left, right))

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        """Returns the stored bytes of the tensor `name`. For an expert's matrix: its part of the stored tensor."""
        stored, expert = self._stored[name]
        tensor = self._header.tensors[stored]
        start, size = tensor.start, tensor.nbytes
        if expert is not None:
            size //= tensor.shape[0]
            start += expert * size
        return self._header.data[start : start + size]

    def _row_bytes(self, name: str, rows: slice) -> NDArray[np.uint8]:
        """Returns the stored bytes of a range of rows, in the order of transformers' model: uint8 [rows, bytes]."""
        stored, shape = self._stored[name][0], self._infos[name].shape
        raw = self._bytes(name).reshape(math.prod(shape[:-1]), self._header.tensors[stored].row_bytes)
        order = self._order(stored, shape[0])
        return raw[rows] if order is None else raw[order[rows]]

    def _order(self, stored: str, rows: int) -> NDArray[np.int64] | None:
        """Returns the stored index of each row of a q or k projection. None: rows are in the order of transformers.

        RoPE of llama.cpp rotates the elements 2i and 2i + 1 of a head together. That of transformers rotates i and
        i + half.

        Args:
            stored: stored name of the tensor.
            rows: its number of rows.
        """
        found = _ROPED.fullmatch(stored) if self._arch.permuted else None
        if found is None:
            return None
        heads = self._heads[found[1]]
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def find_gguf(source: object) -> Path | None:
    """Returns the path of the local GGUF file that the source names. None: the source is something else.

    The source is the path of the file, or of a directory that has one GGUF file and no safetensors. A file that is
    named by its path may have any suffix, as in the stores of other programs: then its first bytes tell.

    Raises:
        CheckpointError: a directory with several GGUF files and no safetensors.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if os.path.isfile(path):
        return path if path.suffix.lower() == GGUF_SUFFIX or _begins_as_gguf(path) else None
    if not os.path.isdir(path) or any(path.glob("*.safetensors*")):
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF_SUFFIX)
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: holds {len(files)} GGUF files ({', '.join(each.name for each in files)}); pass one of them, like "
            f"{files[0]}"
        )
    return files[0] if files else None


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def tokenizer_of_gguf(header: GgufHeader, role: str) -> PreTrainedTokenizerBase | None:
    """Makes the tokenizer, with chat template, from a file's metadata. Returns None if the file has none.

    Args:
        header: header of the file.
        role: "target" or "draft", for messages.

    Raises:
        CheckpointError: transformers cannot make it.
    """
    if not header.metadata.get(_TOKENS):
        return None
    path = header.path
    from transformers import PreTrainedTokenizerFast

    try:
        # not AutoTokenizer, which reads the file twice, and takes tokenizer files beside it first
        return PreTrainedTokenizerFast(name_or_path=str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing narrower for a damaged vocabulary
        raise CheckpointError(
            f"{role}: {path}: cannot build its tokenizer: {error}; take the original checkpoint"
        ) from error


def _names(header: GgufHeader, layers: int) -> Any:
    """Returns the map of the package `gguf` from the parameter names of transformers to the names in a file.

    Args:
        header: header of the file.
        layers: number of layers of the model.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = header.metadata["general.architecture"]
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    return get_tensor_name_map(arch, layers)


def _place(parameter: str, names: Any) -> tuple[str, int | None] | None:
    """Returns (name of the stored tensor, index of the expert) for a parameter of the model.

    The index is None for a parameter that is not an expert's. One stored tensor contains the matrices of all experts.

    Args:
        parameter: name of the parameter.
        names: result of `_names`.

    Returns:
        The pair. None if the architecture has no such tensor.
    """
    module, _, leaf = parameter.rpartition(".")
    found = _EXPERT.fullmatch(module)
    expert = None
    if found is not None:
        module, expert = f"{found[1]}.{found[3]}", int(found[2])
    stored = names.get_name(module)
    return None if stored is None else (f"{stored}.{leaf}", expert)


@cache
def _dequantises(kind: str) -> bool:
    """True if the package `gguf` can dequantise the format named `kind`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    known = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[known]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), known)
    except NotImplementedError:
        return False
    return block > 1


def _codes(raw: Tensor, kind: CodesKind) -> Codes:
    """Converts the stored bytes of a matrix in Q4_0 or Q8_0 to `Codes`.

    A block is a scale in fp16, then 32 codes. Codes of 4 bits are in 16 bytes. The lower 4 bits of all bytes come
    first, then the upper 4 bits.

    Args:
        raw: uint8 [rows, bytes].
        kind: format of the result.
    """
    bits = BITS[kind.format]
    blocks = raw.unflatten(1, (-1, _SCALE + kind.block[1] * bits // 8))
    scales = blocks[..., :_SCALE].contiguous().view(torch.float16)[..., 0].float()
    codes = blocks[..., _SCALE:]
    if bits == 8:
        return Codes(kind, codes.flatten(1), scales)
    codes = torch.cat((codes & 15, codes >> 4), -1).flatten(1)
    return Codes(kind, codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))


def _values(raw: Any, kind: str) -> Tensor:
    """Converts stored bytes to values: [rows, columns] in the stored dtype, or dequantised to fp32.

    Args:
        raw: uint8 [rows, bytes].
        kind: name of the stored format.
    """
    if kind in _PLAIN:
        values = torch.from_numpy(np.ascontiguousarray(raw).view(_STORED_AS[kind]))
        return values.view(torch.bfloat16) if kind == "BF16" else values
    from gguf import GGMLQuantizationType, quants

    # gguf converts 16 rows in one step, which is slow for short rows: so rows are joined first
    wide = np.ascontiguousarray(raw).reshape(len(raw) // math.gcd(len(raw), _JOINED), -1)
    found = quants.dequantize(wide, GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(found.reshape(len(raw), -1)))
