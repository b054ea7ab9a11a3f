"""Traces one forward pass of a module on the meta device, and records the arguments of its attention calls.

The pass computes nothing and needs no memory. It fails if the host reads a value, or if a shape depends on data. Such a
model cannot be captured as a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastspec.distributed.exchange import Alone
from fastspec.errors import UnsupportedModel
from fastspec.kernels.common.checks import MAX_HEAD_DIM
from fastspec.models.hosted.swaps import ATTENTION, PROBED, NoCache, attach
from fastspec.shapes import AttentionRule

# tensors that an attention call may have besides q, k, v and mask
_KNOWN_TENSORS: Final = ("s_aux", "position_ids", "cache_position")
_FAR: Final = 1 << 15  # number of positions for which a mask is compared with a window
_BATCH, _QUERIES = 2, 3
# errors that a module may raise if it was not written for the meta device
FOREIGN: Final = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError),
    *(AssertionError, ArithmeticError),
)


@dataclass(frozen=True, slots=True)
class ProbedOp:
    """One of the attention calls that every pass of a model makes.

    Attributes:
        slot: index of this call's pair of key and value tensors in the KV cache. Calls with the same keys and values
            share a slot.
        layer: name of the module that makes the call.
        heads, kv_heads: number of query heads and of KV heads.
        head_dim: elements of a head in the KV pages. If keys and values have different widths, it is the larger width;
            the narrower ones are padded.
        value_dim: elements of one head of a value.
        rule: attention window, scale and softcap.
        sinks: True if the call has attention sinks.
    """

    slot: int
    layer: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rule: AttentionRule
    sinks: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(query heads, KV heads, head_dim)."""
        return self.heads, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class Probed:
    """Results of `probe`. The base model is the model without its LM head.

    Attributes:
        calls: attention calls of a pass, in order.
        cache_name: name of the base model's argument for a KV cache.
        whole: further arguments that make the base model compute hidden states for all tokens of a pass.
        output: class of the base model's result.
        hidden_size: elements of the base model's last hidden state at one position.
    """

    calls: tuple[ProbedOp, ...]
    cache_name: str
    whole: Mapping[str, None]
    output: Any
    hidden_size: int


def probe(module: nn.Module) -> Probed:
    """Traces one pass of a transformers causal model on the meta device.

    Raises:
        UnsupportedModel: the model cannot be hosted. The message names the layer and the reason.
    """
    kind: Any = type(module)
    base: Any = base_of(module)
    if getattr(module, "_is_stateful", False):
        raise UnsupportedModel(
            "it keeps recurrent state (_is_stateful), which a rejected draft would overwrite; only native families "
            "keep a state for each draft"
        )
    if not kind._can_set_attn_implementation():
        raise UnsupportedModel("its attention does not go through transformers' AttentionInterface")
    if base is module or module.get_output_embeddings() is None:  # type: ignore[operator]
        raise UnsupportedModel("it does not consist of a base model and a separate head")
    parameters = inspect.signature(base.forward).parameters
    named = [name for name in ("cache", "past_key_values") if name in parameters]
    if "position_ids" not in parameters or not named:
        raise UnsupportedModel(f"{type(base).__name__}.forward takes no position_ids, or no cache")
    # some base models compute their last layers only for tokens whose logits are requested; None requests all
    whole = {name: None for name in ("logits_to_keep",) if name in parameters}
    prober = _Prober({id(part): name for name, part in module.named_modules()})
    attach(module, prober)
    module.set_attn_implementation(PROBED)  # type: ignore[operator]
    with torch.no_grad(), _naming_layers(module):
        ids = torch.zeros(_BATCH, _QUERIES, dtype=torch.int64, device="meta")
        positions = torch.arange(_QUERIES, device="meta").expand(_BATCH, -1)
        out = base(input_ids=ids, position_ids=positions, use_cache=True, **whole, **{named[0]: NoCache()})
    module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if not prober.calls:
        raise UnsupportedModel("none of its layers calls attention through the AttentionInterface")
    return Probed(prober.ruled(), named[0], whole, type(out), out.last_hidden_state.shape[-1])


def base_name(module: nn.Module) -> str:
    """Returns the name of the submodule that contains everything except the LM head. "" if there is none."""
    return next((name for name in (str(module.base_model_prefix), "model") if name in module._modules), "")


def base_of(module: nn.Module) -> nn.Module:
    """Returns the submodule that contains everything except the LM head. The module itself if there is none."""
    return module.get_submodule(base_name(module))


