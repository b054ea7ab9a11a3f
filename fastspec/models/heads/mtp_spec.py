"""MTP layers (multi-token prediction) in a target's own checkpoint: their spec and their stored tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.parameter_names import RenamedTensors, usual_name
from fastspec.models.checkpoints.quantised.tensors import QuantisedShards
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.config import ModelSpec
from fastspec.models.families import FAMILIES
from fastspec.models.families.plan import LayerPlan
from fastspec.models.heads.checkpoint import HeadCheckpoint, sizes_of
from fastspec.models.heads.mtp_names import (
    EMBED_NORM,
    FC,
    HIDDEN_NORM,
    NORM,
    OUTPUT,
    SECOND_NORM,
    StoredMtp,
    find_mtp,
    part_name,
)
from fastspec.models.heads.some_rows import WithSomeRows, output_rows
from fastspec.models.heads.spec import NORMED, HeadSpec, Recognised
from fastspec.models.layer_table import HEAD, tensor_shapes

if TYPE_CHECKING:
    from fastspec.models.checkpoints.checkpoint import Checkpoint
    from fastspec.models.checkpoints.tensor_source import TensorSource, Use

MTP: Final = "mtp"
"""Value of the argument `draft` that selects the target's own MTP layers as drafter."""


@dataclass(frozen=True, slots=True)
class MtpSpec(HeadSpec):
    """Sizes and arithmetic of one or several MTP layers (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Layer j = 0, 1, .. at position i:

        e = norm(embedding of token i + 1 + j)
        h = norm(s)                        s: the target's hidden state at i after its final norm; for j > 0 the last x
                                           of layer j - 1 at i
        x = [e h] Wfc^T                    with hidden_first [h e]
        x = norm(layer(x))                 a decoder layer, and the final norm of MTP layer j
        logits = x Whead^T                 for token i + 2 + j

    With own_heads, s is the target's hidden state before its final norm, and for j > 0 layer(x) of layer j - 1.

    Layer j makes draft token j. If a step has more draft tokens than layers, the last layer makes the further ones,
    each one position later. There s is the last x of the same layer at the position before.

    The decoder layer has the sizes and the arithmetic of the target's last layer with full attention. If there is none,
    the last layer with a sliding window is used. In Nemotron's layout it also has the experts of the target's last
    layer with experts. The embedding and Whead are the target's. With own_heads each layer has its own Whead. With
    `draft_vocab`, Whead is a separate matrix with some of these rows. All norms have the target's type.

    Attributes:
        hidden_first: True if the hidden state comes before the embedding in the input of Wfc.
        shares_parts: True if all MTP layers have the same Wfc and the same norms outside of their decoder layer.
        own_heads: True if each MTP layer has its own Whead.
    """

    hidden_first: bool = False
    shares_parts: bool = False
    own_heads: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the output matrices: one for each layer with `own_heads`, else that of the first."""
        return tuple(f"{part_name(OUTPUT, index)}.weight" for index in range(self.num_layers if self.own_heads else 1))

    @property
    def uses(self) -> Mapping[str, Use]:
        """See `HeadSpec.uses`."""
        return dict.fromkeys(self.outputs[1:], "head")

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor that is stored for each row between steps.

        With one MTP layer it is the result of `Mtp.absorb` at the newest position. The pass for the first draft
        token continues from it. With several layers it has the target's hidden states at the `computed_again` newest
        positions.
        """
        return (self.computed_again, 1, self.hidden_size) if self.num_layers > 1 else (self.attention_inputs,)

    @property
    def computed_again(self) -> int:
        """Number of a row's newest positions whose K and V the next step computes again; see `Proposer`.

        Layer j reads token i + 1 + j at position i. At the newest positions this is a draft token, which the target may
        reject.
        """
        return self.num_layers - 1

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the number of bytes of the MTP layers' own weights. Matrices have `dtype`, norms may have fp32."""
        sizes = {2: dtype.itemsize, 1: self.decoder.norm_dtype(dtype).itemsize}
        return sum(sizes.get(len(shape), dtype.itemsize) * math.prod(shape) for shape in self.tensors.values())


def mtp_source(checkpoint: HeadCheckpoint) -> TensorSource:
    """Returns the tensors of the MTP layers that `resolve_mtp` found, by the package's names in `StoredMtp.names`.

    With `draft_vocab` they include the chosen rows of the target's output matrix.
    """
    target, spec = checkpoint.source, checkpoint.spec
    assert target is not None, "layers lie in their target's checkpoint"
    assert isinstance(spec, MtpSpec), "as its spec says"
    layer = mtp_tensors(target, spec)
    if checkpoint.vocab_map is None:
        return layer
    places = {name: (layer, name) for name in spec.outputs} if spec.own_heads else {HEAD: output_rows(target)}
    return WithSomeRows(layer, places, checkpoint.vocab_map)


