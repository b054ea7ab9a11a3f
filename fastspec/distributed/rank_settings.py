"""Settings on which all ranks of a generator agree, and the part of each model that a rank loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from fastspec.config import Config, check_range
from fastspec.distributed.agreement import sources
from fastspec.distributed.ranks import Ranks, check_places, place_of
from fastspec.distributed.slices import SIZES, Sizes, divides
from fastspec.engine.settings import Settings, device_of, dtype_of, settings_of
from fastspec.errors import UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import fingerprint
from fastspec.models.checkpoints.rank_slices import same_text_on, sliced
from fastspec.models.config import ModelSpec
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.hosted.cuts import share_info, sizes_to_cut
from fastspec.models.hosted.info import HostedInfo
from fastspec.scheduling.draft_length import DraftChoice, DraftPlan
from fastspec.scheduling.loop import Loop

# number of ranks -> extra seconds of a one-row step for each of the two sums over ranks of a layer, with NVLink.
# They include the sum itself, and the kernel fusions that it prevents (perf/results/tensor_parallel.jsonl)
SUM_SECONDS = {2: 5.6e-6, 4: 17e-6, 8: 35e-6}
READ_SHARE = 0.9  # share of the rated memory bandwidth that passes reach while they read weights
USUAL_RATE = 3.35e12  # bytes per second of an H100's memory, used if torch does not report the rate


def agreed_settings(
    ranks: Ranks,
    pair: Callable[[], tuple[Checkpoint, Checkpoint | HeadCheckpoint | None]],
    config: Config,
) -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]:
    """Returns target, draft and settings of this rank. `max_length` is the largest that fits on all ranks.

    Args:
        ranks: ranks of the generator.
        pair: finds target and draft.
        config: arguments of the constructor.

    Raises:
        UnsupportedOption: ranks have different arguments, or a model cannot be split over them. Also the errors of
            `settings_of`.
    """
    config = replace(config, device=ranks.device(config.device))

    def make() -> tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]:
        """Finds the models and computes the settings of this rank alone."""
        whole, draft_whole = pair()
        device = device_of(config.device, whole)
        on_cpu = device.type == "cpu"
        _decide_draft(draft_whole, ranks, device, config.dtype)
        target, draft = _own(whole, ranks, on_cpu=on_cpu), draft_whole
        if isinstance(draft, Checkpoint):
            draft = _own(draft, ranks, on_cpu=on_cpu)
        if ranks.asked and config.compile:
            raise UnsupportedOption("compile=True does not go with tensor_parallel; leave one of them out")
        return target, draft, settings_of(target, draft, config)

    def of_all(made: tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]) -> dict[str, object]:
        """Values that must be equal on all ranks, by their names in an error."""
        models = [None if each is None else fingerprint(each) for each in made[:2]]
        return {
            "version of fastspec or torch": (sources(), torch.__version__),
            "checkpoint": models,
            **{f"option {name}": value for name, value in config.shared().items()},
            "draft_tensor_parallel": ranks.split_draft,
        }

    def told(made: tuple[Checkpoint, Checkpoint | HeadCheckpoint | None, Settings]) -> tuple[int, str]:
        return made[2].max_length, place_of(made[2].device)

    (target, draft, made), of_each = ranks.agreed(make, of_all, told, starting=True)
    lengths, places = zip(*of_each, strict=True)
    check_places(places)
    if (shortest := min(lengths)) < made.max_length:
        shorter = settings_of(target, draft, replace(config, max_length=shortest))
        made = replace(shorter, length_reason="what fits on all ranks")
    cut = target.spec.cut if isinstance(target.spec, HostedInfo) else None
    if cut is not None:
        # on a CPU sums are one tree for any number of ranks, so results are equal for any size that divides the parts
        fine = tuple(size for size in SIZES if size <= cut.share.parts)
        ranks.same_text_on = fine if cut.share.one_tree and target.rounded is None else (ranks.size,)
        return target, draft, replace(made, ranks=ranks.describe(cut.share, "it is hosted"))
    share = None if target.sliced is None else target.sliced.share
    if target.sliced is not None:
        ranks.same_text_on = same_text_on(target, made.layout.target_dtype, made.device)
    splits = share is None or share.splits_vocab(target.spec.vocab_size)
    return (
        target,
        draft,
        replace(made, ranks=ranks.describe(share, "" if splits else "its rows cannot be divided equally")),
    )


def agreed_warmup(
    ranks: Ranks, loop: Loop, drafting: DraftPlan, max_length: int, asked: tuple[int | str | None, str, int]
) -> tuple[DraftChoice, int]:
    """Checks that all ranks call `warmup` with the same arguments.

    Returns the numbers of draft tokens and the length of the longest sequence for which steps are captured.

    Args:
        ranks: ranks of the generator.
        loop: loop of this rank, which must be idle.
        drafting: numbers of draft tokens that the generator supports.
        max_length: largest number of tokens of a sequence.
        asked: arguments of `warmup`: (draft tokens per step, sampler, tokens of the longest sequence).

    Raises:
        ValueError: a value out of range.
        UnsupportedOption: another rank got other arguments, or refused them.
        RuntimeError: a call or a handle is running on this rank.
    """
    drafts, sampler, length = asked

    def make() -> tuple[DraftChoice, int]:
        longest = check_range("length", length, 0, max_length)
        return drafting.for_warmup(drafts, sampler), longest

    with loop.alone():
        made, _ = ranks.agreed(make, lambda made: {"warm-up": (made[0].ks, sampler, made[1])}, starting=True)
    return made


def _decide_draft(draft: Checkpoint | HeadCheckpoint | None, ranks: Ranks, device: torch.device, dtype: Any) -> None:
    """Decides if the draft is split over the ranks, and sets `ranks.split_draft`. A head is never split.

    Raises:
        UnsupportedOption: the draft is a head, and draft_tensor_parallel="split".
    """
    if isinstance(draft, HeadCheckpoint) and ranks.split_draft:
        raise UnsupportedOption(
            f"draft_tensor_parallel='split', and {draft.name} is a head, which is never split; leave it out"
        )
    if ranks.split_draft is None:
        ranks.split_draft = isinstance(draft, Checkpoint) and _splits_draft(draft, ranks, device, dtype)


def _splits_draft(draft: Checkpoint, ranks: Ranks, device: torch.device, dtype: Any) -> bool:
    """True if the draft is split by default: on GPUs, if the split shortens the draft's passes by an estimate."""
    if device.type != "cuda" or not _plain(draft) or not isinstance(draft.spec, ModelSpec):
        return False
    if draft.spec.plans[0].qk_norm == "projection":  # this norm needs one more exchange in each layer
        return False
    return splitting_pays(draft.spec, dtype_of(dtype, draft.spec, device), ranks.size, memory_rate(device))


