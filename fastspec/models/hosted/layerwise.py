"""Compares two passes layer by layer. Each layer gets the same input in both, so that differences do not add up.

Because of rounding, a router may choose another expert for some tokens. Their hidden states then differ much, and so do
those of later layers. With the same input to a layer, the outputs of its attention differ only by rounding. So do the
layer's outputs for most tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastspec.errors import UnsupportedModel

# difference of one layer that rounding explains, as a share of a token's mean norm
_NEAR: Final = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_INPUT: Final = "hidden_states"  # keyword of the layer's input, if it is not positional


@dataclass
class PassRecord:
    """Hidden states of a pass by layer, in the order in which layers ran; each [1, tokens, width].

    Attributes:
        inputs: inputs of each layer, then the last hidden states.
        attended: outputs of each layer's attention module.
    """

    inputs: list[Tensor] = field(default_factory=list)
    attended: list[Tensor] = field(default_factory=list)


class Layers:
    """Layers of a base model that have attention.

    Args:
        base: the base model.
        names: names, relative to `base`, of its modules that call attention, in order.
    """

    def __init__(self, base: nn.Module, names: Sequence[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._base = base

    def record(self, run: Callable[[], Tensor]) -> PassRecord:
        """Records a pass over all tokens. `run` returns its last hidden states."""
        seen = PassRecord()
        with self._watched(seen, lambda layer, given: given):
            seen.inputs.append(run())
        return seen

    def record_fed_like(self, own: PassRecord, first: int, run: Callable[[], Tensor]) -> PassRecord:
        """Records a pass over tokens from `first` on. Each layer gets the input that is recorded in `own`."""
        seen = PassRecord()

        def fed(layer: int, given: Tensor) -> Tensor:
            return own.inputs[layer][:, first : first + given.shape[1]]

        with self._watched(seen, fed):
            seen.inputs.append(run())
        return seen

    def compare(self, own: PassRecord, passes: Sequence[PassRecord], what: str) -> None:
        """Compares passes that together fed all tokens, with a pass `own` over all tokens.

        Raises:
            UnsupportedModel: a layer differs by more than rounding. Names it.
        """
        for index, theirs in enumerate(own.attended):
            error = errors([seen.attended[index] for seen in passes], theirs).max()
            self._check(error, theirs.dtype, f"layer {self._name(index)!r}: its attention in {what} over K/V in pages")
        for index, theirs in enumerate(own.inputs):
            error = errors([seen.inputs[index] for seen in passes], theirs).median()
            before = f"what layer {self._name(index)!r} is fed" if index < len(own.attended) else "the last layer"
            self._check(error, theirs.dtype, f"{before} in {what} over K/V in pages")

    @staticmethod
    def _check(error: Tensor, dtype: torch.dtype, where: str) -> None:
        if not bool(error <= _NEAR[dtype]):
            raise UnsupportedModel(
                f"{where} differs from transformers' own by {float(error):.2g} of a token's norm, more than the "
                f"{_NEAR[dtype]} that rounding explains in one layer"
            )

    def _name(self, index: int) -> str:
        return self._names[index % len(self._names)]

    @contextmanager
    def _watched(self, seen: PassRecord, fed: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        def enter(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hidden = given[0] if given else named.get(_INPUT)
            if not isinstance(hidden, Tensor) or hidden.dim() != 3:
                raise UnsupportedModel("its layers are not fed hidden states [batch, tokens, width]")
            seen.inputs.append(hidden)
            hidden = fed(len(seen.inputs) - 1, hidden)
            return ((hidden, *given[1:]), named) if given else (given, {**named, _INPUT: hidden})

        def leave(part: nn.Module, given: Any, out: Any) -> None:
            seen.attended.append(out[0] if isinstance(out, tuple) else out)

        handles = []
        for name in self._names:
            handles.append(self._layer(name).register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(self._base.get_submodule(name).register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, name: str) -> nn.Module:
        """Returns the entry of the list of layers that contains the module `name`."""
        parts = name.split(".")
        for end in range(1, len(parts)):
            if isinstance(self._base.get_submodule(".".join(parts[:end])), nn.ModuleList):
                return self._base.get_submodule(".".join(parts[: end + 1]))
        raise UnsupportedModel(f"layer {name!r} is in no list of layers")


def errors(ours: Sequence[Tensor], own: Tensor) -> Tensor:
    """Returns the relative error of each token: the norm of ours - own, divided by the mean norm of own."""
    differences = (torch.cat(list(ours), dim=1).float() - own.float()).flatten(2).norm(dim=-1)
    errors: Tensor = differences / own.float().flatten(2).norm(dim=-1).mean()
    return errors
