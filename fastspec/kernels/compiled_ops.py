"""The ops of a step that torch.compile takes as one graph, and functions that are compiled once for every shape.

Norms, activations, products and the largest logit are the torch definitions of `reference`: the compiler fuses what
stands around a product, and leaves the product to cuBLAS. A layer's attention, from its fused product on, stays the
same kernel: it is registered as `fastspec::attend`, with the cache that it writes declared, so that no graph breaks at
it and no cache is copied. What stands outside of a model's passes is not compiled.

The compiler chooses by shape, and keeps in fp32 what it fuses: a row's bits depend on what runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.shapes import KEY_BLOCK, UNTILED, AttentionRule, Tiling

INDUCTOR = "inductor"
MAX_QUERIES = 17  # a step's passes have no more tokens a row: max_drafts and one


@dataclass(frozen=True, slots=True)
class Work:
    """Work area of one model's attention: the fields of `dispatch.AttendWork`, empty where a kernel needs none."""

    split_keys: int
    counters: Tensor
    partials: Tensor


def _work_of(workspace: Callable[..., Any], device: torch.device, *sizes: Any) -> Work:
    """The part of a workspace that attention needs, as tensors that a graph can be given."""
    work = workspace(device, *sizes)
    if work is None:  # torch's own ops
        return Work(
            0, torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.float32, device=device)
        )
    return Work(work.attend.split_keys, work.attend.counters, work.attend.partials)


@torch.library.custom_op("fastspec::attend", mutates_args=("keys", "values", "counters", "partials"))
def attend_op(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    write_mask: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    counters: Tensor,
    partials: Tensor,
    sizes: Sequence[int],
    factors: Sequence[float],
) -> Tensor:
    """`reference.attend` as an op of torch's; without a bound on positions, which would be compiled in.

    Args:
        sizes: heads, window, keys of a split; a window of 0 is none.
        factors: of scores, softcap, epsilon of the norms; a softcap of 0 is none.
        others: as there, and the tensors of `Work`.

    Elsewhere than on CUDA the bound is read off the positions. The CUDA kernels find the newest one themselves: a
    launch is as wide as the table, whatever the lengths.
    """
    tensors = (qkv, cos, sin, keys, values, block_table, positions, write_mask)
    (num_heads, window, split_keys), (scale, softcap, eps) = sizes, factors
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "norms": None if q_norm is None or k_norm is None else (q_norm, k_norm, eps),
        "rule": AttentionRule(window or None, scale, softcap or None),
        "sinks": sinks,
    }
    if qkv.device.type != "cuda":
        return reference.attend(*tensors, num_blocks=int(positions.amax()) // KEY_BLOCK + 1, **options)
    from fastspec.kernels.attention.dispatch import AttendWork, attend

    num_blocks = -(-block_table.shape[1] * keys.shape[1] // KEY_BLOCK)
    return attend(*tensors, num_blocks=num_blocks, work=AttendWork(split_keys, counters, partials), **options)


@attend_op.register_fake
def _attend_shape(qkv: Tensor, *tensors: Any) -> Tensor:
    keys, (num_heads, _window, _split_keys) = tensors[2], tensors[12]
    return qkv.new_empty(*qkv.shape[:2], num_heads * keys.shape[-1])


def attend(
    *tensors: Tensor | None,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
    num_blocks: int,
    first_block: int = 0,
    rule: AttentionRule,
    sinks: Tensor | None = None,
    work: Work,
    product: Weight | None = None,
    tiling: Tiling = UNTILED,
    kv_scales: None = None,
) -> Tensor:
    """As `reference.attend`, which defines it; bounds on blocks, `product` and `tiling` are ignored.

    Caches in 8 bits are not for these ops: settings refuse them.
    """
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    keys = tensors[3]
    assert keys is not None  # the cache, which is always there
    sizes = [num_heads, rule.window or 0, work.split_keys]
    factors = [rule.factor(keys.shape[-1]), rule.softcap or 0.0, eps]
    out: Tensor = attend_op(*tensors, q_norm, k_norm, sinks, work.counters, work.partials, sizes, factors)
    return out


def compiled(ops: Ops) -> Ops:
    """`ops` as far as it stands outside of models' passes, and what torch.compile can take inside of them.

    Weights stay row-major, and any number of rows is multiplied at once: these ops go with exact=False.
    """
    return replace(
        ops,
        name="compiled",
        weight_format=TORCH_OPS.weight_format,
        keeps_codes=TORCH_OPS.keeps_codes,
        workspace=partial(_work_of, ops.workspace),
        embed=reference.embed,
        norm=reference.norm,
        joined_norms=reference.joined_norms,
        add_norm=reference.add_norm,
        gelu_tanh_mul=reference.gelu_tanh_mul,
        linear=reference.linear,
        layer_tail=reference.layer_tail,
        keeps_experts=TORCH_OPS.keeps_experts,
        joins_shared=TORCH_OPS.joins_shared,
        normed_logits=reference.normed_logits,
        route=reference.route,
        route_normed=reference.route_normed,
        experts=reference.experts,
        experts_normed=reference.experts_normed,
        attend=attend,
        argmax=reference.argmax,
    )


class PerShape:
    """A function of an object and of tensors, compiled as one graph for each set of shapes the tensors come in.

    The first call with new shapes compiles, which takes seconds to minutes; later ones launch. Contents and places of
    tensors do not matter. Recompilations, were there any, count for each set of shapes apart, by torch's own limit.

    Args:
        function: what to compile; a graph break in it is an error. It may read tensors and settings off the object.
        backend: of torch.compile.
    """

    def __init__(self, function: Callable[..., Tensor], backend: str | Callable[..., Any] = INDUCTOR) -> None:
        self._function = function
        self._backend = backend
        self._compiled: dict[Hashable, Callable[..., Tensor]] = {}

    def __call__(self, owner: object, *args: Tensor | int) -> Tensor:
        """Calls the function; whole numbers among the arguments are compiled in."""
        key = tuple((arg.shape, arg.stride()) if isinstance(arg, Tensor) else arg for arg in args)
        if key not in self._compiled:
            own = _with_own_code(self._function)
            self._compiled[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
        return self._compiled[key](owner, *args)


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a function that shares no code object with it: there torch.compile keeps what it compiled.

    Under one code object all shapes of all models would count against one limit, and be tried one after the other in
    every call.
    """
    assert isinstance(function, FunctionType), "only functions have code"
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
