"""Hidden states between the layers of a hosted model, for proposers that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn

from fastspec.errors import UnsupportedModel

INPUT: Final = "hidden_states"  # keyword of a layer's input, if it is not positional


def layers_in(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the decoder layers that contain the modules `names`, such as "model.layers.3".

    Returns () unless these layers are the entries 0, 1, 2, ... of one list, in this order.

    Args:
        names: names of the modules that call attention, such as "model.layers.3.self_attn".
    """
    found: list[str] = []
    for name in names:
        parts = name.split(".")
        index = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if index is None:
            return ()
        layer = ".".join(parts[: index + 1])
        if layer not in found:
            found.append(layer)
    lists = {layer.rpartition(".")[0] for layer in found}
    numbers = [int(layer.rpartition(".")[2]) for layer in found]
    return tuple(found) if len(lists) == 1 and numbers == list(range(len(found))) else ()


class LayerStreams:
    """Records the residual stream between the layers of a model.

    Args:
        base: the model without its LM head.
        names: names of its layers, relative to `base`.
    """

    def __init__(self, base: nn.Module, names: Sequence[str]) -> None:
        self._layers = [base.get_submodule(name) for name in names]

    @contextmanager
    def recorded(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Context manager in which a pass of the model records the residual stream after some layers.

        The stream after a layer is the input of the next layer. After the last layer it is the layer's output.

        Args:
            layers: indices of the layers. -1 is the input of the first layer.

        Yields:
            Index of a layer -> stream [batch, tokens, width]. A pass of the model fills this dict.

        Raises:
            UnsupportedModel: a layer's input is not a tensor with three axes. The pass raises it.
        """
        found: dict[int, Tensor] = {}

        def entered(layer: int) -> Callable[..., None]:
            def hook(part: nn.Module, given: tuple[object, ...], named: Mapping[str, object]) -> None:
                found[layer] = _stream(given[0] if given else named.get(INPUT))

            return hook

        def left(layer: int) -> Callable[..., None]:
            def hook(part: nn.Module, given: object, out: object) -> None:
                found[layer] = _stream(out[0] if isinstance(out, tuple) else out)

            return hook

        handles = []
        for layer in layers:
            if layer + 1 < len(self._layers):
                handles.append(self._layers[layer + 1].register_forward_pre_hook(entered(layer), with_kwargs=True))
            else:
                handles.append(self._layers[layer].register_forward_hook(left(layer)))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _stream(given: object) -> Tensor:
    if not isinstance(given, Tensor) or given.dim() != 3:
        raise UnsupportedModel("its layers are not fed hidden states [batch, tokens, width]")
    return given
