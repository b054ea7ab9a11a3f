"""Copies the tensors of one checkpoint into a model's weights: at once, or later and in parallel.

Weights are allocated first. They can be filled later by several threads, while kernels are compiled and the rest of the
model is built. On CUDA each thread copies through its own pinned memory, on its own stream. On this stream the values
are also packed or quantised, while the thread reads the next values. A thread only waits until its pinned memory is
free again, and for checks of values.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from fastspec.errors import CheckpointError
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import Codes, CodesKind, join, joined_kind
from fastspec.kernels.common.experts import MXFP4, ExpertStack
from fastspec.kernels.common.rounding import rounded
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.cpu.blocked import Blocked, RowCounts
from fastspec.kernels.ops import Ops
from fastspec.models.checkpoints.tensor_source import TensorInfo, TensorSource, Use

READERS = 4  # number of threads that fill weights on CUDA
_PINNED_BYTES = 32 * 2**20  # pinned bytes of each thread
VALUES = 2**23  # values of a matrix that are read and packed at a time


Rounding = Callable[[str, tuple[int, int]], "CodesKind | None"]


def _as_it_is(name: str, shape: tuple[int, int]) -> None:
    """Returns None, so that no matrix is quantised. Default of `rounds_to` in `Loader`."""


class _Copy(Protocol):
    def __call__(self, loader: Loader, /, *, staging: _Staging | None) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One weight of a model, which may be fused from several stored tensors.

    Attributes:
        names: names of the stored tensors, which are stacked along their rows.
        place: the weight. None: the stored values cannot be read back from the weight, because it is quantised.
        order: for each row of the weight, its index in the stacked tensors. None: the same order.
        copy: function of (loader, staging=...) that fills the weight from the loader's source. It does not hold the
            loader: weights in a cycle of references would keep their memory until Python looks for cycles.
    """

    names: tuple[str, ...]
    place: Weight | Tensor | None
    order: list[int] | None
    copy: _Copy


