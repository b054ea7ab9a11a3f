"""A draft model's rows for token ids in another order: first the ids that its target has, too.

Then the most probable of these ids is found without computing logits: the search ends at the last of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from fastspec.models.checkpoints.tensor_source import TensorSource, WrappedSource
from fastspec.models.config import ModelSpec
from fastspec.models.layer_table import EMBED, HEAD, INPUTS

if TYPE_CHECKING:
    from torch import Tensor

    from fastspec.models.checkpoints.checkpoint import Checkpoint


class WithRowOrder(WrappedSource):
    """Tensors of a model. Those with one row for each token id have their rows in another order.

    Args:
        source: the tensors, none of which is in codes.
        order: int64 [ids], for each row its place in the source.
    """

    def __init__(self, source: TensorSource, order: Tensor) -> None:
        super().__init__(source)
        self._order = order

    @override
    def read(self, name: str) -> Tensor:
        found = super().read(name)
        return found[self._order.to(found.device)] if name in (EMBED, HEAD, INPUTS) else found

    @override
    def read_part(self, name: str, rows: slice, columns: slice) -> Tensor:
        if name not in (EMBED, HEAD, INPUTS):
            return super().read_part(name, rows, columns)
        found = super().read(name)
        return found[self._order[rows].to(found.device)][:, columns]


def in_front(draft: Checkpoint, shared: Tensor) -> Checkpoint | None:
    """Returns the checkpoint of a draft model whose rows of shared token ids come first.

    Args:
        draft: checkpoint of the draft model.
        shared: bool [ids], True for its ids that the target has, too.

    Returns:
        None if rows are not put in another order: those of a live module, of a hosted or a quantised model, and of a
        model that several ranks share.
    """
    if draft.directory is None or draft.in_codes or draft.sliced is not None or not isinstance(draft.spec, ModelSpec):
        return None
    order = torch.cat((shared.nonzero()[:, 0], (~shared).nonzero()[:, 0]))
    mask = None if draft.mask_id is None else int((order == draft.mask_id).nonzero()[0, 0])
    return replace(draft, row_order=order, mask_id=mask)
