"""Applies token masks of grammars to logits: one bit for each id at each place."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits fp32 [B, R, V], -inf for ids whose bit is not set; no other bit of them changes.

    Args:
        logits: of R places.
        masks: int32 [B, R or more, W] with 32 W >= V: id i is bit i % 32 of word i // 32.
    """
    batch, places, vocab = logits.shape
    parts = masks[:, :places].contiguous().view(torch.uint8)  # the lowest bits first, as on every machine we run on
    bits = parts[..., None] & (1 << torch.arange(8, dtype=torch.uint8, device=logits.device))
    return logits.masked_fill((bits == 0).view(batch, places, -1)[..., :vocab], -torch.inf)