class Loader:
    """Makes weights of one dtype on one device from the named tensors of one source.

    Args:
        source: the tensors. It must be open (`TensorSource.open`) unless `later` is True.
        dtype, device: dtype and device of the weights.
        ops: ops that will read the weights.
        bar: progress bar, which counts copied bytes.
        rounds_to: function of a matrix's name and shape (N, K). It returns the format to which the matrix is quantised.
            None: it is not quantised. The function is not called for matrices that are stored quantised.
        planned: True to make weights without memory, on the meta device, so that their bytes can be counted.
        release: True to free the source's tensors after they are copied.
        later: True to copy nothing before `fill`.
        whole: properties of the whole matrices, if `source` has only one rank's slices. None: `source` has whole ones.

    Attributes:
        parts: the weights that were made.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        bar: tqdm[NoReturn],
        *,
        rounds_to: Rounding = _as_it_is,
        planned: bool = False,
        release: bool = False,
        later: bool = False,
        whole: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self._source, self.dtype, self._device = source, dtype, device
        self._ops, self._bar, self._rounds_to = ops, bar, rounds_to
        self._place = torch.device("meta") if planned else device
        self._release, self._later = release, later
        self._infos, self._whole = source.infos(), whole
        self._counts = RowCounts()
        self._launching = threading.Lock()
        self._copies: deque[_Copy] = deque()
        self.parts: list[Part] = []

    def tensor(
        self, *names: str, order: list[int] | None = None, dtype: torch.dtype | None = None, plus: float = 0.0
    ) -> Tensor:
        """Makes one tensor from the named tensors, stacked along their rows.

        Args:
            *names: names of the stored tensors.
            order: for each row of the result, its index in the stacked tensors. None: the same order.
            dtype: dtype of the result. None: the loader's dtype.
            plus: number that is added to every value.
        """
        parts = [self._infos[name].shape for name in names]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self._place)
        self._copy(
            Part(names, made, order, partial(Loader._fill_tensor, names=names, fused=made, order=order, plus=plus))
        )
        return made

    def weight(
        self,
        *names: str,
        gated: bool = False,
        order: list[int] | None = None,
        tree: bool = False,
        use: Use = "product",
    ) -> Weight:
        """Makes one `Weight` from the named matrices, stacked along their rows.

        Args:
            *names: names of the stored matrices.
            gated: True if the first half of the rows is the gate of an MLP.
            order: see `tensor`.
            tree: True if partial sums over the columns of all ranks are added as one binary tree; see `Weight`.
            use: purpose of the matrix; see `Use`.
        """
        shape = _shape_of(self._infos, names)
        kind = self._kind(names, shape, order)
        if kind is not None and self._ops.keeps_codes(shape, kind, self.dtype, self._device):
            made = Weight.empty_codes(shape, kind, gated, self.dtype, self._place)
            self._copy(
                Part(names, None, order, partial(Loader._fill_codes, names=names, place=made, kind=kind, order=order))
            )
            return made
        form = self._ops.weight_format(shape, self.dtype, self._device)
        if form == "blocked" and use != "table" and self._whole is None:
            head, embeds = use in ("head", "tied"), use == "tied"
            blocked = Blocked(shape, self.dtype, head=head, embeds=embeds, counts=self._counts)
            made = Weight.of_blocked(blocked)
            place = made if kind is None else None
            self._copy(
                Part(names, place, order, partial(Loader._fill_weight, names=names, place=made, kind=kind, order=order))
            )
            return made
        form = "rows" if form == "blocked" else form
        whole = None if self._whole is None else _shape_of(self._whole, names)
        tree = tree and whole is not None
        made = Weight.empty(shape, form, gated, self.dtype, self._place, whole=whole, tree=tree)
        place = made if kind is None else None
        self._copy(
            Part(names, place, order, partial(Loader._fill_weight, names=names, place=made, kind=kind, order=order))
        )
        return made

    def same_format(self, *names: str) -> bool:
        """True if all named matrices are stored quantised, or none of them is."""
        return len({self._source.kind(name) is None for name in names}) == 1

    def joins_shared(self, *names: str) -> bool:
        """True if `ops` want a shared expert's matrices in the same stack as those of the routed experts.

        False if the named matrices are or will be quantised, or if several ranks share the model. Then the shared
        expert has separate weights.

        Args:
            *names: names of the shared expert's matrices.
        """
        plain = all(self._source.kind(name) is None for name in names)
        rounded = any(self._rounds_to(name, _shape_of(self._infos, (name,))) is not None for name in names)
        hidden = self._infos[names[0]].shape[1]
        wanted = self._ops.joins_shared(self.dtype, hidden, self._device)
        return wanted and plain and not rounded and self._whole is None

    def stack(self, experts: list[tuple[str, ...]], gated: bool = False) -> ExpertStack:
        """Makes one stack with the matrices of all experts, such as their gate and up projections.

        The stack stays quantised if all matrices are stored in the same quantised format, and `ops` can read it.

        Args:
            experts: for each expert, the names of the matrices that are stacked along their rows.
            gated: True if the first half of an expert's rows is the gate of an MLP.
        """
        names = [name for each in experts for name in each]
        rows, width = sum(self._infos[name].shape[0] for name in experts[0]), self._infos[names[0]].shape[1]
        kinds = {self._stored_kind(each) for each in experts}
        kind = kinds.pop()
        if kind is None or kinds or not self._ops.keeps_experts((rows, width), kind, self.dtype, self._device):
            return ExpertStack.of(self.tensor(*names).view(len(experts), rows, width))
        made = ExpertStack.empty_codes((len(experts), rows, width), kind, self.dtype, self._place, gated)
        if kind == MXFP4:
            for expert, each in enumerate(experts):
                self._copy(Part(each, None, None, partial(Loader._fill_expert, expert=expert, names=each, place=made)))
        else:
            self._copy(Part(tuple(names), None, None, partial(Loader._fill_experts, experts=experts, place=made)))
        return made

    def stack_with_shared(
        self, experts: list[tuple[str, ...]], shared: tuple[str, ...], count: int, matrices: int | None
    ) -> ExpertStack:
        """Makes a stack of float values that also has the shared expert, in `count` parts after the routed experts.

        A part is as wide as a routed expert. The sum of the parts' outputs is the shared expert's output.

        Args:
            experts: see `stack`.
            shared: names of the shared expert's matrices, which are stacked along their rows.
            count: number of parts.
            matrices: number of matrices that are stacked along their rows, 2 with a gate. Each part has rows of each of
                them. None: each part has columns, of the down projection.
        """
        names = tuple(name for each in experts for name in each)
        rows, width = sum(self._infos[name].shape[0] for name in experts[0]), self._infos[names[0]].shape[1]
        made = torch.empty((len(experts) + count, rows, width), dtype=self.dtype, device=self._place)
        routed, parts = made[: len(experts)].view(-1, width), made[len(experts) :]
        self._copy(
            Part(names, routed, None, partial(Loader._fill_tensor, names=names, fused=routed, order=None, plus=0.0))
        )
        place = (parts if matrices is None else parts.unflatten(1, (matrices, -1))).transpose(0, 1)  # in stored order
        self._copy(Part(shared, place, None, partial(Loader._fill_shared, names=shared, place=place)))
        return ExpertStack.of(made)

    def _fill_shared(self, names: tuple[str, ...], place: Tensor, staging: _Staging | None) -> None:
        """Fills a view of the shared expert's parts. It has the elements of the stacked matrices, in their order."""
        stacked = torch.empty(_shape_of(self._infos, names), dtype=self.dtype, device=self._device)
        self._fill_tensor(names, stacked, None, 0.0, staging)
        place.copy_(stacked.view(place.shape))

    def _stored_kind(self, names: tuple[str, ...]) -> CodesKind | None:
        """Returns the quantised format in which all named matrices are stored. None: they have no common one."""
        kinds = [kind for name in names if (kind := self._source.kind(name)) is not None]
        shapes = [(each[0], each[1]) for each in (self._infos[name].shape for name in names)]
        return joined_kind(kinds, shapes) if len(kinds) == len(names) else None

    def _fill_experts(self, experts: list[tuple[str, ...]], place: ExpertStack, staging: _Staging | None) -> None:
        place.fill_all(self._joined_codes(names) for names in experts)

    def _joined_codes(self, names: tuple[str, ...]) -> Codes:
        found = [codes for name in names if (codes := self._source.codes(name, self._device)) is not None]
        codes = join(found)
        self._bar.update(math.prod(codes.shape) * self.dtype.itemsize)
        return codes

    def _fill_expert(self, expert: int, names: tuple[str, ...], place: ExpertStack, staging: _Staging | None) -> None:
        first = 0
        for name in names:
            codes = self._source.codes(name, self._device)
            assert codes is not None  # their kind is mxfp4
            place.fill_codes(expert, first, codes)
            first += codes.shape[0]
            self._bar.update(math.prod(codes.shape) * self.dtype.itemsize)

    def _kind(self, names: tuple[str, ...], shape: tuple[int, int], order: list[int] | None) -> CodesKind | None:
        """Returns the quantised format of a weight that is fused from the named matrices. None: not quantised.

        If no matrix is stored quantised, it is the format to which the weight is quantised now. If the matrices are not
        all stored in one quantised format, the result is None.

        Args:
            names: names of the stored matrices.
            shape: (N, K) of the weight.
            order: for each row of the weight, its index in the stacked matrices. None: the same order.
        """
        kinds = [kind for name in names if (kind := self._source.kind(name)) is not None]
        if not kinds:
            return self._rounds_to(names[0], shape)
        if len(kinds) < len(names):
            return None
        shapes = [(each[0], each[1]) for each in (self._infos[name].shape for name in names)]
        kind = joined_kind(kinds, shapes)
        return kind if kind is None or order is None else CodesKind(kind.format, (1, kind.block[1]))

    def fill(self) -> None:
        """Fills all weights that are not filled yet. On CUDA all copies are complete when it returns.

        Raises:
            CheckpointError: a value cannot be read, or does not fit in float16. Then the remaining weights stay empty.
        """
        with self._source.open():
            if self._device.type != "cuda":
                self._fill_until_done(None)
                return
            with ThreadPoolExecutor(READERS, "fastspec-load") as pool:
                for done in [pool.submit(self._read_along) for _ in range(READERS)]:
                    done.result()

    def kind(self, name: str) -> CodesKind | None:
        """Returns the quantised format in which the matrix `name` is stored. None: it is not quantised."""
        return self._source.kind(name)

    def present(self, name: str) -> Tensor:
        """Reads the present values of a stored tensor back from the weights, with rows in the stored order.

        The weight that contains it must not be quantised; see `Part.place`.
        """
        part = next(part for part in self.parts if name in part.names)
        assert part.place is not None, "its values can be read back"
        fused = part.place.unpack() if isinstance(part.place, Weight) else part.place
        if part.order is not None:
            fused = torch.empty_like(fused).index_copy_(0, torch.tensor(part.order, device=fused.device), fused)
        fused = fused.reshape(-1, *self._infos[name].shape[1:])  # a shared expert in parts has more axes
        start = sum(self._infos[each].shape[0] for each in part.names[: part.names.index(name)])
        return fused[start : start + self._infos[name].shape[0]]

    def refill(self, source: TensorSource, names: Collection[str]) -> None:
        """Refills in place every weight that contains one of the named tensors.

        Args:
            source: all tensors of these weights. They have the shapes and quantised formats of the first load.
            names: names of the tensors with new values.
        """
        before = self._source, self._infos, self._bar, self._release
        self._source, self._infos, self._release = source, {**self._infos, **source.infos()}, False
        self._bar = tqdm(disable=True)
        self._copies.extend(part.copy for part in self.parts if not set(names).isdisjoint(part.names))
        try:
            if source.directory is not None:  # files are read by several threads
                self.fill()
            else:
                with source.open():
                    self._fill_until_done(None)
        finally:
            self._copies.clear()
            self._source, self._infos, self._bar, self._release = before

    def cancel(self) -> None:
        """Makes `fill` end soon. Any thread may call it."""
        self._copies.clear()

    def _copy(self, part: Part) -> None:
        self.parts.append(part)
        if self._later:
            self._copies.append(part.copy)
        else:
            part.copy(self, staging=None)

    def _read_along(self) -> None:
        """Fills weights until none is left to fill. Each thread of `fill` runs this method."""
        staging = _Staging(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(staging.stream):
            self._fill_until_done(staging)
        staging.stream.synchronize()

    def _fill_until_done(self, staging: _Staging | None) -> None:
        with torch.no_grad():  # each thread has its own gradient mode
            while self._copies:
                try:
                    copy = self._copies.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    copy(self, staging=staging)
                except BaseException:
                    self.cancel()
                    raise

    def _fill_codes(
        self,
        names: tuple[str, ...],
        place: Weight,
        kind: CodesKind,
        order: list[int] | None,
        staging: _Staging | None,
    ) -> None:
        """Fills a quantised weight, from stored quantised values, or from plain values that are quantised now.

        Args:
            names: names of the stored matrices.
            place: the weight.
            kind: quantised format of the weight.
            order: for each row of the weight, its index in the stacked matrices. None: the same order.
            staging: pinned memory of this thread. None: the device is not CUDA, or values are copied directly.
        """
        parts = [codes for name in names if (codes := self._source.codes(name, self._device)) is not None]
        if parts:
            codes = join(parts)
            place.fill_codes(codes if order is None else codes.in_order(torch.tensor(order, device=self._device)))
            self._bar.update(math.prod(place.shape) * self.dtype.itemsize)
            return
        assert place.codes is not None, "made by `Weight.empty_codes`"
        whole = order is not None
        runs = [(0, self._rows(names, place, order, staging))] if whole else self._runs(names, place, staging)
        place.codes.fill_rounded(runs, self._pack_rounded)

    def _fill_weight(
        self,
        names: tuple[str, ...],
        place: Weight,
        kind: CodesKind | None,
        order: list[int] | None,
        staging: _Staging | None,
    ) -> None:
        """Fills a weight that is not quantised. With a `kind`, values are first quantised to it, then dequantised.

        Args:
            names, place, order, staging: see `_fill_codes`.
            kind: format to which values are quantised, if they are not stored quantised. None: they are used as stored.
        """
        plain = all(self._source.kind(name) is None for name in names)
        values = partial(self._rounded, kind if plain else None)
        if place.format == "packed" and order is None and plain:
            for tile, run in self._runs(names, place, staging):
                place.fill_run(tile, values(run))
        elif place.format == "rows" and (kind is None or not plain):
            self._fill_tensor(names, place.data, order, 0.0, staging)
        else:
            place.fill(values(self._rows(names, place, order, staging)))

    def _rounded(self, kind: CodesKind | None, rows: Tensor) -> Tensor:
        """Quantises rows to the format `kind`, and dequantises them again. With None, returns the rows unchanged."""
        return rows if kind is None else rounded(rows, kind).dequantise(self.dtype)

    def _pack_rounded(self, place: PackedCodes, tile: int, rows: Tensor) -> Tensor:
        with self._launching:  # a kernel is compiled by its first launch; the lock prevents that two threads compile it
            return self._ops.pack_rounded(place, tile, rows)

    def _runs(
        self, names: tuple[str, ...], place: Weight, staging: _Staging | None
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """Yields the rows of a weight in ranges of whole 16-row tiles: (index of the first tile, rows).

        For a gated weight, the gate rows of a range come before its up rows. All ranges use the same memory, so work on
        one must be queued on the stream before the next is taken.
        """
        (n, k), halves = place.shape, 2 if place.gated else 1
        stored = [self._source.read(name) for name in names]
        step = min(max(1, VALUES // (16 * k)), n // 16)
        room = torch.empty((step * 16, k), dtype=self.dtype, device=self._device)
        for tile in range(0, n // 16, step):
            count = min(step, n // 16 - tile) * 16 // halves
            run = room[: halves * count]
            for half in range(halves):
                start = half * n // 2 + tile * 16 // halves
                self._fill_rows(names, stored, start, run[half * count : (half + 1) * count], staging)
            yield tile, run
        if self._release:
            self._source.release(list(names))

    def _fill_rows(
        self, names: tuple[str, ...], stored: list[Tensor], start: int, place: Tensor, staging: _Staging | None
    ) -> None:
        """Copies a range of rows of the stacked matrices to `place`.

        Args:
            names: names of the matrices, for messages.
            stored: the matrices, which are stacked along their rows.
            start: first row of the range in the stack.
            place: [rows, K], the destination.
            staging: see `_fill_codes`.
        """
        first, stop = 0, start + place.shape[0]
        for name, matrix in zip(names, stored, strict=True):
            low, high = max(start, first), min(stop, first + matrix.shape[0])
            if low < high:
                here, rows = place[low - start : high - start], matrix[low - first : high - first]
                if staging is None:
                    here.copy_(rows)
                else:
                    staging.copy(here, rows)
                self._check_range(name, self._infos[name], here)
                self._bar.update(here.numel() * self.dtype.itemsize)
            first += matrix.shape[0]

    def _rows(self, names: tuple[str, ...], place: Weight, order: list[int] | None, staging: _Staging | None) -> Tensor:
        """Returns the values of a weight as a matrix [N, K], before they are converted to its format."""
        rows = torch.empty(place.shape, dtype=self.dtype, device=self._device)
        self._fill_tensor(names, rows, order, 0.0, staging)
        return rows

    def _fill_tensor(
        self, names: tuple[str, ...], fused: Tensor, order: list[int] | None, plus: float, staging: _Staging | None
    ) -> None:
        start = 0
        for name in names:
            part = self._infos[name]
            place = fused[start : start + part.shape[0]]
            codes = self._source.codes(name, self._device)
            if codes is not None:
                codes.dequantise_into(place)
            elif staging is None:
                place.copy_(self._source.read(name))
            else:
                staging.copy(place, self._source.read(name))
            self._check_range(name, part, place)
            start += part.shape[0]
            self._bar.update(place.numel() * self.dtype.itemsize)
        if order is not None:
            fused.copy_(fused[torch.tensor(order, device=fused.device)])
        if plus:
            fused += plus
        if self._release:
            self._source.release(list(names))

    def _check_range(self, name: str, part: TensorInfo, place: Tensor) -> None:
        if place.dtype is torch.float16 and part.dtype is not torch.float16 and not bool(place.isfinite().all()):
            raise CheckpointError(
                f"{name} in {part.where} has values beyond float16 (65504); load it with dtype=torch.bfloat16 or "
                "float32"
            )


class _Staging:
    """Pinned host memory of one thread, and the CUDA stream on which it is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._copied = torch.cuda.Event()

    def copy(self, place: Tensor, stored: Tensor) -> None:
        """Copies `stored` (CPU) to `place` (device, contiguous) in pieces, through the pinned memory.

        Values are rounded to the dtype of `place`.
        """
        pinned = self._pinned.view(place.dtype)
        flat, source = place.view(-1), stored.reshape(-1)
        for start in range(0, flat.numel(), pinned.numel()):
            piece = source[start : start + pinned.numel()]
            self._copied.synchronize()  # waits until the previous piece has been copied out of the pinned memory
            here = pinned[: piece.numel()]
            here.copy_(piece)
            flat[start : start + piece.numel()].copy_(here, non_blocking=True)
            self._copied.record(self.stream)


def _shape_of(infos: Mapping[str, TensorInfo], names: tuple[str, ...]) -> tuple[int, int]:
    """Returns the shape (N, K) of the named matrices, stacked along their rows."""
    return sum(infos[name].shape[0] for name in names), infos[names[0]].shape[1]
