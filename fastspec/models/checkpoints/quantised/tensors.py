"""Reads the tensors of a quantised checkpoint. Each quantised matrix becomes one tensor [N, K].

Also reads the stored scales of K and V for a KV cache in 8 bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.kv_scales import KVScales
from fastspec.models.checkpoints.parameter_names import PREFIX, parameter, parameter_of, table_name
from fastspec.models.checkpoints.quantised.configs import Quantisation
from fastspec.models.checkpoints.quantised.schemes import Float8, Over, Scheme
from fastspec.models.checkpoints.safetensors_files import STORED_DTYPES
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, WrappedSource

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec

_ATTENTION: Final = r"layers\.(\d+)\.(?:self_attn|mixer)\."
# names of scales of K and V that tools use; kv_scale is the scale of both
_SCALE_NAMES: Final = re.compile(
    _ATTENTION + r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|(k|v)_cache\.scale)$"
)
_LAYER: Final = re.compile(re.escape(PREFIX) + r"layers\.(\d+)\.")


class CacheScales(NamedTuple):
    """Scales of one layer, by which K and V are divided before they are stored in 8 bits.

    Attributes:
        k, v: one number for all KV heads, or one for each. 1 if none is stored.
    """

    k: tuple[float, ...] = (1.0,)
    v: tuple[float, ...] = (1.0,)


def cache_scale_names(infos: Collection[str], parameters: Collection[str], spec: ModelSpec | None = None) -> list[str]:
    """Returns the stored names of the scales of K and V that belong to the model's own layers.

    Scales of a vision tower or of MTP layers are left out.

    Args:
        infos: stored names of all tensors.
        parameters: names of the model's parameters.
        spec: see `QuantisedShards`.
    """
    layers = {found[1]: name for name in parameters if (found := _LAYER.match(name))}

    def is_ours(stored: str) -> bool:
        name = table_name(stored, spec)
        found = _SCALE_NAMES.search(name)
        mine = None if found is None else layers.get(found[1])
        if found is None or mine is None:
            return False
        ours = _LAYER.match(mine)
        assert ours is not None
        return parameter(f"{name[: found.end(1)]}.{mine[ours.end() :]}", [mine]) == mine

    return [name for name in infos if is_ours(name)]


def read_cache_scales(
    stored: TensorSource, parameters: Collection[str], spec: ModelSpec | None = None
) -> dict[int, CacheScales]:
    """Reads the scales of K and V of a checkpoint. Returns a dict: index of a layer -> its scales.

    Args:
        stored: tensors of the checkpoint.
        parameters: names of the model's parameters.
        spec: see `QuantisedShards`.

    Raises:
        CheckpointError: a scale is not a positive number.
    """
    found: dict[int, CacheScales] = {}
    names = cache_scale_names(stored.infos(), parameters, spec)
    if not names:
        return found
    with stored.open():
        for name in names:
            match = _SCALE_NAMES.search(table_name(name, spec))
            assert match is not None
            layer, which = int(match[1]), match[2] or match[3]
            values = tuple(stored.read(name).float().flatten().tolist())
            if not all(0 < value < float("inf") for value in values):
                raise CheckpointError(f"{stored.directory}: {name} is {list(values)}, wanted positive numbers")
            found[layer] = found.get(layer, CacheScales())._replace(**dict.fromkeys(which, values))
    return found


def scales_of_layers(found: Mapping[int, CacheScales], layers: Iterable[int]) -> tuple[KVScales, ...]:
    """Returns one scale of K and one of V for each layer. If heads have different scales, the largest fits all heads.

    Args:
        found: index of a layer -> its stored scales. A layer without an entry has scales 1.
        layers: indices of the layers.
    """
    named = [found.get(layer, CacheScales()) for layer in layers]
    return tuple(KVScales(max(each.k), max(each.v)) for each in named)


WEIGHT = ".weight"
# last parts of tensor names that only quantised matrices have
INVERSE: Final = "weight_scale_inv"  # in spite of its name, codes are multiplied by it
MARKS = ("weight_packed", "weight_scale", INVERSE, "qweight", "scales")

GROUP_INDICES = frozenset(("g_idx", "weight_g_idx"))  # names of tensors with the number of each column's group

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


class Matrix(NamedTuple):
    """Description of a quantised matrix.

    Attributes:
        module: stored name of the module, such as "model.layers.0.mlp.up_proj".
        scheme: layout in which it is stored.
        shape: (N, K) of the matrix.
        parts: last parts of the names of its stored tensors, such as "weight_packed" and "weight_scale".
    """

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    parts: tuple[str, ...]


class QuantisedShards(WrappedSource):
    """Tensors of a quantised checkpoint. Each quantised matrix appears as one tensor, `<module>.weight`.

    Args:
        stored: the stored tensors.
        quantisation: quantisation settings of the config.
        shapes: shapes of the model's parameters, by name.
        spec: spec of the model, whose family may store tensors under other names. None: only prefixes may differ.

    Raises:
        CheckpointError: a stored tensor of a matrix is missing, or has another shape or dtype, or the settings do not
            cover the matrix.
    """

    def __init__(
        self,
        stored: TensorSource,
        quantisation: Quantisation,
        shapes: Mapping[str, tuple[int, ...]],
        spec: ModelSpec | None = None,
    ) -> None:
        super().__init__(stored)
        self._quantisation, self._spec = quantisation, spec
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
        for name in cache_scale_names(self._infos.keys(), shapes.keys(), spec):
            del self._infos[name]

    def _found(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Matrix]]:
        infos = self._source.infos()
        for module, part in _modules(infos).items():
            name = parameter_of(module + WEIGHT, shapes.keys(), self._spec)
            if name not in shapes:
                continue  # part of another model: listed as unused later
            stored = self._source.stored_name(f"{module}.{part}").rpartition(".")[0]
            scheme = self._quantisation.scheme_of(stored)  # a config uses the checkpoint's names
            if scheme is None:
                raise CheckpointError(
                    f"{self.directory}: {module} is stored quantised, and the config's {self._quantisation.method} "
                    "settings leave it out; take config.json and weights of one commit"
                )
            if isinstance(scheme, Float8) and f"{module}.{INVERSE}" in infos:
                scheme = replace(scheme, scale=INVERSE)
            rows, columns = shapes[name]
            yield module + WEIGHT, Matrix(module, scheme, (rows, columns), self._parts(module, scheme, (rows, columns)))

    def _parts(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> tuple[str, ...]:
        """Checks shapes and dtypes of a quantised matrix's stored tensors. Returns the last parts of their names.

        Args:
            module: stored name of the module.
            scheme: layout in which the matrix is stored.
            shape: (N, K) of the matrix.

        Raises:
            CheckpointError: a tensor is missing, or has another shape or dtype.
        """
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
        """Returns the properties of every tensor. A quantised matrix is one tensor of dtype float32."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """Returns the tensor `name`. A quantised matrix is dequantised to fp32."""
        codes = self.codes(name, torch.device("cpu"))
        return self._source.read(name) if codes is None else codes.dequantise(torch.float32)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns a range of rows and, for a matrix, of columns of the tensor `name`.

        A quantised matrix is read and dequantised as a whole, then cut.
        """
        return TensorSource.read_part(self, name, rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format of the matrix `name`. None: it is not quantised."""
        matrix = self._matrices.get(name)
        return self._source.kind(name) if matrix is None else matrix.scheme.kind(matrix.shape)

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """Returns the quantised matrix `name`, with its codes unpacked on the device. None: it is not quantised.

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
        """Returns a range of rows and columns of the quantised matrix `name`. None: it is not quantised.

        Reads only the stored codes and scales that belong to the range.

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
        """Extends a range of rows or columns so that it begins and ends between stored elements. Returns the new range.

        A stored element is a word with several codes, or a scale for several rows or columns.

        Args:
            matrix: the matrix.
            parts: last part of a stored tensor's name -> rows or columns per element; see `StoredPart.over`.
            axis: "N" for rows, "K" for columns.
            meant: the range to extend.
        """
        shapes = {part: self._source.infos()[f"{matrix.module}.{part}"].shape for part in parts}
        over = [pair for part, each in parts.items() for pair in zip(shapes[part], each, strict=False)]
        unit = math.lcm(*(by for size, (of, by) in over if of == axis and size > 1))
        stop = matrix.shape["NK".index(axis)]
        return range(meant.start // unit * unit, min(-(-meant.stop // unit) * unit, stop))

    def _along(self, matrix: Matrix, part: str, over: Over, read: Mapping[str, range]) -> Tensor:
        """Reads the elements of a stored tensor that belong to a range of rows and columns of the matrix.

        Args:
            matrix: the matrix.
            part: last part of the tensor's name.
            over: rows or columns per element; see `StoredPart.over`.
            read: range of rows by "N", and range of columns by "K".
        """
        name = f"{matrix.module}.{part}"
        places = [
            slice(None) if size == 1 else slice(read[axis].start // by, -(-read[axis].stop // by))
            for size, (axis, by) in zip(self._source.infos()[name].shape, over, strict=False)
        ]
        if all(place == slice(None) for place in places):
            return self._source.read(name)
        return self._source.read_part(name, *places, *([slice(None)] * (2 - len(places))))

    def describe(self) -> str:
        """Lists how many quantised matrices each stored layout has, for messages."""
        kinds = Counter(matrix.scheme.describe() for matrix in self._matrices.values())
        return ", ".join(f"{count} matrices in {kind}" for kind, count in sorted(kinds.items()))


def _modules(infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Finds the modules that are stored quantised, by tensors that only quantised modules have.

    Args:
        infos: properties of the stored tensors, by name.

    Returns:
        Name of a module -> last part of the name of such a tensor.
    """
    found = {}
    for name, info in infos.items():
        module, _, part = name.rpartition(".")
        if part in MARKS or (part == "weight" and isinstance(info.dtype, str)):
            found[module] = part
    return found