@contextmanager
def _naming_layers(module: nn.Module) -> Iterator[None]:
    """Context manager that converts an error of a pass to UnsupportedModel. The message names the failing submodule."""
    entered = [""]

    def enter(name: str) -> Any:
        return lambda *_: entered.__setitem__(0, name)

    handles = [part.register_forward_pre_hook(enter(name)) for name, part in module.named_modules()]
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"layer {entered[0]!r}: {error}") from error
    # a foreign module, which was not written for the meta device, may raise any of these
    except FOREIGN as error:
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(
            f"layer {entered[0]!r}: a pass cannot be traced without values, so it reads them on the host, or has "
            f"shapes that depend on data ({type(error).__name__}: {first})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


class _Prober:
    """Records the attention calls of a traced pass. `attach` sends the calls of a module to this object.

    Args:
        names: id of a submodule -> its name.
    """

    queries = _QUERIES  # tokens per row of the pass; replaced modules read this and the next two attributes
    exchange, inside = Alone(), False

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self.calls: list[ProbedOp] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._masks: list[tuple[Any, Any]] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Records an attention call; see `HostedPass.attend`. Returns zeros.

        Raises:
            UnsupportedModel: this package's attention cannot compute the call.
        """
        given = {name: option for name, option in options.items() if option is not None}
        unknown = [name for name, option in given.items() if isinstance(option, Tensor) and name not in _KNOWN_TENSORS]
        if unknown:
            raise UnsupportedModel(
                f"attention gets the argument {unknown[0]}, which fastspec's attention does not support"
            )
        if tuple(query.shape[::2]) != (_BATCH, _QUERIES) or key.shape[2] != _QUERIES:
            raise UnsupportedModel(
                f"attention runs over q {list(query.shape)} and k {list(key.shape)}, not over the fed tokens alone"
            )
        _check_sizes(query, key, value)
        if mask is not None and not hasattr(mask, "rule"):
            raise UnsupportedModel("the model changes its attention mask")
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModel("attention is not causal")
        self._masks.append((None if mask is None else mask.rule, given.get("sliding_window")))
        known = zip(self.calls, self._pairs, strict=True)
        slot = next((call.slot for call, pair in known if pair[0] is key and pair[1] is value), None)
        if slot is None:
            slot = len({call.slot for call in self.calls})
        self._pairs.append((key, value))
        rule = AttentionRule(None, _scale(module, query, given), given.get("softcap"))
        name, width = self._names.get(id(module), ""), max(key.shape[3], value.shape[3])
        sizes = query.shape[1], key.shape[1], width, value.shape[3]
        self.calls.append(ProbedOp(slot, name, *sizes, rule, "s_aux" in given))
        return query.new_zeros(_BATCH, _QUERIES, query.shape[1], value.shape[3])

    def ruled(self) -> tuple[ProbedOp, ...]:
        """Returns the recorded attention calls, with the window of each call's mask in `rule.window`.

        Raises:
            UnsupportedModel: a call has no mask, or its mask is neither causal nor a causal window. Also if its
                argument sliding_window differs from the window of its mask.
        """
        windows: dict[Any, int | None] = {}
        calls = []
        for call, (function, told) in zip(self.calls, self._masks, strict=True):
            if function is None:
                raise UnsupportedModel(f"layer {call.layer!r}: attention was called without a mask")
            if function not in windows:
                windows[function] = _window(function, call.layer)
            window = windows[function]
            if told is not None and told != window:
                raise UnsupportedModel(f"layer {call.layer!r}: sliding_window={told}, but its mask has {window}")
            calls.append(replace(call, rule=call.rule._replace(window=window)))
        return tuple(calls)


def _scale(module: nn.Module, query: Tensor, given: dict[str, Any]) -> float:
    scale = given.get("scaling", getattr(module, "scaling", None))
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    heads, kv_heads, dim = query.shape[1], key.shape[1], max(key.shape[3], value.shape[3])
    if value.shape[1] != kv_heads or query.shape[3] != key.shape[3]:
        raise UnsupportedModel(
            f"its values have {value.shape[1]} heads and its keys {kv_heads}, its queries width {query.shape[3]} and "
            f"its keys {key.shape[3]}; wanted as many values as keys, and queries as wide as keys"
        )
    if heads % kv_heads or dim % 2 or dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"{heads} query heads over {kv_heads} key heads of width {dim}; wanted a multiple, and an even width up to "
            f"{MAX_HEAD_DIM}"
        )


def _window(function: Any, layer: str) -> int | None:
    """Finds the attention window of a transformers mask function by evaluating it. None: full causal attention.

    Args:
        function: function of (batch, head, query position, key position). True where the query attends to the key.
        layer: name of the layer, for messages.

    Raises:
        UnsupportedModel: the mask is neither causal nor a causal window, such as a mask of chunks or prefixes.
    """
    rows = sorted({*range(40), *(_FAR * i // 61 for i in range(62))})
    at = torch.tensor(rows, device="cpu")[:, None]
    keys = torch.arange(_FAR + 1, device="cpu")[None]
    nothing = torch.tensor(0, device="cpu")
    try:
        seen = function(nothing, nothing, at, keys).expand(len(rows), _FAR + 1)
    except (RuntimeError, IndexError, AttributeError) as error:
        raise UnsupportedModel(f"layer {layer!r}: its mask depends on what is fed (a chunked or block mask)") from error
    lowest = torch.where(seen, keys, _FAR + 1).amin(1, keepdim=True)
    window = int(at[-1] - lowest[-1]) + 1
    for expected, found in ((at * 0, None), ((at - window + 1).clamp_min(0), window)):
        if torch.equal(lowest, expected) and torch.equal(seen, (keys >= lowest) & (keys <= at)):
            return found
    raise UnsupportedModel(
        f"layer {layer!r}: its mask is neither causal nor a causal sliding window (a chunked or prefix mask)"
    )
