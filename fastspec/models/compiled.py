"""A decoder whose passes run through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.compiled_ops import INDUCTOR, MAX_QUERIES, PerShape
from fastspec.models.decoder import Decoder
from fastspec.shapes import UNTILED, ForwardBatch, Tiling


class CompiledDecoder(Decoder):
    """Decoder whose decode passes run through torch.compile, each as one graph. Its ops must be `CompiledOps`.

    Each shape (number of rows, tokens per row) has its own graph, which the first pass of that shape compiles. Prefill
    chunks have more tokens per row and are not compiled. They have many sizes, and matrix products take most of their
    time.

    Args:
        *args, **options: arguments of Decoder.
        backend: backend of torch.compile.
    """

    def __init__(self, *args: Any, backend: str | Callable[..., Any] = INDUCTOR, **options: Any) -> None:
        super().__init__(*args, **options)
        self._compiled_hidden = PerShape(_hidden, backend)
        self._compiled_logits = PerShape(_logits, backend)
        self._compiled_pick = PerShape(_pick, backend)

    @override
    def hidden(self, rows: ForwardBatch) -> Tensor:
        if rows.ids.shape[1] > MAX_QUERIES:
            return super().hidden(rows)
        return self._compiled_hidden(self, rows.ids, rows.positions, rows.write_mask, rows.block_table)

    @override
    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        return self._compiled_logits(self, hidden)

    @override
    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        # the copy is outside the graph: `out` is a column, which may be misaligned for the compiler's vector stores
        mapped = () if ids is None else (ids,)
        out.copy_(self._compiled_pick(self, hidden, limit, *mapped))


def _hidden(model: Decoder, ids: Tensor, positions: Tensor, write_mask: Tensor, block_table: Tensor) -> Tensor:
    return Decoder.hidden(model, ForwardBatch(ids, positions, write_mask, block_table, 0, UNTILED))


def _logits(model: Decoder, hidden: Tensor) -> Tensor:
    return Decoder.logits(model, hidden, UNTILED)


def _pick(model: Decoder, hidden: Tensor, limit: int, ids: Tensor | None = None) -> Tensor:
    chosen = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    Decoder.argmax(model, hidden, limit, UNTILED, chosen, ids)
    return chosen
