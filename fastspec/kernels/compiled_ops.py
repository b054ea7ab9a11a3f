"""Ops for models whose forward pass torch.compile compiles as one graph; `PerShape` compiles a function per shape.

Norms, activations, matrix products and the argmax of logits are the torch definitions of `reference`. The compiler
fuses the operations around a matrix product, and calls cuBLAS for the product. Attention is one kernel, registered as
the custom op `fastspec::attend`. That op declares which tensors it writes. So it causes no graph break, and the KV
cache is not copied. Ops outside of a model's forward pass are not compiled.

The compiler chooses kernels by shape, and fuses in fp32. So a row's bits depend on the number of rows in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels import reference
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import AttendCall
from fastspec.shapes import KEY_BLOCK, AttentionRule

INDUCTOR = "inductor"
MAX_QUERIES = 17  # largest number of tokens of a row in a step's pass: max_drafts + 1
# ops that are not part of a compiled forward pass
OUTSIDE = (
    *("feed_rows", "verify_commit", "sampled_commit", "sampled_draw", "processed_logits", "commit", "publish"),
    "record_logprobs",
    *("rotate", "store_heads", "delta_rule", "gated_norm", "gated"),
    *("short_conv", "mamba", "mamba_norm", "selective_conv", "selective_scan"),
    *("pack_rounded", "workspace_bytes", "commit_scratch", "sampled_work", "sampled_work_bytes"),
    *("record_work", "record_work_bytes", "compiling", "compiling_behind", "is_brief"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Scratch memory for the attention kernels of one model, see `attend_work`.

    If torch computes attention without these kernels, `split_keys` is 0 and the tensors are empty.

    Attributes:
        split_keys: number of keys of a split, the range of a row's keys that one CTA reads (split-KV).
        counters: int32 [N], zero between launches: for each query tile, the number of CTAs that have finished.
        partials: fp32 [M], attention outputs of splits before they are combined, see `WorkArea`.
    """

    split_keys: int
    counters: Tensor
    partials: Tensor


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
    """Computes a layer's attention over its paged KV cache, as a torch op with the results of `reference.attend`.

    `AttendCall.num_blocks` is not an argument, because torch.compile would keep it as a constant of the graph. On CUDA
    a launch covers the whole block table, and the kernels read the newest position from `positions`. On other devices
    this function reads the newest position.

    Args:
        sizes: number of query heads, window in tokens (0: no window), and `Work.split_keys`.
        factors: scale of scores, softcap (0: no softcap), and epsilon of the norms of query and key heads.
        q_norm, k_norm: weights of these norms. None: heads are not normed.
        others: see the attributes of `AttendCall` and of `Work` with these names.

    Returns:
        [B, Q, H * D].
    """
    (num_heads, window, split_keys), (scale, softcap, eps) = sizes, factors
    on_cuda = qkv.device.type == "cuda"
    last = block_table.shape[1] * keys.shape[1] - 1 if on_cuda else int(positions.amax())
    call = AttendCall(
        qkv, cos, sin, keys, values, block_table, positions, write_mask,
        num_heads=num_heads,
        norms=None if q_norm is None or k_norm is None else (q_norm, k_norm, eps),
        num_blocks=last // KEY_BLOCK + 1,
        rule=AttentionRule(window or None, scale, softcap or None),
        sinks=sinks,
    )  # fmt: skip
    if not on_cuda:
        return reference.attend(call)
    from fastspec.kernels.attention.dispatch import AttendWork, attend

    return attend(call, AttendWork(split_keys, counters, partials))


@attend_op.register_fake
def _attend_shape(qkv: Tensor, *tensors: Any) -> Tensor:
    keys, (num_heads, _window, _split_keys) = tensors[2], tensors[12]
    return qkv.new_empty(*qkv.shape[:2], num_heads * keys.shape[-1])


class CompiledOps(Ops):
    """Ops in plain torch for forward passes that torch.compile compiles. `outside` provides all other ops.

    Weights stay row-major. A matrix product is one library call for any number of rows, so its bits depend on that
    number. These ops therefore require exact=False.

    Args:
        outside: ops for everything that is not part of a model's forward pass.
    """

    name = "compiled"

    def __init__(self, outside: Ops) -> None:
        self._outside = outside
        for op in OUTSIDE:
            setattr(self, op, getattr(outside, op))

    @override
    def workspace(
        self, device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
    ) -> Work:
        on_cuda = device.type == "cuda"
        work = self._outside.workspace(device, batch, max_queries, max_positions, heads) if on_cuda else None
        if work is None:  # torch's own ops need no work area
            none = torch.empty(0, dtype=torch.int32, device=device)
            return Work(0, none, torch.empty(0, dtype=torch.float32, device=device))
        return Work(work.attend.split_keys, work.attend.counters, work.attend.partials)

    @staticmethod
    @override
    def attend(call: AttendCall, work: Any = None) -> Tensor:
        """Computes a layer's attention as `Ops.attend`, by the custom torch op `attend_op`.

        `call.num_blocks` is not read, because `attend_op` finds the number of key blocks itself. `call.kv_scales` is
        not read, because the generator's settings refuse an 8-bit KV cache with these ops.

        Args:
            call: tensors and options of the attention.
            work: the `Work` that `workspace` returned.
        """
        q_norm, k_norm, eps = (None, None, 0.0) if call.norms is None else call.norms
        sizes = [call.num_heads, call.rule.window or 0, work.split_keys]
        factors = [call.rule.factor(call.keys.shape[-1]), call.rule.softcap or 0.0, eps]
        out: Tensor = attend_op(
            call.qkv, call.cos, call.sin, call.keys, call.values, call.block_table, call.positions, call.write_mask,
            q_norm, k_norm, call.sinks, work.counters, work.partials, sizes, factors,
        )  # fmt: skip
        return out


class PerShape:
    """Compiles a function with torch.compile: one graph for each set of shapes and strides of its tensor arguments.

    The first call with new shapes compiles, which takes seconds to minutes. Later calls with these shapes run the
    compiled graph, for any contents and addresses of the tensors. Torch's limit of recompilations applies to each set
    of shapes separately.

    Args:
        function: the function to compile. Its first argument is an object whose attributes it may read. The others are
            tensors and integers. A graph break in it is an error.
        backend: backend of torch.compile.
    """

    def __init__(self, function: Callable[..., Tensor], backend: str | Callable[..., Any] = INDUCTOR) -> None:
        self._function = function
        self._backend = backend
        self._compiled: dict[Hashable, Callable[..., Tensor]] = {}

    def __call__(self, owner: object, *args: Tensor | int) -> Tensor:
        """Returns the function's result for the object `owner` and `args`. Compiles it first for new shapes.

        Integers in `args` are constants of the graph, so each value has its own graph.
        """
        key = tuple((arg.shape, arg.stride()) if isinstance(arg, Tensor) else arg for arg in args)
        if key not in self._compiled:
            own = _with_own_code(self._function)
            self._compiled[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend)
        return self._compiled[key](owner, *args)


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a copy of a function with its own code object, because torch.compile caches graphs per code object.

    With one shared code object, the graphs of all shapes and models would count against one limit of recompilations.
    Every call would also check the guards of these graphs one after the other.
    """
    assert isinstance(function, FunctionType), "only functions have code"
    code, defaults = function.__code__.replace(), function.__defaults__
    return FunctionType(code, function.__globals__, function.__name__, defaults)
