"""Checkpoint of a learned drafter (head): its spec, the location of its weights, and checks of its stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.parameter_names import RenamedTensors
from fastspec.models.checkpoints.safetensors_files import INDEX, SINGLE, ShardTensors
from fastspec.models.checkpoints.tensor_checks import listing
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.heads.spec import HeadSpec, TargetSizes, plain_name
from fastspec.models.hosted.info import HostedInfo

if TYPE_CHECKING:
    from fastspec.kernels.common.codes import CodeFormat
    from fastspec.kernels.ops import Ops

HeadCount = Callable[["HeadCheckpoint", torch.dtype, torch.device, "Ops"], int]
OFFSETS: Final = "d2t"
PICKLED: Final = "pytorch_model.bin"
# tensors that training code saves with a head, but that no computation uses
UNUSED: Final = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True, eq=False)
class HeadCheckpoint:
    """Checkpoint of one learned drafter, called a head: its spec and its files. Implements `ModelSource`.

    Attributes:
        name: path or Hub id of the head, for messages.
        spec: type and sizes of the head.
        directory: local directory with the files.
        vocab_map: int64 [spec.vocab_size] on the CPU, the target's id of each id of the head. None: the ids are equal.
        sample: token ids of a short text. The possible meanings of the head's config (`HeadSpec.readings`) are tried on
            it. Empty if there is only one meaning.
        source: the target, if its checkpoint contains the head. None: the head has its own checkpoint.
        rows_of: the target, if the user chose which ids a head with its own checkpoint drafts. Then only the rows of
            these ids are loaded of the output matrix, which is the head's or the target's. None: the user chose no ids.
        stored: description of the format to which the head's matrices are quantised while they are loaded. Empty: they
            are not quantised.
        module: None, because heads are read from files.
        ranks: 1, because every rank loads the whole head.
        mtp: False, because a head has no MTP layers of its own.
        rounded: the format that `stored` describes. None: not quantised.
        count: function that computes `bytes_loaded`.
    """

    name: str
    spec: HeadSpec
    directory: Path
    vocab_map: Tensor | None
    sample: tuple[int, ...]
    source: Checkpoint | None = None
    stored: str = ""
    module: None = None
    ranks: int = 1
    mtp: bool = False
    rounded: CodeFormat | None = None
    rows_of: Checkpoint | None = None
    count: HeadCount = field(kw_only=True)

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Returns the number of bytes of the draft head's weights and id tables on a device; see `head_bytes`."""
        return self.count(self, dtype, device, ops)


class HeadTensors(RenamedTensors):
    """Tensors in the directory of a draft head, by their `plain_name`.

    Args:
        directory: local directory with safetensors files.

    Raises:
        CheckpointError: weights are missing, damaged or pickled, or two stored names give the same `plain_name`.
    """

    def __init__(self, directory: Path) -> None:
        refuse_pickled(directory)
        source = ShardTensors(directory)
        names: dict[str, str] = {}
        for stored in source.infos():
            name = plain_name(stored)
            if name in names:
                raise CheckpointError(
                    f"{directory}: {names[name]!r} and {stored!r} are both the tensor {name}; keep one"
                )
            names[name] = stored
        super().__init__(source, names)


def refuse_pickled(directory: Path) -> None:
    """Refuses a directory that has pickled weights and no safetensors, like some early published heads.

    Raises:
        CheckpointError: there are only pickled weights. The message has the command that converts them.
    """
    if not (directory / PICKLED).is_file() or any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return
    raise CheckpointError(
        f"{directory}: has {PICKLED} alone, which is pickled and never loaded here; convert it once, if you trust it: "
        + conversion(directory)
    )


def conversion(directory: Path | str) -> str:
    """Returns a shell command that converts the pickled weights in a directory to safetensors."""
    return (
        f'cd {directory} && python -c "import torch; from safetensors.torch import save_file; save_file({{k: '
        f"v.clone() for k, v in torch.load('{PICKLED}', map_location='cpu', weights_only=True).items()}}, "
        f"'{SINGLE}')\""
    )


