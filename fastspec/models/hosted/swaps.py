"""Modules and functions of this package that replace those of transformers in hosted models.

Linear layers, embeddings, norms and RoPE run with this package's ops. A norm is recognised by its results, a RoPE
function by its name and its results. An attribute of each attention module has the object that computes the module's
calls, see `attach`. So there is no global state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastspec.distributed.exchange import Exchange, tree_sum
from fastspec.errors import UnsupportedModel
from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.shapes import Tiling

ATTENTION: Final = "fastspec"  # names under which the attention functions are registered in transformers

PROBED: Final = "fastspec_probe"

_PASS: Final = "fastspec_pass"


class HostedPass(Protocol):
    """Object that computes or records the attention calls of a hosted model's forward passes."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Computes one attention call.

        Args:
            module: attention module that makes the call.
            query: [B, H, Q, D].
            key: [B, Hkv, Q, D].
            value: [B, Hkv, Q, Dv].
            mask: attention mask that transformers made.
            options: other arguments of the call.

        Returns:
            [B, Q, H, Dv].
        """


def attach(module: nn.Module, owner: HostedPass) -> None:
    """Makes `owner` compute the attention calls of `module` and its submodules. The caller must keep `owner` alive."""
    for part in module.modules():
        part.__dict__[_PASS] = proxy(owner)


def pass_of(module: nn.Module) -> Any:
    """Returns the object that computes the attention calls of this module, see `attach`."""
    return module.__dict__[_PASS]


def register() -> None:
    """Registers this package's attention function in transformers, under two names.

    `probe` uses the name `PROBED`, for which transformers also makes masks. Passes use `ATTENTION` and need no masks.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (ATTENTION, PROBED):
        ALL_ATTENTION_FUNCTIONS.register(name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _probe_mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return pass_of(module).attend(module, query, key, value, attention_mask, options), None


def _probe_mask(*, q_length: int, mask_function: Any = None, device: Any = "cpu", **_: Any) -> Tensor:
    mask = torch.zeros(1, 1, q_length, q_length, dtype=torch.bool, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]  # lost if the model changes the mask
    return mask


class NoCache:
    """Replaces a Cache of transformers and stores nothing. New keys and values are passed on to attention."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def update(self, key: Tensor, value: Tensor, layer_idx: int = 0, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the given keys and values unchanged. They belong to the tokens of the current pass."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0 as number of cached tokens. Positions are passed explicitly, so no model needs the real number."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns 0 as position of the first query, for the masks of `probe`."""
        return 0

    def get_mask_sizes(self, queries: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns (number of keys, position of the first key) for masks of `probe`. `queries`: tokens of the pass."""
        return queries, 0

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(f"it asks its cache for {name!r}: it keeps state other than keys and values")


EXPERTS: Final = "fastspec_fixed"

# attributes of expert modules in all releases of transformers 5
_EXPERTS_HAVE: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated")

UP: Final = ("gate_up_proj", "up_proj")
# parameters of a module of experts; their first axis is the expert
STACKS: Final = (*UP, "down_proj", *(f"{name}_bias" for name in UP), "down_proj_bias")
# attribute of a module of experts that ranks share: number of this rank's parts, the first axis of all STACKS
PARTS: Final = "fastspec_parts"

STEP_QUERIES: Final = 17  # a pass with more query tokens is a prompt

_PAIRS: Final = 8  # number of (token, expert) pairs in one batched product of a step

_ROWS: Final = 64  # least number of rows of a reduction on CUDA: with fewer, torch splits the reduction differently


class Running(Protocol):
    """State of the current forward pass. Modules of this package in a hosted model read it.

    Attributes:
        ops: implementations of the replaced operations.
        exchange: communication between ranks.
        tiling: tile sizes of products.
        queries: tokens per row of the pass.
        inside: True while an op of this package runs.
        constants: tensors on the device that `constant_on_device` has made.
    """

    ops: Ops
    exchange: Exchange
    tiling: Tiling
    queries: int
    inside: bool
    constants: dict[Any, Tensor]


@contextmanager
def our_op(running: Running) -> Iterator[None]:
    """Context manager around an op of this package. Within it, `FixedShapes` does not replace torch functions."""
    running.inside = True
    try:
        yield
    finally:
        running.inside = False


class Product(nn.Module):
    """Linear layer y = x W^T + b that runs with an op of this package. Replaces an nn.Linear or a Conv1D.

    Args:
        running: the hosted model.
        weight: W [N, K].
        bias: b [N]. None: no bias.
        out_dtype: dtype of y. None: the dtype of x.
    """

    _running: Running

    def __init__(self, running: Running, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        super().__init__()
        self._running = proxy(running)  # a weak reference, because `running` owns this module
        self.weight, self.out_dtype = weight, out_dtype
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Computes y [..., N] for x [..., K]."""
        running = self._running
        with our_op(running):
            bias, tiling = self.bias, running.tiling
            out: Tensor = running.ops.linear(x.contiguous(), self.weight, bias, tiling, out_dtype=self.out_dtype)
        return out


class Embedding(nn.Module):
    """Embedding that runs with an op of this package. Replaces an nn.Embedding.

    Args:
        running: the hosted model.
        weight: [V, K], one row for each id.
    """

    _running: Running

    def __init__(self, running: Running, weight: Weight) -> None:
        super().__init__()
        self._running = proxy(running)  # a weak reference, because `running` owns this module
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of `ids`, int64 [...]. Returns [..., K]."""
        out: Tensor = self._running.ops.embed(self.weight, ids.contiguous())
        return out


class FixedShapes(TorchFunctionMode):
    """Replaces torch functions that modules of transformers call, while it is active.

    If `tiling.rows` is set, matrix products and reductions get shapes that do not depend on the number of rows. So a
    row has the same bits in every pass.

    Copies from the host to the device are replaced, because a CUDA graph cannot capture them. A single number is
    written by a kernel instead. Other values are copied once and stay on the device. They are the same in every pass,
    because no pass reads data of the device on the host.

    Args:
        running: the hosted model.
    """

    def __init__(self, running: Running) -> None:
        self._running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        running = self._running
        if func in _PUT:
            if (number := number_on_device(*args, **kwargs)) is not None:
                return number
            if (constant := constant_on_device(running.constants, func, *args, **kwargs)) is not None:
                return constant
        if running.inside or running.tiling.rows is None:
            return func(*args, **kwargs)
        if func is F.linear:
            return _linear(running.tiling, *args, **kwargs)
        if func in _REDUCTIONS and _over_last(args, kwargs) and args[0].is_cuda:
            return padded_reduction(func, *args, **kwargs)
        if func in _CURVED and args and isinstance(args[0], Tensor) and not args[0].is_cuda:
            return padded_elements(func, *args, **kwargs)
        return func(*args, **kwargs)


_PUT: Final = (torch.tensor, Tensor.to)

_MOST_KEPT: Final = 1 << 16  # largest constant that stays on the device, in bytes; larger ones are copied each time


def number_on_device(given: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Computes torch.tensor or Tensor.to for one number that goes from the host to a device, without a copy.

    Args:
        given: first argument of the call.
        *args, **kwargs: other arguments of the call.

    Returns:
        The result on the device. None if the call does not bring one number from the host to a device.
    """
    inside = isinstance(given, Tensor)
    if given.dim() or given.device.type != "cpu" if inside else not isinstance(given, bool | int | float):
        return None
    told = (*args, *kwargs.values())
    device = next((torch.device(each) for each in told if isinstance(each, str | torch.device)), None)
    if device is None or device.type == "cpu":
        return None
    dtype = next((each for each in told if isinstance(each, torch.dtype)), given.dtype if inside else None)
    return torch.full((), given.item() if inside else given, dtype=dtype, device=device)


def constant_on_device(kept: dict[Any, Tensor], func: Any, given: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Computes torch.tensor or Tensor.to for values that go from the host to a device.

    Equal values are copied to the device once.

    Args:
        kept: (device, dtype, shape, bytes) -> earlier result on the device. New results are added.
        func: torch.tensor or Tensor.to.
        given: first argument of the call.
        *args, **kwargs: other arguments of the call.

    Returns:
        A clone of the tensor in `kept`. None if the call is not such a copy, or if it copies too many values.
    """
    told = (*args, *kwargs.values())
    device = next((torch.device(each) for each in told if isinstance(each, str | torch.device)), None)
    if device is None or device.type == "cpu" or (isinstance(given, Tensor) and given.device.type != "cpu"):
        return None
    dtype = next((each for each in told if isinstance(each, torch.dtype)), None)
    made = given if isinstance(given, Tensor) else torch.tensor(given, dtype=dtype, device="cpu")
    made = made.to(dtype or made.dtype)
    if made.requires_grad or made.nbytes > _MOST_KEPT:
        return None
    key = device, made.dtype, tuple(made.shape), made.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if key not in kept:
        kept[key] = func(made, device=device) if func is Tensor.to else torch.tensor(given, dtype=dtype, device=device)
    return kept[key].clone()


_REDUCTIONS: Final = (Tensor.mean, torch.mean, Tensor.sum, torch.sum, Tensor.var, torch.var)


# elementwise functions that torch computes on a CPU in vectors, with another rounding for the last few elements of a
# tensor
_CURVED: Final = (
    *(F.silu, F.gelu, F.softplus, F.mish, F.logsigmoid, F.tanh, F.sigmoid, F.elu),
    *(torch.sigmoid, torch.tanh, torch.exp, torch.erf, torch.log, torch.sin, torch.cos),
    *(Tensor.sigmoid, Tensor.tanh, Tensor.exp, Tensor.erf, Tensor.log, Tensor.sin, Tensor.cos),
)

_VECTORS: Final = 64  # elements; a multiple of the vector size of any CPU


def padded_elements(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes an elementwise function of x [..., K] on a CPU, so that bits do not depend on the number of rows.

    The last axis is padded to whole SIMD vectors. torch computes the last elements of a tensor that do not fill a
    vector with other code, which may give other bits.

    Args:
        func: the function.
        x: the input.
        *args, **kwargs: other arguments of the function.
    """
    width = x.shape[-1] if x.dim() else 0
    if x.dim() < 2 or width % _VECTORS == 0:
        return _tensor(func(x, *args, **kwargs))
    return _tensor(func(F.pad(x, (0, -width % _VECTORS)), *args, **kwargs)[..., :width])


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _linear(tiling: Tiling, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return reference.linear(x, Weight(weight), bias, tiling)


def _over_last(args: Any, kwargs: Any) -> bool:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return bool(isinstance(args[0], Tensor) and args[0].dim() > 1 and dims in ((-1,), (args[0].dim() - 1,)))


def padded_reduction(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes a reduction over the last axis of x [..., K], so that bits do not depend on the number of rows.

    The number of rows is padded to a multiple of `_ROWS`.

    Args:
        func: the reduction, such as torch.sum.
        x: the input.
        *args, **kwargs: other arguments of the reduction.
    """
    flat = x.reshape(-1, x.shape[-1])
    dim = args[:1] and (-1,)
    if "dim" in kwargs:
        kwargs["dim"] = -1
    out: Tensor = func(F.pad(flat, (0, 0, 0, -len(flat) % _ROWS)), *dim, *args[1:], **kwargs)
    return out[: len(flat)].reshape(*x.shape[:-1], *out.shape[1:])


def is_product(part: nn.Module) -> bool:
    """True if a module is an nn.Linear or a Conv1D. False for a subclass, because it may compute something else."""
    from transformers.pytorch_utils import Conv1D

    return type(part) in (nn.Linear, Conv1D)


def expert_layers(module: nn.Module) -> list[str]:
    """Returns the names of the submodules that run experts through transformers' ExpertsInterface."""
    return [name for name, part in module.named_modules() if all(hasattr(part, mark) for mark in _EXPERTS_HAVE)]


def use_fixed_experts(module: Any) -> None:
    """Makes all submodules with experts run `fixed_experts`, whose shapes do not depend on data."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if expert_layers(module):
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, fixed_experts)
        module.set_experts_implementation(EXPERTS)


def fixed_experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Computes the weighted sum of each token's experts with static shapes. Implements transformers' ExpertsInterface.

    A decode step multiplies a fixed number of (token, expert) pairs at a time. In a prefill, all tokens go through
    every expert. If ranks share the experts, the sums of all ranks are added.

    Args:
        self: the module of experts.
        hidden: [T, hidden], the tokens.
        index: [T, k], ids of the k experts of each token.
        weights: [T, k], factors on the outputs of these experts.

    Returns:
        [T, hidden] in the dtype of `hidden`.
    """
    running = pass_of(self)
    chosen = _every_expert if running.queries > STEP_QUERIES else _chosen_experts
    parts = self.__dict__.get(PARTS)
    if parts is None:
        return chosen(self, hidden, index, weights).to(hidden.dtype)
    partial = [chosen(_Part(self, part), hidden, index, weights) for part in range(parts)]
    with our_op(running):
        summed: Tensor = running.exchange.sum(tree_sum(partial).contiguous())
    return summed.to(hidden.dtype)


class _Part:
    """One of this rank's parts of a module of experts. A part has some columns of every expert.

    A parameter [parts, experts, ...] of the module is [experts, ...] here. Other attributes are read from the module.

    Args:
        experts: the module.
        part: index of the part.
    """

    def __init__(self, experts: Any, part: int) -> None:
        self._experts, self._index = experts, part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value[self._index] if name in STACKS else value


def _chosen_experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Computes `fixed_experts` for a decode step, `_PAIRS` (token, expert) pairs at a time. Sums are fp32."""
    pairs = hidden.repeat_interleave(index.shape[1], dim=0)
    rows = F.pad(pairs, (0, 0, 0, -len(pairs) % _PAIRS)).split(_PAIRS)
    chosen = F.pad(index.reshape(-1), (0, -len(pairs) % _PAIRS)).split(_PAIRS)
    parts = [_pairs(self, x, expert) for x, expert in zip(rows, chosen, strict=True)]
    out = torch.cat(parts)[: len(pairs)] * weights.reshape(-1, 1)
    summed = out.view(*index.shape, -1).cumsum(1, dtype=torch.float32)  # cumsum adds in the order of k for any shape
    return summed[:, -1]


def _pairs(self: Any, x: Tensor, expert: Tensor) -> Tensor:
    """Computes expert MLPs, [P, hidden]: row i of x [P, hidden] goes through the expert with id `expert[i]`."""

    def product(x: Tensor, stack: Tensor, bias: Tensor | None) -> Tensor:
        chosen = stack[expert]
        out = torch.bmm(x[:, None], chosen)[:, 0] if self.is_transposed else torch.bmm(chosen, x[..., None])[..., 0]
        return out if bias is None else out + bias[expert]

    return _expert(self, x, product)


def _every_expert(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Computes `fixed_experts` for a prefill. Runs every expert on all tokens, and drops unused results.

    Sums are fp32.
    """
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(self.down_proj.shape[0]):

        def product(x: Tensor, stack: Tensor, bias: Tensor | None, expert: int = expert) -> Tensor:
            weight = stack[expert].t() if self.is_transposed else stack[expert]
            return F.linear(x, weight, None if bias is None else bias[expert])

        chosen = index == expert
        factor = torch.where(chosen, weights, 0.0).sum(-1, keepdim=True)
        y = _expert(self, hidden, product) * factor
        out = out + torch.where(chosen.any(-1, keepdim=True), y, 0.0)
    return out


def _expert(self: Any, x: Tensor, product: Any) -> Tensor:
    """Computes the MLP of experts as transformers does: gate and up projections, activation, down projection.

    Args:
        self: the module of experts.
        x: [rows, hidden].
        product: function of (x, weights of all experts, biases of all experts or None). It multiplies each row of x
            with the weights of the row's expert.
    """
    up = "gate_up_proj" if self.has_gate else "up_proj"
    y = product(x, getattr(self, up), getattr(self, f"{up}_bias") if self.has_bias else None)
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y = product(y, self.down_proj, self.down_proj_bias if self.has_bias else None)
    out: Tensor = self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y
    return out


Form = Literal["rounded", "wide", "plus_one"]

FORMS: Final[tuple[Form, ...]] = ("rounded", "wide", "plus_one")

_SCALES: Final = (1.0, 0.001, 40.0, 1e-5)  # factors of test inputs; the smallest shows the effect of epsilon


class KnownNorm(NamedTuple):
    """Formula of an RMSNorm whose weight is w.

    Attributes:
        form: "rounded" rounds x / rms(x) to the dtype of x before it is multiplied by w, as Llama does. "wide" rounds
            only the product, as Helium does. "plus_one" multiplies by 1 + w and rounds the product, as Gemma does.
        eps: epsilon.
    """

    form: Form
    eps: float

    def weight(self, stored: Tensor) -> Tensor:
        """Converts the module's stored weight [K] to the weight with which `Ops.norm` computes this formula."""
        if self.form == "rounded":
            return stored
        return stored.float() if self.form == "wide" else 1.0 + stored.float()


class NormSwap(nn.Module):
    """Norm x / sqrt(mean(x^2) + eps) * weight that runs with an op of this package. Replaces an RMSNorm.

    Args:
        running: the hosted model.
        known: formula of the replaced module.
        stored: [K], weight of the replaced module.
    """

    _running: Running

    def __init__(self, running: Running, known: KnownNorm, stored: Tensor) -> None:
        super().__init__()
        self._running = proxy(running)  # a weak reference, because `running` owns this module
        self.eps = known.eps
        self.weight: Tensor
        self.register_buffer("weight", known.weight(stored))

    def forward(self, x: Tensor) -> Tensor:
        """Computes the RMSNorm of x over the last axis, [..., K] as x."""
        with our_op(self._running):
            out: Tensor = self._running.ops.norm(x, self.weight, self.eps)
        return out


def known_norm(part: nn.Module) -> KnownNorm | None:
    """Returns the formula of an RMSNorm over the last axis. Returns None if `part` is another kind of module.

    The module must have a weight [K] and nothing else. For test inputs in bf16 and in fp32, its results must have the
    same bits as one of the formulas.
    """
    names = [name for name, _ in part.named_parameters()]
    if names != ["weight"] or any(True for _ in part.children()) or any(True for _ in part.buffers()):
        return None
    (weight,) = part.parameters()
    if weight.dim() != 1:
        return None
    cpu = torch.device("cpu")
    width, generator = len(weight), torch.Generator(cpu).manual_seed(0)
    stored = torch.randn(width, generator=generator, dtype=torch.float32, device=cpu)
    scales = torch.tensor(_SCALES, dtype=torch.float32, device=cpu)[:, None, None]
    x = torch.randn(len(_SCALES), 2, width, generator=generator, dtype=torch.float32, device=cpu) * scales
    numbers = {value for value in vars(part).values() if isinstance(value, float) and 0 < value < 1}
    for known in (KnownNorm(form, eps) for eps in sorted(numbers) for form in FORMS):
        if all(_computes(part, known, x.to(dtype), stored.to(dtype)) for dtype in (torch.bfloat16, torch.float32)):
            return known
    return None


class KnownNorms:
    """Finds the formulas of RMSNorms, see `known_norm`. Tests one module for each class, size and settings."""

    def __init__(self) -> None:
        self._tried: dict[Hashable, KnownNorm | None] = {}

    def of(self, part: nn.Module) -> KnownNorm | None:
        """Returns the formula of an RMSNorm. Returns None if `part` is another kind of module."""
        shapes = [parameter.shape for parameter in part.parameters()]
        if len(shapes) != 1 or len(shapes[0]) != 1 or any(True for _ in part.children()):
            return None
        settings = sorted((name, value) for name, value in vars(part).items() if isinstance(value, (int, float, str)))
        key = type(part), shapes[0], tuple(settings)
        if key not in self._tried:
            self._tried[key] = known_norm(part)
        return self._tried[key]


def _computes(part: nn.Module, known: KnownNorm, x: Tensor, stored: Tensor) -> bool:
    try:
        found: Any = torch.func.functional_call(part, {"weight": stored}, (x,))
    # raised by modules that take other inputs
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    wanted = reference.norm(x, known.weight(stored), known.eps)
    return isinstance(found, Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)


ROTATE: Final = "apply_rotary_pos_emb"

DEPRECATION: Final = "transformers.utils.deprecation"


def rotates(part: nn.Module) -> bool:
    """True if a module's forward calls `apply_rotary_pos_emb`, and its results are those of `reference.rotate`."""
    forward = _forward(part)
    return (
        forward is not None
        and ROTATE in forward.__code__.co_names
        and _is_known_rotation(forward.__globals__.get(ROTATE))
    )


def _forward(part: nn.Module) -> FunctionType | None:
    """Returns the forward function of a module's class, without decorators that only warn of deprecated keywords.

    Returns None if the function has other decorators, or is not a plain function.
    """
    forward: Any = type(part).forward
    while hasattr(forward, "__wrapped__") and forward.__globals__.get("__name__") == DEPRECATION:
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


def _is_known_rotation(function: Any) -> bool:
    cpu = torch.device("cpu")
    generator = torch.Generator(cpu).manual_seed(0)
    shapes = (2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 16), (2, 3, 16)
    wide = [torch.randn(shape, generator=generator, dtype=torch.float32, device=cpu) for shape in shapes]
    for dtype in (torch.bfloat16, torch.float32):
        given = [each.to(dtype) for each in wide]
        try:
            found = function(*given)
        except (RuntimeError, TypeError, ValueError, IndexError):  # raised if it has other parameters
            return False
        wanted = reference.rotate(*given)
        if not (isinstance(found, tuple) and len(found) == 2 and all(map(torch.equal, found, wanted))):
            return False
    return True


def use_our_rotation(part: nn.Module, running: Running) -> None:
    """Makes an attention module use this package's op for RoPE. `rotates` must be True for the module.

    Calls that the op does not support still go to the module's own function.
    """
    forward = _forward(part)
    assert forward is not None, "it rotates"
    own, theirs = proxy(running), forward.__globals__[ROTATE]

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if more or options or not _fits(q, k, cos, sin):
            found: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, *more, **options)
            return found
        with our_op(own):
            rotated_heads: tuple[Tensor, Tensor] = own.ops.rotate(q, k, cos, sin)
        return rotated_heads

    names = {**forward.__globals__, ROTATE: rotated}
    ours = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    part.forward = MethodType(ours, proxy(part))


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if `Ops.rotate` supports tensors of these shapes and dtypes."""
    if not q.dim() == k.dim() == 4 or cos.dim() != 3 or sin.shape != cos.shape:
        return False
    tensors, (batch, _, tokens, dim) = (q, k, cos, sin), q.shape
    same_form = all(each.dtype == q.dtype and each.stride(-1) == 1 for each in tensors)
    whole = cos.shape[1:] == (tokens, dim) and cos.shape[0] in (1, batch) and dim % 2 == 0
    return same_form and whole and k.shape[0] == batch and k.shape[2:] == q.shape[2:]


class PartProduct(nn.Module):
    """One rank's rows or columns of a linear layer y = x W^T + b. Replaces an nn.Linear.

    Args:
        running: the hosted model.
        weights: this rank's parts of W [N, K], each with N / parts rows or with K / parts columns.
        bias: [N / ranks] if W is split by rows, [N] if by columns. None: no bias.
        columns: True if W is split by columns. Then x has this rank's K / ranks elements, and y is the sum of the
            results of all ranks.
    """

    _running: Running

    def __init__(self, running: Running, weights: Sequence[Weight], bias: Tensor | None, *, columns: bool) -> None:
        super().__init__()
        self._running = proxy(running)
        self.weights, self._columns = tuple(weights), columns
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Computes y for x.

        If W is split by rows, x is [..., K] and y is this rank's part [..., N / ranks]. If W is split by columns, x is
        this rank's part [..., K / ranks] and y is [..., N].
        """
        with our_op(self._running):
            return self._summed(x) if self._columns else self._rows(x)

    def _rows(self, x: Tensor) -> Tensor:
        running, x = self._running, x.contiguous()
        biases = [None] * len(self.weights) if self.bias is None else self.bias.chunk(len(self.weights))
        pieces = zip(self.weights, biases, strict=True)
        made = [running.ops.linear(x, weight, bias, running.tiling) for weight, bias in pieces]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _summed(self, x: Tensor) -> Tensor:
        running = self._running
        given = zip(x.chunk(len(self.weights), dim=-1), self.weights, strict=True)
        partial: list[Tensor] = [
            running.ops.linear(part.contiguous(), weight, None, running.tiling, out_dtype=torch.float32)
            for part, weight in given
        ]
        total = running.exchange.sum(tree_sum(partial))
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)
