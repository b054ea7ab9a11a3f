"""Makes the spec of a Gemma 4 assistant, a small drafter that attends to the target's keys and values."""

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
    """Sizes and arithmetic of an assistant: a drafter whose layers have queries, but no keys and values of their own.

    The class in transformers is `Gemma4AssistantForCausalLM`. After a text of n tokens, for drafts j = 0, 1, ..:

        h_0 = the target's hidden state after its final norm at position n - 2
        e = the target's scaled embedding of token n - 1, or for j > 0 of draft j - 1
        x = [e h_j] Wbefore^T
        x = layers(x)               queries at position n - 1, with the target's K and V at positions 0 .. n - 2
        logits_j = norm(x) Whead^T
        h_(j+1) = norm(x) Wafter^T

    A layer has a sliding window or full attention. It reads K and V of the target's last layer of the same type that
    writes K and V. With a window, it reads those of the `window` newest positions.

    Whead is the assistant's own embedding. An assistant with centroids has its token ids in C groups of equal size. Its
    scores of the groups are norm(x) Wcentroids^T. Only ids in the `chosen` groups with the largest scores get a logit.

    Attributes:
        sources: for each layer of the assistant, the index of the target's layer whose keys and values it reads.
        chosen: number of groups whose ids get a logit. 0: there are no groups, and all ids get a logit.
    """

    sources: tuple[int, ...]
    chosen: int = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the tensor that is stored for each batch row between steps: the target's newest hidden state."""
        return (self.target.hidden_size,)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name of the tensor that lists the ids of each group. It is read separately, because it has integers."""
        return (ORDER,) if self.chosen else ()


def assistant_spec(
    found: Recognised, raw: Mapping[str, Any], infos: Mapping[str, TensorInfo], target: Checkpoint, where: Path
) -> AssistantSpec:
    """Makes the spec of an assistant from its config and the names of its tensors.

    Args:
        found: type and layout of the assistant.
        raw: content of `config.json`.
        infos: properties of its stored tensors, by `plain_name`.
        target: checkpoint of the target, whose keys and values it reads.
        where: path of the config, for messages.

    Raises:
        CheckpointError: a bad value in the config, or sizes that do not match the target's.
        UnsupportedModel: the target is not a Gemma 4 that this package's decoder runs, or a setting is not implemented.
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
    """Makes the spec of the assistant's layers, as if each had its own keys and values. `_over` corrects this.

    Args:
        text: the object `text_config` of its config.
        where: path of the config, for messages.
    """
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
    """Gives each layer of the assistant a layer of the target whose keys and values it reads.

    Args:
        decoder: spec of the assistant's layers, from `_decoder`.
        model: spec of the target.

    Returns:
        (plans of the assistant's layers, without keys and values; for each the index of the target's layer).

    Raises:
        CheckpointError: the target has no layer of this type, or its layer has other KV heads or another window.
    """
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
