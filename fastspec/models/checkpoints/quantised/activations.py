"""Measures second moments of the inputs of a model's linear layers, for quantisation with a calibration text.

transformers' model runs over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import UnsupportedOption
from fastspec.models.hosted.load import bars

WINDOW, WINDOWS = 256, 128  # tokens in a window of the text, and most windows that are used
_LEAST = 8  # least number of windows; the moments of fewer may differ much from those of other texts


def beginning(tokenizer: Any) -> list[int]:
    """Ids that a tokenizer puts before every text, such as a BOS token: many models are lost without it."""
    whole, alone = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    return whole[: whole.index(alone[0])]


class Activations:
    """Model of transformers, and the calibration text on which the inputs of its linear layers are measured.

    Args:
        directory: local files of the model.
        tokens: token ids of the text.
        device: device of the model and of the moments.
        begin: ids that each window begins with, those of `beginning`.

    Raises:
        UnsupportedOption: the text is too short, or transformers has no causal model of this type.
    """

    def __init__(self, directory: Path, tokens: list[int], device: torch.device, begin: Sequence[int] = ()) -> None:
        taken = WINDOW - len(begin)
        whole = len(tokens) // taken
        if whole < _LEAST:
            raise UnsupportedOption(
                f"the calibration text has {len(tokens)} tokens, wanted at least {_LEAST * taken}; give a longer one"
            )
        from transformers import AutoModelForCausalLM

        windows = torch.tensor(tokens[: whole * taken], device=device).view(whole, taken)
        windows = windows[:: -(-whole // WINDOWS)]  # spread over the whole text
        first = torch.tensor([*begin], dtype=windows.dtype, device=device).expand(len(windows), -1)
        self._windows = torch.cat((first, windows), 1)
        try:
            with bars(shown=False):
                model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
        except (ValueError, OSError) as error:
            raise UnsupportedOption(f"{directory}: transformers cannot run it to calibrate: {error}") from error
        self._model: nn.Module = model.eval().to(device)

    def moments(self, modules: Collection[str], tell: Callable[[str], object] = lambda _: None) -> dict[str, Tensor]:
        """Runs the model over the text, and returns the second moments of the inputs of linear modules.

        Args:
            modules: names of linear modules. Those that the model lacks, or does not run, are not in the result.
            tell: called with a text about each window before it runs.

        Returns:
            Name of a module -> sum of x x^T over its inputs x, fp32 [K, K]. Modules with the same inputs share a
            tensor.
        """
        found: dict[str, Tensor] = {}
        last: list[Any] = [None, ""]  # the newest input, and the name of the first module that got it

        def record(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
                x = arguments[0]
                if x is not last[0]:
                    last[:] = x, name
                    rows = x.flatten(0, -2).float()
                    if name not in found:
                        found[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
                    found[name].addmm_(rows.T, rows)
                else:
                    found[name] = found[last[1]]

            return hook

        linear = {name: each for name, each in self._model.named_modules() if isinstance(each, nn.Linear)}
        hooks = [linear[name].register_forward_pre_hook(record(name)) for name in modules if name in linear]
        try:
            with torch.no_grad():
                for index, window in enumerate(self._windows, 1):
                    tell(f"running window {index} of {len(self._windows)} of the text")
                    self._model(input_ids=window[None], use_cache=False, logits_to_keep=1)
        finally:
            for each in hooks:
                each.remove()
        return found
