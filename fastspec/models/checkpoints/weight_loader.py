"""Copies the tensors of one checkpoint into a model's weights: at once, or later and in parallel.

Weights are allocated first and filled later. While threads fill them, kernels can be compiled and the rest of a model
can be built. On CUDA each thread copies through its own pinned memory, on its own stream. On that stream the values are
also packed or rounded, while the thread reads the next values. The thread waits at most at the end of a matrix.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

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
    """Returns None: no matrix is rounded. It is the default `rounds_to` of `Loader`."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of a model's weights, which one copy fills.

    Attributes:
        names: names of its tensors, stacked along their rows.
        place: the weights; None: values cannot be read back from them, because they are rounded or in codes.
        order: order of the rows, new from old. None: that of the tensors.
        copy: fills the place from the loader's source.
    """

    names: tuple[str, ...]
    place: Weight | Tensor | None
    order: list[int] | None
    copy: Callable[[_Staging | None], None]


class Loader:
    """Makes weights of one dtype on one device from the named tensors of one source.

    Args:
        source: the tensors. Must be open if they are copied at once.
        ops: ops that will read the weights.
        rounds_to: returns the kind to which a matrix (name, (N, K)) is rounded. None: not rounded. Not called for
            matrices that are stored quantised.
        planned: True to allocate nothing and only count bytes.
        release: True to free the source's tensors after they are copied.
        later: True to copy nothing before `fill`.
        whole: source of the whole matrices, if `source` has only one rank's parts. None: `source` has whole matrices.

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
        self._copies: deque[Callable[[_Staging | None], None]] = deque()
        self.parts: list[Part] = []

    def tensor(
        self, *names: str, order: list[int] | None = None, dtype: torch.dtype | None = None, plus: float = 0.0
    ) -> Tensor:
        """Makes one tensor of the named tensors, stacked along their rows.

        Args:
            order: index of the old row for each new row.
            dtype: dtype, if not the loader's.
            plus: number that is added to every value.
        """
        parts = [self._infos[name].shape for name in names]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self._place)
        self._copy(Part(names, made, order, partial(self._fill_tensor, names, made, order, plus)))
        return made

    def weight(
        self,
        *names: str,
        gated: bool = False,
        order: list[int] | None = None,
        tree: bool = False,
        use: Use = "product",
    ) -> Weight:
        """Makes one `Weight` of the named matrices, stacked along their rows.

        Args:
            order: see `tensor`.
            tree: see `Weight`; for matrices that ranks share.
            use: "product" of a layer, "head" with logits in fp32, "table" of embeddings, or "tied", which is both.
        """
        shape = _shape_of(self._infos, names)
        kind = self._kind(names, shape, order)
        if kind is not None and self._ops.keeps_codes(shape, kind, self.dtype, self._device):
            made = Weight.empty_codes(shape, kind, gated, self.dtype, self._place)
            self._copy(Part(names, None, order, partial(self._fill_codes, names, made, kind, order)))
            return made
        form = self._ops.weight_format(shape, self.dtype, self._device)
        if form == "blocked" and use != "table" and self._whole is None:
            head, embeds = use in ("head", "tied"), use == "tied"
            blocked = Blocked(shape, self.dtype, head=head, embeds=embeds, counts=self._counts)
            made = Weight.of_blocked(blocked)
            place = made if kind is None else None
            self._copy(Part(names, place, order, partial(self._fill_weight, names, made, kind, order)))
            return made
        form = "rows" if form == "blocked" else form
        whole = None if self._whole is None else _shape_of(self._whole, names)
        tree = tree and whole is not None
        made = Weight.empty(shape, form, gated, self.dtype, self._place, whole=whole, tree=tree)
        place = made if kind is None else None
        self._copy(Part(names, place, order, partial(self._fill_weight, names, made, kind, order)))
        return made

    def same_format(self, *names: str) -> bool:
        """True if all named matrices are stored quantised, or none is."""
        return len({self._source.kind(name) is None for name in names}) == 1

    def joins_shared(self, *names: str) -> bool:
        """True if `ops` store a shared expert's matrices and router row together with those of the routed experts.

        False if they are quantised or if ranks share the model, because they are then stored separately.
        """
        plain = all(self._source.kind(name) is None for name in names)
        rounded = any(self._rounds_to(name, _shape_of(self._infos, (name,))) is not None for name in names)
        hidden = self._infos[names[0]].shape[1]
        wanted = self._ops.joins_shared(self.dtype, hidden, self._device)
        return wanted and plain and not rounded and self._whole is None

    def stack(self, experts: list[tuple[str, ...]], gated: bool = False) -> ExpertStack:
        """Makes one stack of the named matrices of each expert.

        The stack is in codes if all are stored quantised in one kind and `ops` can read that.

        gated: True if the first half of the rows is a gate.
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
                self._copy(Part(each, None, None, partial(self._fill_expert, expert, each, made)))
        else:
            self._copy(Part(tuple(names), None, None, partial(self._fill_experts, experts, made)))
        return made

    def _stored_kind(self, names: tuple[str, ...]) -> CodesKind | None:
        """Returns the kind in which all named matrices are stored. None: not all are, or kinds differ."""
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
        """Returns the kind to which all named matrices are quantised. None if they are not, or if kinds differ."""
        kinds = [kind for name in names if (kind := self._source.kind(name)) is not None]
        if not kinds:
            return self._rounds_to(names[0], shape)
        if len(kinds) < len(names):
            return None
        shapes = [(each[0], each[1]) for each in (self._infos[name].shape for name in names)]
        kind = joined_kind(kinds, shapes)
        return kind if kind is None or order is None else CodesKind(kind.format, (1, kind.block[1]))

    def fill(self) -> None:
        """Copies everything that was left for later. On CUDA all copies are complete when it returns.

        Raises:
            CheckpointError: a value cannot be read, or does not fit in float16. Nothing more is copied then.
        """
        with self._source.open():
            if self._device.type != "cuda":
                self._fill_until_done(None)
                return
            with ThreadPoolExecutor(READERS, "fastspec-load") as pool:
                for done in [pool.submit(self._read_along) for _ in range(READERS)]:
                    done.result()

    def kind(self, name: str) -> CodesKind | None:
        """The kind of a matrix that is stored quantised; None: it is not."""
        return self._source.kind(name)

    def present(self, name: str) -> Tensor:
        """The values of a tensor as the weights hold them now, in the order of its rows; see `Part.place`."""
        part = next(part for part in self.parts if name in part.names)
        assert part.place is not None, "its values can be read back"
        fused = part.place.unpack() if isinstance(part.place, Weight) else part.place
        if part.order is not None:
            fused = torch.empty_like(fused).index_copy_(0, torch.tensor(part.order, device=fused.device), fused)
        start = sum(self._infos[each].shape[0] for each in part.names[: part.names.index(name)])
        return fused[start : start + self._infos[name].shape[0]]

    def refill(self, source: TensorSource, names: Collection[str]) -> None:
        """Copies the parts that hold one of these tensors again, to the same places.

        Args:
            source: has all tensors of these parts, in the shapes and kinds of those before.
            names: tensors with new values.
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
            part.copy(None)

    def _read_along(self) -> None:
        """Fills weights until none is left. Each thread of `fill` runs it."""
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
                    copy(staging)
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
        """Fills a weight that stays quantised."""
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
        """Fills a weight of plain values. With a `kind`, values are first rounded to it."""
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
        """Rounds rows to a kind and returns their values. With None, returns the rows unchanged."""
        return rows if kind is None else rounded(rows, kind).dequantise(self.dtype)

    def _pack_rounded(self, place: PackedCodes, tile: int, rows: Tensor) -> Tensor:
        with self._launching:  # a kernel is compiled by its first launch; the lock prevents that two threads compile it
            return self._ops.pack_rounded(place, tile, rows)

    def _runs(
        self, names: tuple[str, ...], place: Weight, staging: _Staging | None
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """Yields the rows of a weight in ranges of whole tiles: (number of the first tile, rows). Gate rows come first.

        A range uses the same memory as the previous one, in the order of the stream.
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
        """Fills `place` with rows of the named matrices, stacked along their rows, starting at row `start`."""
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
        """Returns the values of a weight as rows [N, K], before conversion to its format."""
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
    """Pinned memory of one thread, and the stream on which it is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._copied = torch.cuda.Event()

    def copy(self, place: Tensor, stored: Tensor) -> None:
        """Copies `stored` (CPU) to `place` (device, contiguous) piece by piece. Values are rounded to place's dtype."""
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
    """Returns (N, K) of matrices stacked along their rows."""
    return sum(infos[name].shape[0] for name in names), infos[names[0]].shape[1]
