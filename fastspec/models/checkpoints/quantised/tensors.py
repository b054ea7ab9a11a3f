"""Tensors of a quantised checkpoint, with each quantised matrix as one tensor [N, K].

Also reads stored scales of 8-bit K and V.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.kv_scales import KVScales
from fastspec.models.checkpoints.parameter_names import PREFIX, parameter, usual_name
from fastspec.models.checkpoints.quantised.configs import Quantisation
from fastspec.models.checkpoints.quantised.schemes import Over, Scheme
from fastspec.models.checkpoints.safetensors_files import STORED_DTYPES
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource

_ATTENTION: Final = r"layers\.(\d+)\.(?:self_attn|mixer)\."
# names that tools use; kv_scale is for both
_SCALE_NAMES: Final = re.compile(
    _ATTENTION + r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|(k|v)_cache\.scale)$"
)
_LAYER: Final = re.compile(re.escape(PREFIX) + r"layers\.(\d+)\.")


class CacheScales(NamedTuple):
    """Divisors of K and V of one layer: one number, or one for each KV head. 1 if none is stored."""

    k: tuple[float, ...] = (1.0,)
    v: tuple[float, ...] = (1.0,)


def cache_scale_names(infos: Collection[str], parameters: Collection[str]) -> list[str]:
    """Returns the stored names of KV scales of the model's layers, without those of a vision tower or of MTP layers.

    Args:
        infos: stored names.
        parameters: names of the model's parameters.
    """
    layers = {found[1]: name for name in parameters if (found := _LAYER.match(name))}

    def is_ours(name: str) -> bool:
        found = _SCALE_NAMES.search(name)
        mine = None if found is None else layers.get(found[1])
        if found is None or mine is None:
            return False
        ours = _LAYER.match(mine)
        assert ours is not None
        return parameter(f"{name[: found.end(1)]}.{mine[ours.end() :]}", [mine]) == mine

    return [name for name in infos if is_ours(name)]


def read_cache_scales(stored: TensorSource, parameters: Collection[str]) -> dict[int, CacheScales]:
    """Returns the KV scales of a checkpoint by layer.

    Args:
        stored: tensors of the checkpoint.
        parameters: names of the model's parameters.

    Raises:
        CheckpointError: a scale that is not a positive number.
    """
    found: dict[int, CacheScales] = {}
    names = cache_scale_names(stored.infos(), parameters)
    if not names:
        return found
    with stored.open():
        for name in names:
            match = _SCALE_NAMES.search(name)
            assert match is not None
            layer, which = int(match[1]), match[2] or match[3]
            values = tuple(stored.read(name).float().flatten().tolist())
            if not all(0 < value < float("inf") for value in values):
                raise CheckpointError(f"{stored.directory}: {name} is {list(values)}, wanted positive numbers")
            found[layer] = found.get(layer, CacheScales())._replace(**dict.fromkeys(which, values))
    return found


def scales_of_layers(found: Mapping[int, CacheScales], layers: Iterable[int]) -> tuple[KVScales, ...]:
    """Returns the KV scales that these layers use.

    If heads have different scales, takes the largest, which fits all heads.
    """
    named = [found.get(layer, CacheScales()) for layer in layers]
    return tuple(KVScales(max(each.k), max(each.v)) for each in named)


WEIGHT = ".weight"
# suffixes of tensors that mark a quantised matrix, and suffixes of further tensors of it
MARKS = ("weight_packed", "weight_scale", "weight_scale_inv", "qweight", "scales")

_UNCHANGED: Final[Mapping[str, str]] = {}
GROUP_INDICES = frozenset(("g_idx", "weight_g_idx"))  # the group of each column

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


class Matrix(NamedTuple):
    """A quantised matrix: stored name of its module, its scheme, its shape, and its stored parts."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    parts: tuple[str, ...]


