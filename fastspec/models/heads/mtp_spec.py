"""MTP layers that lie in their target's checkpoint: found, and checked, before a weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.config import ModelSpec
from fastspec.models.families.plan import LayerPlan
from fastspec.models.heads.boundaries import NORMED
from fastspec.models.heads.checkpoint import HeadCheckpoint, naming, sizes_of
from fastspec.models.heads.mtp_names import EMBED_NORM, FC, HIDDEN_NORM, LAYER, NORM, find_mtp
from fastspec.models.heads.recognise import Recognised
from fastspec.models.heads.spec import HeadSpec
from fastspec.models.heads.tensors import check_head_tensors
from fastspec.models.weights.names import RenamedTensors, Stored
from fastspec.models.weights.quantised.tensors import QuantisedShards
from fastspec.models.weights.shapes import tensor_shapes
from fastspec.models.weights.shards import ShardTensors

if TYPE_CHECKING:
    from fastspec.models.weights.sources import Checkpoint

MTP: Final = "mtp"
"""The draft of a generator that means its target's own MTP layer."""


@dataclass(frozen=True, slots=True)
class MtpSpec(HeadSpec):
    """Sizes and arithmetic of an MTP layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

        e = norm(embedding of the token that follows), h = norm(the target's hidden state behind its final norm)
        x = [e h] Wfc [[h e] with hidden_first]
        x = norm(a layer as the target's last one that attends, of x)
        logits = x Whead; of a drafted position x stands for the hidden state

    Embedding and Whead are the target's. All norms are of the kind that the target has.

    Attributes:
        hidden_first: see above.
    """

    hidden_first: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        """The target's hidden state at a row's newest position."""
        return (self.hidden_size,)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """As of any head; norms may be in fp32."""
        sizes = {2: dtype.itemsize, 1: self.decoder.norm_dtype(dtype).itemsize}
        return sum(sizes.get(len(shape), dtype.itemsize) * math.prod(shape) for shape in self.tensors.values())


def resolve_mtp(target: Checkpoint, revision: str | None, rounded: str | None, asked: object) -> HeadCheckpoint:
    """The MTP layer of a target's checkpoint; nothing is allocated.

    Args:
        target: resolved.
        revision, rounded, asked: draft_revision, draft_quantization and feature_layers of the caller.

    Raises:
        CheckpointError: there is none, or what is stored is not whole.
        UnsupportedModel: the target is hosted, or there are several.
        UnsupportedOption: an option that it has no use for, or a target that is a live module.
    """
    for name, value in (("draft_revision", revision), ("draft_quantization", rounded), ("feature_layers", asked)):
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
        spec = _spec(target, target.directory)
        check_head_tensors(mtp_tensors(target, spec), spec)
    return HeadCheckpoint(f"the MTP layer of {target.name}", spec, target.directory, None, (), source=target)


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
    """That of the last layer that attends, without a window where the model has such a layer."""
    attending = [model.plans[layer] for layer in model.attending]
    return next((plan for plan in reversed(attending) if plan.window is None), attending[-1])


def _tensors(decoder: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    layer = {name: shape for name, shape in tensor_shapes(decoder).items() if name.startswith(LAYER)}
    norms = {f"{name}.weight": (hidden,) for name in (EMBED_NORM, HIDDEN_NORM, NORM)}
    return {f"{FC}.weight": (hidden, 2 * hidden), **norms, **layer}