def check_head_tensors(tensors: TensorSource, spec: HeadSpec) -> None:
    """Checks that the stored tensors of a draft head are those that its spec wants, before anything is allocated.

    Args:
        tensors: stored tensors, by `plain_name`.
        spec: spec of the head.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is unknown.
        UnsupportedModel: a tensor is stored in a dtype other than bfloat16, float16 or float32.
    """
    infos = tensors.infos()
    missing = [wanted for wanted in spec.tensors if wanted not in infos]
    if missing:
        raise CheckpointError(f"{listing(missing)} missing; this {spec.found} needs them")
    others = [each for each in infos if each not in spec.tensors and each not in (*UNUSED, *spec.unused, OFFSETS)]
    if others:
        raise CheckpointError(
            f"{listing(others)} unexpected; they are not part of this {spec.found}, and leaving them "
            "out would change what it drafts"
        )
    for wanted, shape in spec.tensors.items():
        info = infos[wanted]
        if info.shape != shape:
            raise CheckpointError(
                f"{wanted} in {info.where} has shape {list(info.shape)}, wanted {list(shape)} from its config "
                f"and the target {spec.target.name} (hidden_size={spec.target.hidden_size}, "
                f"vocab_size={spec.target.vocab_size})"
            )
        if isinstance(info.dtype, str):
            raise UnsupportedModel(f"{wanted} is stored as {info.dtype}, wanted BF16, F16 or F32")


def target_ids(tensors: TensorSource, spec: HeadSpec) -> Tensor | None:
    """Reads the table that maps the draft head's token ids to the target's: int64 [vocab_size] on the CPU.

    The stored tensor `d2t` has the differences between the target's ids and the head's. None if all ids are equal.

    Args:
        tensors: stored tensors of the head.
        spec: spec of the head.

    Raises:
        CheckpointError: the table is missing, or has ids that the target does not have, or an id twice.
    """
    drafted, known = spec.vocab_size, spec.target.vocab_size
    if OFFSETS not in tensors.infos():
        if drafted == known:
            return None
        raise CheckpointError(
            f"it drafts {drafted} of the target's {known} ids and has no tensor {OFFSETS} that names them"
        )
    with tensors.open():
        offsets = tensors.read(OFFSETS).to(torch.int64).clone()
    if offsets.shape != (drafted,):
        raise CheckpointError(f"{OFFSETS} has shape {list(offsets.shape)}, wanted [{drafted}]")
    ids = offsets + torch.arange(drafted, device="cpu")
    if int(ids.min()) < 0 or int(ids.max()) >= known or ids.unique().numel() < drafted:
        raise CheckpointError(
            f"{OFFSETS} leads to ids {int(ids.min())} to {int(ids.max())}, wanted {drafted} different ids "
            f"below the target's {known}: it was made for another target"
        )
    return None if drafted == known and torch.equal(offsets, torch.zeros_like(offsets)) else ids


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Context manager that puts `what` in front of the message of an error of this package that is raised inside."""
    try:
        yield
    except (CheckpointError, UnsupportedModel, UnsupportedOption) as error:
        raise type(error)(f"{what}: {error}") from error


def sizes_of(target: Checkpoint) -> TargetSizes:
    """Returns the sizes of a target model that a draft head needs.

    Raises:
        UnsupportedModel: the target is run by transformers' own module, and its layers are not in one list.
    """
    spec = target.spec
    if isinstance(spec, HostedInfo):
        return _sizes_of_hosted(target.name, spec)
    return TargetSizes(
        name=target.name,
        layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_length=spec.max_length,
        dtype=spec.dtype,
        embed_scale=spec.scales.embed,
    )


def _sizes_of_hosted(name: str, spec: HostedInfo) -> TargetSizes:
    if not spec.layer_names:
        raise UnsupportedModel(
            f"a learned drafter reads hidden states of its target's layers, and {name} is hosted, and its layers are "
            "not in one list: use a draft model, or a target of a native family"
        )
    return TargetSizes(
        name=name,
        layers=len(spec.layer_names),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_length=spec.max_length,
        dtype=spec.dtype,
    )
