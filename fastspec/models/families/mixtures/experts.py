"""Reads and checks the config fields of a mixture of experts, for all families that have one.

A field out of range raises CheckpointError or UnsupportedModel, as `ConfigFields` does.
"""

from __future__ import annotations

from typing import Final

from fastspec.models.fields import SIZE_LIMITS, ConfigFields

MAX_EXPERTS: Final = 1024  # experts of a layer; published models have up to 512
MAX_CHOSEN: Final = 32  # experts of a token


def counts(fields: ConfigFields, count: str = "num_experts") -> tuple[int, int]:
    """Returns (number of experts of a layer, number of experts that are chosen for a token).

    `count` is the config field with the number of experts of a layer.
    """
    experts = fields.count(count, MAX_EXPERTS)
    chosen = fields.count("num_experts_per_tok", MAX_CHOSEN)
    if chosen > experts:
        fields.refuse("num_experts_per_tok", chosen, f"at most {count}={experts}")
    return experts, chosen


def width(fields: ConfigFields, field: str) -> int:
    """Returns the intermediate size of an expert, from the config field `field`."""
    return fields.count(field, SIZE_LIMITS["intermediate_size"])


def sparse_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Returns one bool per layer, True if the layer has experts. Reads `decoder_sparse_step` and `mlp_only_layers`.

    `layers` is the number of layers.
    """
    step = fields.count("decoder_sparse_step", SIZE_LIMITS["num_hidden_layers"])
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or any(type(each) is not int for each in dense):
        fields.refuse("mlp_only_layers", dense, "a list of numbers of layers")
    return tuple(at not in dense and (at + 1) % step == 0 for at in range(layers))