def mtp_tensors(target: Checkpoint, spec: MtpSpec) -> RenamedTensors:
    """Returns the tensors of the MTP layers in a target's directory, by the package's names in `StoredMtp.names`.

    If the target is quantised, each matrix of its MTP layers may be quantised or not.

    Args:
        target: checkpoint of the target.
        spec: spec of its MTP layers.
    """
    assert target.directory is not None, "checked by `resolve_mtp`"
    stored: TensorSource = ShardTensors(target.directory)
    found = mtp_of(target.native, stored.infos().keys())
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
            found = mtp_of(target.native, stored.infos().keys())
            assert found is not None, "a matrix goes under its module's name"
    return RenamedTensors(stored, found.names)


def mtp_of(model: ModelSpec, stored: Collection[str]) -> StoredMtp | None:
    """Returns the MTP layers among the stored tensors of a model's checkpoint. None if there are none.

    `StoredMtp.names` has the names of the table `layer_table.LAYER`, also if the family stores others.
    """
    found, renamed = find_mtp(stored, model.num_layers), FAMILIES[model.family].renamed
    if found is None:
        return None
    return replace(found, names={usual_name(name, renamed): there for name, there in found.names.items()})


def mtp_spec(target: Checkpoint, directory: Path) -> MtpSpec:
    """Makes the spec of the MTP layers in a target's directory.

    Raises:
        CheckpointError: the directory has no MTP layer.
        UnsupportedModel: the target is run by transformers' own module, or an MTP layer has experts and the target has
            none.
    """
    if target.spec.hosting:
        raise UnsupportedModel(
            f"MTP layers run as layers of a native family, and {target.name} is hosted; use a learned drafter, a draft "
            "model, or NGram()"
        )
    sizes, model = sizes_of(target), target.native
    found = mtp_of(model, ShardTensors(directory).infos().keys())
    if found is None:
        raise CheckpointError(
            f"{target.name} has no MTP layer (mtp.*, model.layers.{model.num_layers}.* or model.mtp_layers.*); use a "
            "learned drafter, a draft model, or NGram()"
        )
    plan, own_names = _plan(model), model.own_names
    if found.layout == "nemotron":
        plan, own_names = _with_experts(model, plan), (("post_norm", (SECOND_NORM,)),)
    decoder = replace(model, plans=(plan,) * found.depth, own_names=own_names)
    tensors = _tensors(decoder, found)
    if any(".experts." in name for name in found.names) and not any(".experts." in name for name in tensors):
        raise UnsupportedModel(
            f"the MTP layer of {target.name} is a mixture of experts, and the target's layers are not; use a learned "
            "drafter, a draft model, or NGram()"
        )
    return MtpSpec(
        found=Recognised("mtp", found.layout),
        decoder=decoder,
        target=sizes,
        readings=((sizes.layers if found.own_heads else NORMED,),),
        tensors=tensors,
        own_embed=False,
        own_head=found.own_heads,
        hidden_first=found.hidden_first,
        shares_parts=found.shares_parts,
        own_heads=found.own_heads,
    )


def _plan(model: ModelSpec) -> LayerPlan:
    """Returns the plan of the target's last layer with full attention, or, if it has none, with a sliding window."""
    attending = [model.plans[layer] for layer in model.attending]
    return next((plan for plan in reversed(attending) if plan.window is None), attending[-1])


def _with_experts(model: ModelSpec, plan: LayerPlan) -> LayerPlan:
    """Adds the experts of the model's last layer with experts to `plan`, the plan of a layer with attention only.

    Raises:
        UnsupportedModel: the layer has an MLP already, or the model has no experts.
    """
    experts = [each.experts for each in model.plans if each.experts is not None]
    if plan.feeds or not experts:
        raise UnsupportedModel("an MTP layer in Nemotron's layout belongs to a model whose layers have one part each")
    return replace(plan, feeds=True, experts=experts[-1])


def _tensors(decoder: ModelSpec, found: StoredMtp) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    shapes = {name: shape for name, shape in tensor_shapes(decoder).items() if name.startswith("model.layers.")}
    for index in range(1 if found.shares_parts else decoder.num_layers):
        shapes |= {f"{part_name(name, index)}.weight": (hidden,) for name in (EMBED_NORM, HIDDEN_NORM, NORM)}
        shapes[f"{part_name(FC, index)}.weight"] = (hidden, 2 * hidden)
        if found.own_heads:
            shapes[f"{part_name(OUTPUT, index)}.weight"] = (decoder.vocab_size, hidden)
    return shapes
