"""MTP layers of a target's own checkpoint: found and checked before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.decoder_weights import named
from fastspec.models.checkpoints.parameter_names import NamedTensors, RenamedTensors, Stored
from fastspec.models.checkpoints.quantised.tensors import QuantisedShards
from fastspec.models.checkpoints.safetensors_files import ShardTensors, TensorInfo
from fastspec.models.config import ModelSpec
from fastspec.models.families.plan import LayerPlan
from fastspec.models.heads.boundaries import NORMED
from fastspec.models.heads.checkpoint import HeadCheckpoint, naming, sizes_of
from fastspec.models.heads.mtp_names import EMBED_NORM, FC, HIDDEN_NORM, LAYER, NORM, find_mtp
from fastspec.models.heads.recognise import Recognised
from fastspec.models.heads.spec import HeadSpec
from fastspec.models.heads.tensors import check_head_tensors
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastspec.kernels.common.codes import Codes, CodesKind
    from fastspec.models.checkpoints.resolve import Checkpoint
    from fastspec.models.checkpoints.weight_loader import TensorSource

MTP: Final = "mtp"
"""The value of `draft` that stands for the target's own MTP layer."""


@dataclass(frozen=True, slots=True)
class MtpSpec(HeadSpec):
    """Sizes and arithmetic of an MTP layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

        e = norm(embedding of the next token), h = norm(the target's hidden state after its final norm)
        x = [e h] Wfc^T                    [h e] with hidden_first
        x = norm(layer(x))                 the layer has the plan of the target's last layer with attention
        logits = x Whead^T                 for later drafts x takes the place of the target's hidden state

    The embedding and Whead are the target's. With `draft_vocab` Whead is a matrix of its own, with some rows of the
    target's. All norms are of the kind that the target has.

    Attributes:
        hidden_first: the hidden state comes before the embedding in what Wfc multiplies.
    """

    hidden_first: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of what is kept of a row's newest position, for its first draft; see `Mtp.absorb`."""
        return (self.attention_inputs,)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """As of any head, but norms may be in fp32."""
        sizes = {2: dtype.itemsize, 1: self.decoder.norm_dtype(dtype).itemsize}
        return sum(sizes.get(len(shape), dtype.itemsize) * math.prod(shape) for shape in self.tensors.values())


def resolve_mtp(
    target: Checkpoint,
    revision: str | None,
    asked: object,
    vocab: Sequence[int] | None = None,
) -> HeadCheckpoint:
    """The MTP layer of a target's checkpoint; nothing is allocated.

    Args:
        target: resolved.
        revision, asked: the caller's draft_revision and feature_layers; both must be None.
        vocab: ids that the layer may draft; None: all.

    Raises:
        CheckpointError: the checkpoint has no MTP layer, or tensors of it are missing.
        UnsupportedModel: the target is hosted, has several MTP layers, or one of experts beside dense layers.
        UnsupportedOption: an option that does not go with an MTP layer, or a live module as target.
        ValueError: `vocab` is empty, or has an id twice or one that the target does not know.
    """
    for name, value in (("draft_revision", revision), ("feature_layers", asked)):
        if value is not None:
            raise UnsupportedOption(
                f"{name}={value!r} does not go with draft='{MTP}', which is a layer of the target's checkpoint; leave "
                "it out"
            )
    if target.directory is None:
        raise UnsupportedOption(
            f"draft='{MTP}': {target.name} is a live module, which does not have its checkpoint's MTP layers; pass its "
            "directory or Hub id as target"
        )
    with naming(f"draft='{MTP}'"):
        spec, ids = _spec(target, target.directory), None
        if vocab is not None:
            ids = _checked_ids(vocab, target.native.vocab_size)
            decoder, tensors = replace(spec.decoder, vocab_size=len(ids), tied=False), dict(spec.tensors)
            tensors[HEAD] = (len(ids), spec.hidden_size)
            spec = replace(spec, decoder=decoder, tensors=tensors, own_head=True)
        found = HeadCheckpoint(f"the MTP layer of {target.name}", spec, target.directory, ids, (), source=target)
        check_head_tensors(mtp_source(found), spec)
    return found


def _checked_ids(vocab: Sequence[int], known: int) -> Tensor:
    """The ids in ascending order, int64 [n] on the CPU."""
    ids = sorted({each for each in vocab if type(each) is int and 0 <= each < known})
    if not ids or len(ids) != len(vocab):
        raise ValueError(
            f"draft_vocab has {len(vocab)} entries, of which {len(ids)} are different ids from 0 to {known - 1}; "
            "wanted different ids of the target, and one at least: frequent_ids() counts them"
        )
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def mtp_source(checkpoint: HeadCheckpoint) -> TensorSource:
    """The tensors of the MTP layer that `resolve_mtp` found, by their names here."""
    target, spec = checkpoint.source, checkpoint.spec
    assert target is not None, "a layer lies in its target's checkpoint"
    assert isinstance(spec, MtpSpec), "as its spec says"
    layer = mtp_tensors(target, spec)
    if checkpoint.vocab_map is None:
        return layer
    return WithSomeRows(layer, named(ShardTensors(checkpoint.directory), target.native), checkpoint.vocab_map)