class QuantisedShards(WrappedSource):
    """Stored tensors, with the parts of each quantised matrix joined to one tensor, `<module>.weight`.

    Args:
        stored: tensors of the files.
        quantisation: settings of the config.
        shapes: shapes of the model's parameters, by name.
        renamed: parts of stored names with their replacements; see `ModelFamily.renamed`.

    Raises:
        CheckpointError: parts are missing or have another shape or dtype, or the config does not mention their matrix.
    """

    def __init__(
        self,
        stored: TensorSource,
        quantisation: Quantisation,
        shapes: Mapping[str, tuple[int, ...]],
        renamed: Mapping[str, str] = _UNCHANGED,
    ) -> None:
        super().__init__(stored)
        self._quantisation, self._renamed = quantisation, renamed
        self._matrices = dict(self._found(shapes))
        if quantisation.weights and not self._matrices:
            raise CheckpointError(
                f"{self.directory}: quantization_config says {quantisation.method!r}, and no matrix is stored so; take "
                "config.json and weights of one commit, or delete that field if the weights are meant as they are"
            )
        self._infos = dict(stored.infos())
        for name, matrix in self._matrices.items():
            where = self._infos[f"{matrix.module}.{matrix.parts[0]}"].where
            for part in matrix.parts:
                del self._infos[f"{matrix.module}.{part}"]
            self._infos[name] = TensorInfo(matrix.shape, torch.float32, where)  # dtype in which its values are computed
        for name in cache_scale_names(self._infos.keys(), shapes.keys()):
            del self._infos[name]

    def _found(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Matrix]]:
        infos = self._source.infos()
        for module, part in _modules(infos).items():
            name = parameter(usual_name(module, self._renamed) + WEIGHT, shapes.keys())
            if name not in shapes:
                continue  # part of another model: listed as unused later
            stored = self._source.stored_name(f"{module}.{part}").rpartition(".")[0]
            scheme = self._quantisation.scheme_of(stored)  # a config uses the checkpoint's names
            if scheme is None:
                raise CheckpointError(
                    f"{self.directory}: {module} is stored quantised, and the config's {self._quantisation.method} "
                    "settings leave it out; take config.json and weights of one commit"
                )
            rows, columns = shapes[name]
            yield module + WEIGHT, Matrix(module, scheme, (rows, columns), self._parts(module, scheme, (rows, columns)))

    def _parts(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[str, ...]:
        """Returns the stored parts of a matrix. Checks their shapes and dtypes."""
        infos, there = self._source.infos(), []
        for part, wanted in scheme.parts(shape).items():
            info = infos.get(f"{module}.{part}")
            if info is None:
                if wanted.required:
                    raise CheckpointError(
                        f"{self.directory}: {module}.{part} is missing; {scheme.describe()} "
                        f"({self._quantisation.method}) needs it"
                    )
                continue
            dtype = info.dtype if isinstance(info.dtype, str) else DTYPE_NAMES[info.dtype]
            if info.shape not in wanted.shapes or dtype not in wanted.dtypes:
                shapes = " or ".join(str(list(each)) for each in wanted.shapes)
                raise CheckpointError(
                    f"{self.directory}/{info.where}: {module}.{part} is {dtype} {list(info.shape)}, wanted "
                    f"{' or '.join(wanted.dtypes)} {shapes} of a matrix {list(shape)} in {scheme.describe()}"
                )
            there.append(part)
        return tuple(there)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Returns every tensor. A quantised matrix is one tensor."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns a tensor by its stored name. A quantised matrix is returned as fp32 values."""
        codes = self.codes(name, torch.device("cpu"))
        return self._source.read(name) if codes is None else codes.dequantise(torch.float32)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a part of a tensor. A quantised matrix is read completely for it."""
        return TensorSource.read_part(self, name, rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """Returns the kind of a quantised matrix. None: it is not quantised."""
        matrix = self._matrices.get(name)
        return self._source.kind(name) if matrix is None else matrix.scheme.kind(matrix.shape)

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns a quantised matrix, unpacked on the device. None: it is not quantised.

        Raises:
            CheckpointError: a code, scale or zero point has a value that the format does not allow.
        """
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.codes(name, device)
        parts = {part: self._source.read(f"{matrix.module}.{part}").to(device) for part in matrix.parts}
        try:
            return matrix.scheme.codes(parts, matrix.shape)
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: {matrix.module}: {error}") from error

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """Returns rows and columns of a quantised matrix. Reads only the stored words and scales that they need.

        Raises:
            CheckpointError: a code, scale or zero point has a value that the format does not allow.
        """
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.codes_part(name, rows, columns, device)
        parts = {part: found.over for part, found in matrix.scheme.parts(matrix.shape).items() if part in matrix.parts}
        meant = {"N": range(matrix.shape[0])[rows], "K": range(matrix.shape[1])[columns]}
        read = {axis: self._whole(matrix, parts, axis, each) for axis, each in meant.items()}
        tensors = {part: self._along(matrix, part, over, read).to(device) for part, over in parts.items() if over}
        for each in tensors.keys() & GROUP_INDICES:  # groups are counted from the first group that is read
            tensors[each] = tensors[each] - read["K"].start // matrix.scheme.kind(matrix.shape).block[1]
        try:
            codes = matrix.scheme.codes(tensors, (len(read["N"]), len(read["K"])))
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: {matrix.module}: {error}") from error
        here = [(each.start - read[axis].start, each.stop - read[axis].start) for axis, each in meant.items()]
        return codes.part(here[:1], here[1])

    def _whole(self, matrix: Matrix, parts: Mapping[str, Over], axis: str, meant: range) -> range:
        """Returns the smallest range of rows or columns that contains `meant` and consists of whole stored elements."""
        shapes = {part: self._source.infos()[f"{matrix.module}.{part}"].shape for part in parts}
        over = [pair for part, each in parts.items() for pair in zip(shapes[part], each, strict=False)]
        unit = math.lcm(*(by for size, (of, by) in over if of == axis and size > 1))
        stop = matrix.shape["NK".index(axis)]
        return range(meant.start // unit * unit, min(-(-meant.stop // unit) * unit, stop))

    def _along(self, matrix: Matrix, part: str, over: Over, read: Mapping[str, range]) -> Tensor:
        """Reads the elements of a stored part that belong to these rows and columns."""
        name = f"{matrix.module}.{part}"
        places = [
            slice(None) if size == 1 else slice(read[axis].start // by, -(-read[axis].stop // by))
            for size, (axis, by) in zip(self._source.infos()[name].shape, over, strict=False)
        ]
        if all(place == slice(None) for place in places):
            return self._source.read(name)
        return self._source.read_part(name, *places, *([slice(None)] * (2 - len(places))))

    def describe(self) -> str:
        """Returns the number of matrices by scheme, as text."""
        kinds = Counter(matrix.scheme.describe() for matrix in self._matrices.values())
        return ", ".join(f"{count} matrices in {kind}" for kind, count in sorted(kinds.items()))


def _modules(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Returns the names of modules with stored tensors that only a quantised matrix has, each with one such tensor."""
    found = {}
    for name, info in infos.items():
        module, _, part = name.rpartition(".")
        if part in MARKS or (part == "weight" and isinstance(info.dtype, str)):
            found[module] = part
    return found
