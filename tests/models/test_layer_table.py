"""The table of a layer's tensors names every field once, and ranks read every tensor whole between them."""

from __future__ import annotations

from dataclasses import fields
from inspect import isfunction

import pytest

from fastspec.distributed.slices import divides, share_of
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.models.checkpoints.tensor_source import TensorSource, WrappedSource
from fastspec.models.config import ModelSpec, spec_from_config
from fastspec.models.families import FAMILIES
from fastspec.models.layer_table import (
    LAYER,
    BlockWeights,
    LatentWeights,
    LayerWeights,
    StateWeights,
    slices_of,
    tensor_shapes,
)
from tests.helpers import families, hybrid

KDA = ("kimi_linear", "ling")
PARTS = {"state": StateWeights, "latent": LatentWeights, "experts": ExpertWeights, "block": BlockWeights}
NOT_STORED = {"experts.joined"}  # says how the others are stored


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    wanted = {each.name for each in fields(LayerWeights)} - PARTS.keys()
    wanted |= {f"{part}.{each.name}" for part, kind in PARTS.items() for each in fields(kind)} - NOT_STORED
    places = {row.place for row in LAYER} | {row.apart for row in LAYER if row.apart}
    biases = {f"{row.place}_bias" for row in LAYER} & wanted
    assert places | biases == wanted


def test_names_of_rows_are_there_once() -> None:
    names = [row.name for row in LAYER]
    assert len(names) == len(set(names))
    assert {row.joins for row in LAYER if row.joins} <= set(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_renames_rows_of_the_table(family: str) -> None:
    assert FAMILIES[family].names.keys() <= {row.name for row in LAYER}


def _spec(name: str) -> ModelSpec:
    return spec_from_config((families if name in families.FAMILIES else hybrid).config_of(name))


@pytest.mark.parametrize("name", [*families.FAMILIES, *hybrid.KINDS, "lfm2_moe", "lfm3", "granite4", "bamba", *KDA])
def test_ranks_read_every_row_and_column_once(name: str) -> None:
    spec = _spec(name)
    assert divides(spec, 2)
    read = [slices_of(spec, share_of(spec, rank, 2, one_tree=False)) for rank in range(2)]
    assert read[0].keys() == read[1].keys()
    shapes = tensor_shapes(spec)
    for tensor in read[0]:
        shape = shapes[tensor]
        slices = [each[tensor] for each in read]
        if slices[0].columns is None:
            rows = [row for each in slices for cut in each.rows for row in range(*cut)]
            assert sorted(rows) == list(range(shape[0])), tensor
        else:
            columns = [column for each in slices if each.columns for column in range(*each.columns)]
            assert columns == list(range(shape[1])), tensor
            assert all(each.rows == ((0, shape[0]),) for each in slices)


def test_a_wrapper_passes_on_all_that_a_source_has() -> None:
    asked = {name for name, value in vars(TensorSource).items() if isfunction(value) and not name.startswith("_")}
    assert asked == {name for name, value in vars(WrappedSource).items() if isfunction(value) and name[0] != "_"}
