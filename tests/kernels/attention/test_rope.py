"""Rotation and K/V append of a prompt chunk: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from tests.helpers.attention import MISREAD, TENSORS, case, copied, norms_of, stored, twin
from tests.helpers.layouts import spread

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.attention.rope import store_heads


def rotated(given: dict[str, Any]) -> Tensor:
    tensors = (given[name] for name in TENSORS)
    return store_heads(reference.HeadsCall(*tensors, num_heads=given["num_heads"], norms=norms_of(given)))


def expected(given: dict[str, Any]) -> Tensor:
    query = given["qkv"].unflatten(-1, (-1, given["keys"].shape[3]))[:, :, : given["num_heads"]]
    if given["q_norm"] is not None:
        query = reference.norm(query, given["q_norm"], given["eps"])
    at = given["positions"].clamp(max=given["cos"].shape[0] - 1)
    return reference.rope(query, given["cos"][at][:, :, None], given["sin"][at][:, :, None])


# the interpreter cuts fp32 off to bf16 where a GPU and torch round
PLACES = [
    *(("cpu", dtype) for dtype in (torch.float32, torch.float16)),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]


@pytest.mark.parametrize(("device", "dtype"), PLACES, ids=str)
@pytest.mark.parametrize("dim", [16, 40, 64, 512])
def test_bits_are_the_twins(dim: int, dtype: torch.dtype, device: str) -> None:
    """Without norms: the same fp32 operations in the same order, rounded once. In every dtype, queries and cache."""
    given = case(device, lengths=[45, 37], queries=37, dim=dim, dtype=dtype, page_size=7)
    given["writes"][0, 5:9] = False
    given["positions"][1, 30:] = 10**6  # beyond every table; such rows do not write
    given["writes"][1, 30:] = False
    same = copied(given)
    assert torch.equal(rotated(given), expected(same))
    twin(same)
    for ours, theirs in zip(stored(given), stored(same), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("device", "dtype"), PLACES, ids=str)
def test_rope_with_norms_of_queries_and_keys_equals_the_definition(device: str, dtype: torch.dtype, wide: bool) -> None:
    """With weights of the heads' dtype, or in fp32, with which a normed value is rounded once."""
    given = case(device, lengths=[40], queries=40, dim=48, dtype=dtype, norm=True)
    if wide:
        given |= {name: given[name].float() * 1.001 for name in ("q_norm", "k_norm")}  # which bf16 does not have
    same = copied(given)
    # torch sums the squares in another order: a last bit of the factor may differ, and with it one rounding each of
    # the normed value, of its product with the weight, and of what is rotated
    bound = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(rotated(given), expected(same), rtol=bound, atol=bound)
    twin(same)
    for ours, theirs in zip(stored(given), stored(same), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3], ids=str)
def test_keys_and_values_without_queries(device: str, dtype: torch.dtype) -> None:
    given = case(device, lengths=[20, 11], queries=5, dtype=dtype, page_size=7)
    given["writes"][0, 3:] = False
    same = copied(given)
    own = given["num_heads"] * given["keys"].shape[3]
    given |= {"qkv": given["qkv"][..., own:].contiguous(), "num_heads": 0}
    assert rotated(given).shape == (2, 5, 0, given["keys"].shape[3])
    twin(same)
    for ours, theirs in zip(stored(given), stored(same), strict=True):
        assert torch.equal(ours, theirs)


NAMES = {"positions": "positions", "writes": "write_mask"}  # of a case, and of the argument
LAYOUT = [(name, spread, f"{told} is .*strides") for name, told in NAMES.items()]


@pytest.mark.parametrize(("name", "change", "match"), [*MISREAD, *LAYOUT])
def test_what_would_be_misread_is_refused(name: str, change: Callable[[Any], Any], match: str) -> None:
    given = case("cpu", lengths=[9, 7], queries=3, norm=True)
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=match):
        rotated(given)