class TimedModel(Sizes, Protocol):
    """Sizes from which the time of a pass is estimated."""

    @property
    def num_layers(self) -> int:
        """Number of layers. Each layer has two sums over ranks."""

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the number of bytes of weights that one forward pass reads."""


def splitting_pays(model: TimedModel, dtype: torch.dtype, ranks: int, rate: float) -> bool:
    """True if a one-row pass is estimated to be faster with the model split over `ranks` ranks.

    Args:
        model, dtype: sizes of the model, and the dtype of its weights on the device.
        ranks: number of ranks.
        rate: nominal bandwidth of the device's memory, in bytes per second.
    """
    if ranks not in SUM_SECONDS or not divides(model, ranks):
        return False
    whole = model.weight_bytes(dtype) / (rate * READ_SHARE)
    return whole / ranks + 2 * model.num_layers * SUM_SECONDS[ranks] < whole


def memory_rate(device: torch.device) -> float:
    """Returns the nominal memory bandwidth of a CUDA device, in bytes per second."""
    found = torch.cuda.get_device_properties(device)
    khz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return 2 * khz * 1e3 * bits / 8 or USUAL_RATE  # two transfers per clock


def _own(checkpoint: Checkpoint, ranks: Ranks, *, on_cpu: bool) -> Checkpoint:
    """Returns the part of a checkpoint that this rank loads. For `on_cpu` see `Ranks.share`.

    Raises:
        UnsupportedOption: the model cannot be split over the ranks, or it is hosted and has no known split plan.
    """
    draft, spec = checkpoint.role == "draft", checkpoint.spec
    if isinstance(spec, HostedInfo):
        return _own_hosted(checkpoint, spec, ranks, on_cpu=on_cpu)
    share = ranks.share(spec, checkpoint.name, draft=draft, on_cpu=on_cpu)
    if share is None or (share.parts == 1 and not _plain(checkpoint)):
        return checkpoint
    return sliced(checkpoint, share)


def _own_hosted(checkpoint: Checkpoint, info: HostedInfo, ranks: Ranks, *, on_cpu: bool) -> Checkpoint:
    """Returns the part of a hosted model that this rank loads, by transformers' tensor-parallel plan.

    A single rank loads the whole model. For `on_cpu` see `Ranks.share`.
    """
    draft = checkpoint.role == "draft"
    if not ranks.asked or (draft and not ranks.split_draft):
        return checkpoint
    try:
        share = ranks.share(sizes_to_cut(info), checkpoint.name, draft=draft, on_cpu=on_cpu)
        if share is None or share.parts == 1:
            return checkpoint
        return replace(checkpoint, spec=share_info(info, share))
    except UnsupportedModel as error:
        if ranks.size == 1:
            return checkpoint
        raise UnsupportedOption(
            f"{checkpoint.role}: {checkpoint.name} is hosted, and tensor_parallel cannot cut it: {error}; leave "
            f"{'draft_' if draft else ''}tensor_parallel out, or run one process per GPU, each with its own prompts"
        ) from error


def _plain(checkpoint: Checkpoint) -> bool:
    """True if a model of a native family has 16-bit or fp32 weights, attention and dense MLPs, and nothing else."""
    spec = checkpoint.spec
    if not isinstance(spec, ModelSpec) or checkpoint.in_codes or checkpoint.rounded is not None:
        return False
    return not spec.routed_elements and not spec.state_rules