class WithSomeRows:
    """The tensors of an MTP layer, with some rows of the target's output matrix as its head.

    Args:
        layer: tensors of the MTP layer, by their names here.
        model: tensors of the target.
        ids: int64 [n], the rows.
    """

    def __init__(self, layer: RenamedTensors, model: NamedTensors, ids: Tensor) -> None:
        self._layer, self._model, self._ids = layer, model, ids
        self._name = HEAD if HEAD in model.infos() else EMBED

    def infos(self) -> Mapping[str, TensorInfo]:
        """As of the layer, and of the head; of one that is quantised and not stored so, nothing."""
        whole = self._model.infos().get(self._name)
        if whole is None:
            return self._layer.infos()
        return {**self._layer.infos(), HEAD: replace(whole, shape=(len(self._ids), *whole.shape[1:]))}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens both sources."""
        opened: list[AbstractContextManager[None]] = [self._layer.open(), self._model.open()]
        with ExitStack() as stack:
            for each in opened:
                stack.enter_context(each)
            yield

    def read(self, name: str) -> Tensor:
        """The tensor; of the head a copy."""
        return self._model.read(self._name)[self._ids] if name == HEAD else self._layer.read(name)

    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Rows and, of a matrix, columns of a tensor."""
        return self.read(name)[rows, columns] if name == HEAD else self._layer.read_part(name, rows, columns)

    def kind(self, name: str) -> CodesKind | None:
        """As of the layer; the head is not quantised."""
        return None if name == HEAD else self._layer.kind(name)

    def codes(self, name: str, device: torch.device) -> Codes | None:
        """As of the layer; the head is not quantised."""
        return None if name == HEAD else self._layer.codes(name, device)

    def codes_part(self, name: str, rows: slice, columns: slice, device: torch.device) -> Codes | None:
        """As of the layer; the head is not quantised."""
        return None if name == HEAD else self._layer.codes_part(name, rows, columns, device)

    def release(self, names: list[str]) -> None:
        """Nothing to do: see `ShardTensors.release`."""


def mtp_tensors(target: Checkpoint, spec: MtpSpec) -> RenamedTensors:
    """The tensors of the first MTP layer in a target's directory, by their names here.

    Matrices may be quantised as the target's are, or lie as they are beside a quantised target.
    """
    assert target.directory is not None, "checked by `resolve_mtp`"
    stored: Stored = ShardTensors(target.directory)
    layers = target.native.num_layers
    found = find_mtp(stored.infos().keys(), layers)
    assert found is not None, "there was one when it was resolved"
    if target.quantisation is not None:
        infos = stored.infos()
        modules = {here.rpartition(".")[0]: name.rpartition(".")[0] for here, name in found.names.items()}
        coded = {
            f"{modules[module]}.weight": shape
            for name, shape in spec.tensors.items()
            if len(shape) == 2 and (module := name.removesuffix(".weight")) in modules
            if name not in found.names or isinstance(infos[found.names[name]].dtype, str)
        }
        if coded:
            stored = QuantisedShards(stored, target.quantisation, coded)
            found = find_mtp(stored.infos().keys(), layers)
            assert found is not None, "a matrix goes under its module's name"
    return RenamedTensors(stored, found.names)


def _spec(target: Checkpoint, directory: Path) -> MtpSpec:
    sizes, model = sizes_of(target), target.native
    found = find_mtp(ShardTensors(directory).infos().keys(), model.num_layers)
    if found is None:
        raise CheckpointError(
            f"{target.name} holds no MTP layer (mtp.*, model.layers.{model.num_layers}.* or model.mtp_layers.*); use a "
            "learned drafter, a draft model, or NGram()"
        )
    if found.depth > 1:
        raise UnsupportedModel(
            f"{target.name} holds {found.depth} MTP layers, each for one more token; one is supported. Use a learned "
            "drafter, a draft model, or NGram()"
        )
    decoder = replace(model, plans=(_plan(model),))
    if any(".experts." in name for name in found.names) and not any(".experts." in name for name in _tensors(decoder)):
        raise UnsupportedModel(
            f"the MTP layer of {target.name} is a mixture of experts, and the target's layers are not; use a learned "
            "drafter, a draft model, or NGram()"
        )
    return MtpSpec(
        found=Recognised("mtp", found.layout),
        decoder=decoder,
        target=sizes,
        readings=((NORMED,),),
        tensors=_tensors(decoder),
        own_embed=False,
        own_head=False,
        hidden_first=found.hidden_first,
    )


def _plan(model: ModelSpec) -> LayerPlan:
    """The plan of the last layer with attention; of one without a sliding window where there is any."""
    attending = [model.plans[layer] for layer in model.attending]
    return next((plan for plan in reversed(attending) if plan.window is None), attending[-1])


def _tensors(decoder: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    layer = {name: shape for name, shape in tensor_shapes(decoder).items() if name.startswith(LAYER)}
    norms = {f"{name}.weight": (hidden,) for name in (EMBED_NORM, HIDDEN_NORM, NORM)}
    return {f"{FC}.weight": (hidden, 2 * hidden), **norms, **layer}
