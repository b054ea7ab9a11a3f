"""What a hosted transformers module calls: our attention function, and an object in place of its cache.

Both find the running pass by an attribute of the calling module, so no state is global: see `attach`.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn, Protocol
from weakref import proxy

import torch
from torch import Tensor, nn

from fastspec.errors import UnsupportedModel

ATTENTION: Final = "fastspec"  # names under which transformers looks our functions up
PROBED: Final = "fastspec_probe"
_PASS: Final = "fastspec_pass"


class Pass(Protocol):
    """What handles the attention calls of one module's passes."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attention of one call: query [B, H, Q, D], key and value [B, Hkv, Q, D]; returns [B, Q, H, Dv]."""


def attach(module: nn.Module, owner: Pass) -> None:
    """Makes `owner` handle the calls of all submodules of `module`; the caller keeps it alive."""
    for part in module.modules():
        part.__dict__[_PASS] = proxy(owner)


def pass_of(module: nn.Module) -> Any:
    """The owner that `attach` gave this module."""
    return module.__dict__[_PASS]


def register() -> None:
    """Tells transformers our names. Only the probe builds masks: for the other name transformers builds none."""
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
    mask.rule = mask_function  # type: ignore[attr-defined]  # a model that changes the mask loses it
    return mask


class NoCache:
    """Stands in the place of a transformers Cache and keeps nothing: keys and values go to attention as they come."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def update(self, key: Tensor, value: Tensor, layer_idx: int = 0, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the fed tokens only."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given, so no model needs it."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, for masks of a probe."""
        return 0

    def get_mask_sizes(self, queries: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes of the fed tokens only, for masks of a probe."""
        return queries, 0

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel(f"it asks its cache for {name!r}: it keeps state other than keys and values")
