"""Rotary embedding: converts the settings of a config to numbers, and makes the tables that kernels read."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastspec.models.families.plan import ModelFamily
from fastspec.models.fields import ConfigFields


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Numbers of the rotary embedding of one type of layer.

    Attributes:
        kind: rope type in the config, for messages.
        inv_freq: inverse frequencies, in radians per position, of the rotated pairs, each exact in fp32. Further pairs,
            up to head_dim / 2, are not rotated.
        scaling: factor on cos and sin.
        long_inv_freq: replaces `inv_freq` in a generator whose max_length exceeds `short_length`. Empty: none.
        short_length: length in tokens that `long_inv_freq` and `query_beta` refer to. 0: neither is used.
        query_beta: b in the factor on queries by position p, 1 + b * log(1 + floor(p / short_length)). 0: no factor.
    """

    kind: str
    inv_freq: tuple[float, ...]
    scaling: float
    long_inv_freq: tuple[float, ...] = ()
    short_length: int = 0
    query_beta: float = 0.0

    def for_length(self, max_length: int) -> RopeSpec:
        """Returns the spec for a generator whose rows have up to `max_length` tokens. Shorter rows use it, too."""
        if not self.long_inv_freq or max_length <= self.short_length:
            return self
        return replace(self, inv_freq=self.long_inv_freq)

    def tables(self, positions: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns cos and sin tables, each fp32 [positions, dim / 2], for heads of `dim` elements."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inv_freq
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        rest = dim // 2 - len(self.inv_freq)
        if rest:
            cos = torch.cat([cos, cos.new_ones(positions, rest)], dim=1)
            sin = torch.cat([sin, sin.new_zeros(positions, rest)], dim=1)
        return cos, sin

    def query_factors(self, positions: int, device: torch.device) -> Tensor | None:
        """Returns the factor on queries at each position, fp32 [positions]. None if queries have no such factor."""
        if not self.query_beta:
            return None
        at = torch.arange(positions, device=device)
        return 1 + self.query_beta * torch.log(1 + torch.floor(at / self.short_length))


def head_order(rotated: int, dim: int, *, interleaved: bool) -> list[int] | None:
    """Returns the order in which the elements of a head are loaded: element i is the one at index order[i] as stored.

    Kernels rotate element i with element i + dim / 2. In this order, the two elements of a stored pair get these
    places. Attention scores are sums over a head, so queries and keys may have any order that they share. Returns None
    if the stored order fits.

    Args:
        rotated: number of rotated pairs. They are the first 2 * rotated stored elements of the head.
        dim: elements of a head.
        interleaved: True if stored pairs are neighbours, 2i and 2i + 1. False if they are i and i + rotated.
    """
    if not interleaved and 2 * rotated == dim:
        return None
    first = [2 * i if interleaved else i for i in range(rotated)]
    second = [2 * i + 1 if interleaved else i + rotated for i in range(rotated)]
    rest = list(range(2 * rotated, dim))
    middle = len(rest) // 2
    return [*first, *rest[:middle], *second, *rest[middle:]]


def ropes_of(fields: ConfigFields, dims: tuple[int, ...], family: ModelFamily) -> tuple[RopeSpec, ...]:
    """Returns the rotary embeddings of a config: one for all layers, or one for each of `family.rope_layers`.

    Args:
        fields: fields of the config.
        dims: elements of a head (head_dim) for each of these embeddings.
        family: family of the model, with the rope types that it supports.

    Raises:
        UnsupportedModel: the config has a rope type or a setting that the family does not support.
    """
    layers = family.rope_layers
    parameters = fields.get("rope_parameters")
    if not isinstance(parameters, dict):
        fields.refuse("rope_parameters", parameters, "an object with rope_theta")
    if not layers:
        if any(isinstance(value, dict) for value in parameters.values()):
            fields.refuse("rope_parameters", parameters, "one setting for all layers")
        return (_rope(fields, parameters, dims[0], family, None),)
    for layer in layers:
        if not isinstance(parameters.get(layer), dict):
            fields.refuse("rope_parameters", parameters, "an object with rope_theta for each of " + ", ".join(layers))
    sizes = zip(layers, dims, strict=True)
    return tuple(_rope(fields, parameters[layer], dim, family, layer) for layer, dim in sizes)


def _rope(
    fields: ConfigFields, parameters: Mapping[str, Any], dim: int, family: ModelFamily, layer: str | None
) -> RopeSpec:
    parameters = {name: value for name, value in parameters.items() if value is not None}  # null counts as absent
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic" and parameters.get("alpha"):
        kind = "ntk_alpha"
    elif kind == "dynamic":  # its frequencies differ only beyond max_position_embeddings, which no row reaches
        fields.check_positive(parameters.get("factor"), "rope_parameters.factor")
        kind = "default"
    if kind not in family.rope_kinds:
        fields.refuse("rope_type", kind, " or ".join(repr(name) for name in family.rope_kinds))
    theta = fields.check_positive(parameters.get("rope_theta"), "rope_theta")
    # a proportional rope has frequencies for all pairs of the head; the last ones are zero
    rotated = dim // 2 if kind == "proportional" else _rotated(fields, parameters, dim, family.partial_rope)
    if kind in ("default", "ntk_alpha"):
        if kind == "ntk_alpha":
            theta *= fields.check_positive(parameters["alpha"], "rope_parameters.alpha") ** (dim / (dim - 2))
        steps = torch.arange(0, 2 * rotated, 2, dtype=torch.float32, device="cpu") / (2 * rotated)
        return RopeSpec(kind, _finite(fields, 1.0 / theta**steps, parameters), 1.0)
    if kind == "proportional":
        return RopeSpec(kind, _proportional(fields, parameters, theta, dim), 1.0)
    made = _transformers_rope(fields, parameters, kind, rotated, layer)
    beta = parameters.get("llama_4_scaling_beta")
    if beta is None:
        return made
    beta = fields.check_positive(beta, "rope_parameters.llama_4_scaling_beta")
    return replace(made, query_beta=beta, short_length=int(parameters["original_max_position_embeddings"]))


def _proportional(fields: ConfigFields, parameters: Mapping[str, Any], theta: float, dim: int) -> tuple[float, ...]:
    """Returns the inverse frequencies of a proportional rope, for all dim / 2 pairs of a head.

    Only the share `partial_rotary_factor` of the pairs rotates. The frequencies of the last pairs are zero.
    """
    share = fields.check_positive(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    factor = fields.check_positive(parameters.get("factor", 1.0), "rope_parameters.factor")
    pairs = int(share * dim // 2)
    if share > 1.0 or not pairs:
        fields.refuse("partial_rotary_factor", share, f"a part of head_dim={dim} elements")
    steps = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu") / dim
    found = torch.zeros(dim // 2, dtype=torch.float32, device="cpu")
    found[:pairs] = 1.0 / theta**steps / factor
    return _finite(fields, found, parameters)


def _rotated(fields: ConfigFields, parameters: Mapping[str, Any], dim: int, may_be_partial: bool) -> int:
    partial = fields.check_positive(parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    if partial != 1.0 and not may_be_partial:
        fields.refuse("partial_rotary_factor", partial, "1.0")
    rotary = int(dim * partial)
    if partial > 1.0 or rotary < 2 or rotary % 2:
        fields.refuse("partial_rotary_factor", partial, f"an even number of head_dim={dim} elements")
    return rotary // 2


def _finite(fields: ConfigFields, inv_freq: Tensor, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    if not bool(inv_freq.isfinite().all()):
        fields.refuse("rope_parameters", dict(parameters), "settings whose frequencies are finite in float32")
    return tuple(inv_freq.tolist())


NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Settings that the config must have as positive numbers, by rope type."""


def _transformers_rope(
    fields: ConfigFields, parameters: Mapping[str, Any], kind: str, rotated: int, layer: str | None
) -> RopeSpec:
    """Returns the numbers of a rotary embedding, computed by transformers' function for its rope type.

    Args:
        fields: fields of the config.
        parameters: settings of the embedding in the config.
        kind: rope type.
        rotated: number of rotated pairs.
        layer: layer type of the embedding. None: all layers have the same settings.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    needed = {name: fields.check_positive(parameters.get(name), f"rope_parameters.{name}") for name in NEEDED[kind]}
    if kind == "llama3" and needed["low_freq_factor"] >= needed["high_freq_factor"]:
        low, high = needed["low_freq_factor"], needed["high_freq_factor"]
        fields.refuse("rope_parameters.low_freq_factor", low, f"less than high_freq_factor={high}")
    length = needed.get("original_max_position_embeddings", 0.0)
    if length != int(length):
        fields.refuse("rope_parameters.original_max_position_embeddings", length, "a whole number")
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            _check_factors(fields, parameters.get(name), name, rotated)

    def computed(**more: Any) -> tuple[tuple[float, ...], float]:
        """Computes and checks (inverse frequencies, factor on cos and sin). `more`: arguments for transformers."""
        config = copy.deepcopy(fields.config)
        try:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer, **more)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            fields.refuse("rope_parameters", dict(parameters), f"settings that transformers can compute ({error})")
        number = isinstance(scaling, int | float) and math.isfinite(scaling) and scaling > 0
        if inv_freq.numel() != rotated or not number:
            fields.refuse("rope_parameters", dict(parameters), f"{rotated} frequencies and a positive scaling")
        return _finite(fields, inv_freq, parameters), float(scaling)

    inv_freq, scaling = computed()
    if kind != "longrope":
        return RopeSpec(kind, inv_freq, scaling)
    return RopeSpec(kind, inv_freq, scaling, computed(seq_len=int(length) + 1)[0], int(length))


def _check_factors(fields: ConfigFields, factors: Any, name: str, rotated: int) -> None:
    if not isinstance(factors, list) or len(factors) != rotated:
        fields.refuse(f"rope_parameters.{name}", factors, f"a list of {rotated} numbers")
    for factor in factors:
        fields.check_positive(factor, f"rope_parameters.{name}")
