"""The assistant of Gemma 4: its spec, from the config that Google publishes and the tensors beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.config import ModelSpec, spec_from_config
from fastspec.models.fields import ConfigFields
from fastspec.models.heads.checkpoint import sizes_of
from fastspec.models.heads.config import flag, size
from fastspec.models.heads.spec import NORMED, SUPPORTED, HeadSpec, Recognised
from fastspec.models.layer_table import HEAD, layer_shapes

if TYPE_CHECKING:
    from fastspec.models.checkpoints.checkpoint import Checkpoint
    from fastspec.models.checkpoints.tensor_source import TensorInfo

BEFORE: Final = "pre_projection.weight"
AFTER: Final = "post_projection.weight"
CENTROIDS: Final = "masked_embedding.centroids.weight"
ORDER: Final = "masked_embedding.token_ordering"
_EMBED: Final = "embed_tokens.weight"
_FAMILY: Final = "gemma4_text"


@dataclass(frozen=True, slots=True)
class AssistantSpec(HeadSpec):
    """Sizes and arithmetic of an assistant, which has queries only (`Gemma4AssistantForCausalLM` of transformers).

    After a text of n tokens, for drafts j = 0, 1, ..:

        h_0 = the target's hidden state after its final norm at position n - 2
        e = the target's embedding, with its factor, of token n - 1; for j > 0 of draft j - 1
        x = [e h_j] Wbefore^T
        x = layers(x)               q from x at position n - 1, K and V of the target at positions 0 .. n - 2
        logits_j = norm(x) Whead^T
        h_(j+1) = norm(x) Wafter^T

    Each layer reads K and V of the target's last layer of its type that has its own: in a layer with a window those of
    the `window` newest positions. Whead is the assistant's own embedding. With centroids, ids are in C groups of equal
    size, and only those in the `chosen` groups with the largest norm(x) Wcentroids^T have a logit.

    Attributes:
        sources: for each layer, the layer of the target whose keys and values it reads.
        chosen: groups of ids that have logits. 0: all ids have.
    """

    sources: tuple[int, ...]
    chosen: int = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor stored for each row between steps: the target's hidden state at the newest position."""
        return (self.target.hidden_size,)

    @property
    def unused(self) -> tuple[str, ...]:
        """The order of ids by group is read apart, because it has integers."""
        return (ORDER,) if self.chosen else ()


def assistant_spec(
    found: Recognised, raw: Mapping[str, Any], infos: Mapping[str, TensorInfo], target: Checkpoint, where: Path
) -> AssistantSpec:
    """Reads the spec of an assistant.

    Args:
        found: its type.
        raw: content of `config.json`.
        infos: its stored tensors by `plain_name`.
        target: the target, whose keys and values it reads.
        where: the file, for messages.

    Raises:
        CheckpointError: a bad value, or sizes other than the target's.
        UnsupportedModel: the target is not a native Gemma 4, or a setting that is not implemented.
    """
    model = target.spec
    if not isinstance(model, ModelSpec) or model.family != _FAMILY:
        raise UnsupportedModel(
            f"it reads keys and values of a Gemma 4 that runs natively, and {target.name} is "
            f"{'hosted' if model.hosting else model.family}; use it with its own target, or another draft"
        )
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config is {type(text).__name__}, wanted an object")
    decoder, sizes = _decoder(text, where), sizes_of(target)
    if flag(raw, "tie_word_embeddings", True) is False or HEAD in infos:
        raise UnsupportedModel(f"an assistant with an output matrix besides its embedding ({HEAD}); {SUPPORTED}")
    for name, wanted in (("backbone_hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        value = (raw if name == "backbone_hidden_size" else text).get(name)
        if value != wanted:
            raise CheckpointError(
                f"{name}={value!r} in its config, and the target has {wanted}: it is another target's"
            )
    plans, sources = _over(decoder, model)
    chosen, groups = 0, size(raw, "num_centroids", 2048)
    if flag(raw, "use_ordered_embeddings"):
        chosen = size(raw, "centroid_intermediate_top_k", 32)
        if model.vocab_size % groups or chosen > groups:
            raise CheckpointError(
                f"num_centroids={groups} with centroid_intermediate_top_k={chosen} in its config, wanted a divisor of "
                f"vocab_size={model.vocab_size}, and at most as many chosen ones"
            )
    decoder = replace(decoder, plans=plans, dtype=model.dtype, max_length=model.max_length)
    return AssistantSpec(
        found=found,
        decoder=decoder,
        target=sizes,
        readings=((NORMED,),),
        tensors=_tensors(decoder, model.hidden_size, groups if chosen else 0),
        own_embed=True,
        own_head=False,
        tied_head=True,
        sources=sources,
        chosen=chosen,
    )


def _decoder(text: Mapping[str, Any], where: Path) -> ModelSpec:
    """Returns the spec of the assistant's layers, as if each had keys and values of its own."""
    from fastspec.models.config_classes import config_class

    own = {"num_kv_shared_layers": 0, "architectures": None, "model_type": _FAMILY}
    try:
        config = config_class(_FAMILY).from_dict({**text, **own})
    except Exception as error:  # its validation raises errors of several libraries
        raise CheckpointError(f"{where}: not a valid text_config of {_FAMILY}: {error}") from error
    fields = ConfigFields(config, SUPPORTED)
    for name, wanted in (
        ("hidden_size_per_layer_input", 0),
        ("enable_moe_block", False),
        ("use_double_wide_mlp", False),
    ):
        if fields.get(name) not in (None, wanted):
            fields.refuse(name, fields.get(name), f"{wanted} in an assistant")
    return replace(spec_from_config(config), tied=True)


def _over(decoder: ModelSpec, model: ModelSpec) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the plans of layers without keys, and the target's layer of each that has the keys."""
    plans, sources = [], []
    for index, plan in enumerate(decoder.plans):
        own = [at for at in model.caching if (model.plans[at].window is None) == (plan.window is None)]
        if not own:
            raise CheckpointError(f"its layer {index} reads keys of a type of layers that the target does not have")
        lender = model.plans[own[-1]]
        heads, wanted = decoder.heads_of(plan)[1:], model.heads_of(lender)[1:]
        if heads != wanted or plan.window != lender.window:
            raise CheckpointError(
                f"its layer {index} reads (KV heads, head_dim, window) {(*heads, plan.window)}, and layer {own[-1]} of "
                f"the target has {(*wanted, lender.window)}: it is another target's"
            )
        plans.append(replace(plan, shares=own[-1], value_norm=False, value_is_key=False))
        sources.append(own[-1])
    return tuple(plans), tuple(sources)


def _tensors(decoder: ModelSpec, backbone: int, groups: int) -> dict[str, tuple[int, ...]]:
    hidden = decoder.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _EMBED: (decoder.vocab_size, hidden),
        "norm.weight": (hidden,),
        BEFORE: (hidden, 2 * backbone),
        AFTER: (backbone, hidden),
    }
    if groups:
        shapes[CENTROIDS] = (groups, hidden)
    for index in range(decoder.num_layers):
        shapes |= layer_shapes(decoder, index, f"layers.{index}.", hidden)
    return shapes
