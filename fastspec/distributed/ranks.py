"""Ranks of a generator: their number, their devices, their parts of a model, and the comparison of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from fastspec.distributed.agreement import agree
from fastspec.distributed.exchange import Alone, Exchange, OverHosts
from fastspec.distributed.slices import SIZES, RankShare, Sizes, check_divides, share_of
from fastspec.distributed.world import World
from fastspec.errors import InvalidLogits, OutOfPages, UnsupportedOption
from fastspec.inputs.options import Options
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.table import keywords_of

T = TypeVar("T")
REPLICATED, SPLIT = "replicated", "split"
SYMMETRIC = (InvalidLogits, OutOfPages)  # errors that all ranks raise at the same point


class Row(Protocol):
    """Parts of a request that ranks compare."""

    prompt: list[int]
    options: RowOptions


@dataclass(slots=True)
class Ranks:
    """The ranks of one generator.

    Attributes:
        world: all ranks, or this process alone.
        asked: True if tensor_parallel was given. Partial sums are then added in the same order for one rank as for
            several.
        split_draft: True if the draft model is split over the ranks. False: every rank has all of it. None: not
            decided.
        same_text_on: numbers of ranks that give the same text, to the bit. None: unknown.
    """

    world: World
    asked: bool = False
    split_draft: bool | None = False
    same_text_on: tuple[int, ...] | None = None

    @classmethod
    def alone(cls) -> Ranks:
        """Returns the ranks of a generator without `tensor_parallel`: this process alone."""
        return cls(World.alone())

    @classmethod
    def of(cls, asked: int | str | None, draft: str | None) -> Ranks:
        """Makes the ranks from the arguments of a generator.

        Args:
            asked: the generator's argument `tensor_parallel`: a number of ranks, "auto", or None.
            draft: the argument `draft_tensor_parallel`: "replicated", "split", or None for the faster of the two.

        Raises:
            UnsupportedOption: another value, or another number of processes than `asked`.
        """
        if asked is None:
            _check(asked, draft, 1)
            return cls.alone()
        ranks = cls(World.meet(), True, None if draft is None else draft == SPLIT)
        try:  # checked after all ranks have met, so that none waits for one that raises
            ranks.agreed(lambda: _check(asked, draft, ranks.size), lambda made: {}, starting=True)
        except Exception:
            ranks.close()
            raise
        return ranks

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def first(self) -> bool:
        """True on rank 0. Only rank 0 prints progress."""
        return self.world.rank == 0

    def device(self, asked: Any) -> Any:
        """Returns `asked`, if it names a device. Else returns this rank's device: the GPU with its local rank."""
        wanted = asked is None or (str(asked) == "cuda")
        if self.size == 1 or not wanted or not torch.cuda.is_available():
            return asked
        return torch.device("cuda", dist.get_node_local_rank(self.world.rank))

    def share(self, sizes: Sizes, name: str, *, draft: bool, on_cpu: bool) -> RankShare | None:
        """Returns the part of a model that this rank owns. None: the rank has the whole model.

        A single rank on a GPU also gets a `RankShare`, which is the whole model. So one rank adds partial sums in the
        same order as several ranks.

        Args:
            sizes, name: sizes of the model, and its name for messages.
            draft: True for the draft model.
            on_cpu: True on a CPU. Partial sums are then split so finely that results do not depend on the number of
                ranks. On a GPU this would need too many launches.

        Raises:
            UnsupportedOption: the model cannot be divided among the ranks.
        """
        whole = draft and not self.split_draft
        if not self.asked or (whole and on_cpu):
            return None
        if whole:
            return RankShare(0, 1, 1)
        check_divides(sizes, self.size, name)
        return share_of(sizes, self.world.rank, self.size, one_tree=on_cpu)

    def exchange(self, device: torch.device, step: int, prompts: int) -> Exchange:
        """Returns the collective operations for passes on a device.

        Args:
            device: device of the passes.
            step, prompts: number of 4-byte elements of the largest tensor in a step, and in a prefill pass.
        """
        if self.size == 1:
            return Alone()
        if device.type == "cpu":
            return OverHosts(self.world)
        from fastspec.distributed.devices import OverDevices  # imported only where several GPUs are used

        return OverDevices(self.world, device, step, prompts)

    def agreed(
        self,
        make: Callable[[], T],
        asked: Callable[[T], Mapping[str, object]],
        told: Callable[[T], Any] = lambda made: None,
        *,
        starting: bool = False,
    ) -> tuple[T, list[Any]]:
        """Runs `make` on every rank, and checks that all ranks have the same arguments.

        Args:
            make: makes a value of this rank, or raises.
            asked: returns the arguments to compare, by name. Its own argument is the result of `make`.
            told: returns a small JSON value for the other ranks. Its argument is the result of `make`.
            starting: see `agree`.

        Returns:
            The result of `make` on this rank, and the `told` values of all ranks.

        Raises:
            UnsupportedOption: `make` failed on another rank, or a rank has other arguments. Also the errors of `make`.
        """
        if self.size == 1:
            made = make()
            return made, [told(made)]
        self.world.check()
        try:
            made = make()
        except Exception as error:
            agree(self.world, {}, None, error, starting=starting)
            raise
        return made, agree(self.world, asked(made), told(made), starting=starting)

    def agreed_call(self, make: Callable[[], T], parts: Callable[[T], tuple[Sequence[Row], Options]]) -> T:
        """Prepares a call on all ranks, and checks that its arguments are the same on all of them.

        Rows without a seed get the random seeds of rank 0.

        Args:
            make: prepares the call on this rank, or raises.
            parts: returns (requests, options) of the prepared call.
        """
        if self.size == 1:
            return make()

        def asked(made: T) -> dict[str, object]:
            """Prompts and options that must be equal on all ranks."""
            rows, chosen = parts(made)
            seeded = chosen.seeded
            options = [row.options if seeded else replace(row.options, seed=0) for row in rows]
            return {"prompts": [row.prompt for row in rows], **_by_name(options, chosen)}

        def told(made: T) -> list[int]:
            return [row.options.seed for row in parts(made)[0]]

        made, seeds = self.agreed(make, asked, told)
        for row, seed in zip(parts(made)[0], seeds[0], strict=True):
            row.options = replace(row.options, seed=seed)
        return made

    def guarded(self, what: str) -> AbstractContextManager[None]:
        """Returns a context in which an error that only this rank raises ends the work of all ranks.

        Args:
            what: description of the work, for errors of other ranks.
        """
        return self.world.guarded(what, SYMMETRIC)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context for a step in which all ranks exchange tensors. An error of this rank ends the work of all ranks.

        If another rank has failed, the context raises RankFailed with that rank's cause instead of its own error.
        """
        try:
            with self.guarded("stepping"):
                yield
        finally:
            self.world.check()

    def close(self) -> None:
        """Ends the heartbeat thread of this rank."""
        self.world.close()

    def describe(self, share: RankShare | None, whole_head: str) -> str:
        """Describes the ranks and their parts for `explain`. Empty without `tensor_parallel`.

        Args:
            share: the part of the target on this rank.
            whole_head: reason why every rank has the whole LM head. Empty: the head is split.
        """
        if not self.asked:
            return ""
        draft = "cut, too" if self.split_draft else "whole on every rank"
        if share is None:
            return "1: as without tensor_parallel"
        same = (
            f"the same text on {_numbers(self.same_text_on)} ranks"
            if self.same_text_on is not None and len(self.same_text_on) > 1
            else "text may differ from that of another number of ranks, by the last bits of sums"
        )
        head = f"; every rank has the whole head, because {whole_head}" if whole_head else ""
        return f"{self.size}, this is {self.world.rank}; {same}; draft {draft}{head}"


def _check(asked: int | str | None, draft: str | None, size: int) -> None:
    """Refuses invalid arguments of `Ranks.of`, and those that do not fit the number of processes."""
    if draft not in (None, REPLICATED, SPLIT):
        raise UnsupportedOption(f"draft_tensor_parallel={draft!r} is not supported, wanted {REPLICATED!r} or {SPLIT!r}")
    if asked is None and draft is not None:
        raise UnsupportedOption(f"draft_tensor_parallel={draft!r} goes with tensor_parallel; give that, too")
    if isinstance(asked, bool) or asked not in (None, "auto", *SIZES):
        numbers = ", ".join(map(str, SIZES))
        raise UnsupportedOption(f"tensor_parallel={asked!r} is not supported, wanted 'auto' or one of {numbers}")
    if asked in (None, "auto", size):
        return
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedOption(
            f"tensor_parallel={asked} needs {asked} processes, and this is one alone: start the script by "
            f"torchrun --nproc-per-node {asked} script.py, or the command line by fastspec generate "
            f"--tensor-parallel {asked}"
        )
    raise UnsupportedOption(
        f"tensor_parallel={asked}, and there are {size} processes; pass {size} or 'auto', or start {asked}"
    )


def _by_name(rows: Sequence[RowOptions], chosen: Options) -> dict[str, object]:
    """Returns {name in an error message: values} for the options of a call."""
    found: dict[str, list[object]] = {}
    for field in fields(chosen):
        if field.name != "rows":
            found.setdefault(keywords_of(field.name), []).append(getattr(chosen, field.name))
    for field in fields(RowOptions):
        values = [getattr(row, field.name) for row in rows]
        # one value for equal options: a different number of prompts is reported elsewhere
        same = all(value == values[0] for value in values)
        found.setdefault(keywords_of(field.name), []).append(values[0] if same else values)
    return {f"option {name}": values for name, values in found.items()}


def place_of(device: torch.device) -> str:
    """Returns a text that identifies a device on all ranks.

    It contains a GPU's UUID, because each process may number GPUs differently.
    """
    if device.type != "cuda":
        return device.type
    unique = getattr(torch.cuda.get_device_properties(device), "uuid", "")  # older versions of torch do not report it
    return f"{device} {unique}".strip()


def check_places(places: Sequence[str]) -> None:
    """Refuses ranks that share a GPU, and ranks on devices of different types.

    Args:
        places: for each rank, the result of `place_of`.

    Raises:
        UnsupportedOption: the message names the ranks.
    """
    kinds = [place.partition(":")[0] for place in places]
    if (other := next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise UnsupportedOption(
            f"rank {other} computes on {places[other]} and rank 0 on {places[0]}; give all ranks the same device"
        )
    names, gpus = zip(*(place.partition(" ")[::2] for place in places), strict=True)
    again = next((rank for rank, gpu in enumerate(gpus) if gpu and gpu in gpus[:rank]), None)
    if again is not None:
        raise UnsupportedOption(
            f"ranks {gpus.index(gpus[again])} and {again} both compute on {names[again]}, and each needs a GPU of its "
            "own: leave device out, and rank r takes GPU r"
        )


def _numbers(sizes: Sequence[int]) -> str:
    """Formats numbers as text: "1, 2 and 4"."""
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
