"""Weights of a GGUF file, by the names of the model's parameters. Quantised ones are dequantised while they are read.

Values are those of `gguf.quants.dequantize`. Its tables of names are used backwards: from a parameter to the stored
tensor. llama.cpp stores q and k of some architectures in another order of rows, and norms of Gemma as 1 + w.
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
from fastspec.models.checkpoints.gguf.config import ROPE_TENSORS, gguf_arch
from fastspec.models.checkpoints.gguf.header import GGUF_SUFFIX, GgufHeader
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource
from fastspec.models.layer_table import EMBED, tensor_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastspec.models.config import ModelSpec

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED_AS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
_TOKENS: Final = "tokenizer.ggml.tokens"
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_ROPED: Final = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


class GgufTensors(TensorSource):
    """Tensors of a GGUF file that a model has.

    Quantised tensors have dtype float32 in `infos`, the dtype of their dequantised values.

    Args:
        header: the file.
        spec: spec of the model, made from the file's metadata.

    Raises:
        CheckpointError: the file has other tensors besides, or another number of experts.
        UnsupportedModel: a format that `gguf` cannot dequantise.
    """

    def __init__(self, header: GgufHeader, spec: ModelSpec) -> None:
        self.directory = header.path.parent
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
        """Dtype of the embedding; bfloat16 if it is quantised."""
        stored, _ = self._stored[EMBED]
        return _PLAIN.get(self._header.tensors[stored].kind, torch.bfloat16)

    def describe(self) -> str:
        """Describes the formats of its matrices, for messages. Empty: all are plain."""
        kinds = Counter(tensor.kind for tensor in self._header.tensors.values() if tensor.kind not in _PLAIN)
        return "" if not kinds else f"GGUF in {', '.join(kind for kind, _ in kinds.most_common())}, dequantised"

    @override
    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @override
    def read(self, name: str) -> Tensor:
        return self.read_part(name, slice(None), slice(None))

    @override
    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns rows and, for a matrix, columns. Only these rows are dequantised."""
        stored, expert = self._stored[name]
        tensor, shape = self._header.tensors[stored], self._infos[name].shape
        start, size = tensor.start, tensor.nbytes
        if expert is not None:
            size //= tensor.shape[0]
            start += expert * size
        raw: Any = self._header.data[start : start + size]
        if len(shape) == 1:
            values = _values(raw.reshape(1, -1), tensor.kind)[0]
            order = self._order(stored, shape[0])
            values = (values if order is None else values[torch.from_numpy(order)])[rows]
        else:
            raw = raw.reshape(math.prod(shape[:-1]), tensor.row_bytes)
            order = self._order(stored, shape[0])
            raw = raw[rows] if order is None else raw[order[rows]]
            values = _values(raw, tensor.kind)[:, columns]
        if self._arch.plus_one and stored.endswith("norm.weight"):
            return values - 1
        return values

    def _order(self, stored: str, rows: int) -> NDArray[np.int64] | None:
        """Returns the stored row of each row of q or k. None: as stored.

        llama.cpp rotates elements 2i and 2i + 1 of a head, transformers i and i + half.
        """
        found = _ROPED.fullmatch(stored) if self._arch.permuted else None
        if found is None:
            return None
        heads = self._heads[found[1]]
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def find_gguf(source: object) -> Path | None:
    """Returns the local GGUF file that a source names: the file, or a directory with one and no safetensors.

    Returns:
        The file, or None if the source is something else.

    Raises:
        CheckpointError: a directory with several GGUF files and nothing else to load.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if os.path.isfile(path):
        return path if path.suffix.lower() == GGUF_SUFFIX else None
    if not os.path.isdir(path) or any(path.glob("*.safetensors*")):
        return None
    files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF_SUFFIX)
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: holds {len(files)} GGUF files ({', '.join(each.name for each in files)}); pass one of them, like "
            f"{files[0]}"
        )
    return files[0] if files else None


def tokenizer_of_gguf(header: GgufHeader, role: str) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer and the chat template in a file's metadata, as transformers does. None: it has none.

    Raises:
        CheckpointError: transformers cannot build it.
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
    """Returns gguf's map from the names of a transformers model to those of llama.cpp."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = header.metadata["general.architecture"]
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    return get_tensor_name_map(arch, layers)


def _place(parameter: str, names: Any) -> tuple[str, int | None] | None:
    """Returns the stored tensor of a parameter, and its expert in it. None: the architecture has no such tensor."""
    module, _, leaf = parameter.rpartition(".")
    found = _EXPERT.fullmatch(module)
    expert = None
    if found is not None:
        module, expert = f"{found[1]}.{found[3]}", int(found[2])
    stored = names.get_name(module)
    return None if stored is None else (f"{stored}.{leaf}", expert)


@cache
def _dequantises(kind: str) -> bool:
    """True if `gguf` can dequantise a format."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    known = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[known]
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), known)
    except NotImplementedError:
        return False
    return block > 1


def _values(raw: Any, kind: str) -> Tensor:
    """Returns rows of bytes, uint8 [rows, bytes], as values: plain ones as stored, others dequantised to fp32."""
    if kind in _PLAIN:
        values = torch.from_numpy(np.ascontiguousarray(raw).view(_STORED_AS[kind]))
        return values.view(torch.bfloat16) if kind == "BF16" else values
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(np.ascontiguousarray(quants.dequantize(np.asarray(raw), GGMLQuantizationType[kind])))
