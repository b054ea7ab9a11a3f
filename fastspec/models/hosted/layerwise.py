"""Compares two forward passes layer by layer. A layer gets the same input in both, so that differences do not add up.

Because of rounding, a router may choose another expert for some tokens. The hidden states of these tokens then differ
much, also in later layers. If a layer has the same input in both passes, the outputs of its attention differ only by
rounding. The layer's outputs at most tokens also differ only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastspec.errors import UnsupportedModel

# largest difference of one layer that rounding explains, relative to the mean norm of a token's hidden state
_NEAR: Final = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_INPUT: Final = "hidden_states"  # keyword of the layer's input, if it is not positional


@dataclass
class PassRecord:
    """Hidden states of one pass, [1, tokens, width] each, in the order in which layers ran.

    Attributes:
        inputs: input of each layer. The last entry is the result of the pass.
        attended: output of each layer's attention module.
    """

    inputs: list[Tensor] = field(default_factory=list)
    attended: list[Tensor] = field(default_factory=list)


class Layers:
    """Records the inputs and attention outputs of a model's layers in several passes, and compares the passes.

    Args:
        base: the model without its LM head.
        names: names, relative to `base`, of the modules that call attention, in the order of the calls.
    """

    def __init__(self, base: nn.Module, names: Sequence[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._base = base

    def record(self, run: Callable[[], Tensor]) -> PassRecord:
        """Records a pass over all tokens. `run` runs the pass and returns its last hidden states."""
        seen = PassRecord()
        with self._watched(seen, lambda layer, given: given):
            seen.inputs.append(run())
        return seen

    def record_fed_like(self, own: PassRecord, first: int, run: Callable[[], Tensor]) -> PassRecord:
        """Records a pass over tokens from `first` on, in which each layer gets the input that it had in another pass.

        Args:
            own: record of the other pass, which covered all tokens.
            first: index of the first token of the new pass.
            run: function that runs the new pass and returns its last hidden states.
        """
        seen = PassRecord()

        def fed(layer: int, given: Tensor) -> Tensor:
            return own.inputs[layer][:, first : first + given.shape[1]]

        with self._watched(seen, fed):
            seen.inputs.append(run())
        return seen

    def compare(self, own: PassRecord, passes: Sequence[PassRecord], what: str) -> None:
        """Compares several passes, each over some of the tokens, with one pass over all tokens.

        Args:
            own: record of the pass over all tokens.
            passes: records of the several passes, which together cover all tokens.
            what: description of the several passes, for messages.

        Raises:
            UnsupportedModel: a layer differs by more than rounding. The message names it.
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
        """Returns the decoder layer that contains the module `name`. Layers are entries of an nn.ModuleList."""
        parts = name.split(".")
        for end in range(1, len(parts)):
            if isinstance(self._base.get_submodule(".".join(parts[:end])), nn.ModuleList):
                return self._base.get_submodule(".".join(parts[: end + 1]))
        raise UnsupportedModel(f"layer {name!r} is in no list of layers")


def errors(ours: Sequence[Tensor], own: Tensor) -> Tensor:
    """Returns the error of each token: norm of (ours - own) at the token, divided by the mean token norm in `own`.

    Args:
        ours: hidden states [1, tokens, ...] of several passes, which together have all tokens.
        own: hidden states [1, all tokens, ...] to compare with.

    Returns:
        fp32 [1, all tokens].
    """
    differences = (torch.cat(list(ours), dim=1).float() - own.float()).flatten(2).norm(dim=-1)
    errors: Tensor = differences / own.float().flatten(2).norm(dim=-1).mean()
    return errors
