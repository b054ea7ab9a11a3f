"""Finds the layers of a model that launch the same kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from fastspec.kernels.common.weights import Weight
from fastspec.models.families.plan import LayerPlan

if TYPE_CHECKING:
    from fastspec.models.layer_table import LayerWeights


def one_of_each(plans: Sequence[LayerPlan], layers: Sequence[LayerWeights]) -> list[int]:
    """Returns indices of layers that together launch all kernels of the model: the first of each kind, and the last.

    Two layers are of one kind if their plans and matrix formats are equal, and those of the layers after them are also
    equal. The next layer counts because a layer also computes the first matrix product of the next one. If some layers
    are recurrent, or have only attention or only an MLP, all layers are returned. The tensors between such layers
    differ in size.
    """
    count = len(layers)
    if any(plan.state is not None or not (plan.attends and plan.feeds) for plan in plans):
        return list(range(count))
    kinds = [(plan, *_stored(layer)) for plan, layer in zip(plans, layers, strict=True)]
    pairs = list(zip(kinds, [*kinds[1:], None], strict=True))
    return [index for index, pair in enumerate(pairs) if pairs.index(pair) == index]


def _stored(layer: LayerWeights) -> Iterator[object]:
    for field in fields(layer):
        value = getattr(layer, field.name)
        yield (value.format, tuple(value.shape)) if isinstance(value, Weight) else value is not None
