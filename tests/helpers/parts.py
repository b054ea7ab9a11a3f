"""A live model beside our weights of it, and these with one part changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.layer_table import DecoderWeights
from tests.helpers.families import as_configured
from tests.helpers.hybrid import logits_of


@dataclass(frozen=True)
class Case:
    """A live model and its logits, and ours to be."""

    model: PreTrainedModel
    spec: ModelSpec
    weights: DecoderWeights
    ids: Tensor
    logits: Tensor


KEEP_ORDER = ("scale softcap", "scale logits")  # of logits: what is largest stays the largest
Changed = tuple[str, ModelSpec, DecoderWeights]


def case_of(model: PreTrainedModel, vocab: int, tokens: int) -> Case:
    """A model with its logits of some tokens drawn at random."""
    checkpoint = resolve(model, role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return Case(model, checkpoint.native, weights, ids, as_configured(model)(ids).logits)


def with_layer(weights: DecoderWeights, at: int, **changed: Any) -> DecoderWeights:
    """The same weights with some of one layer changed."""
    layers = list(weights.layers)
    layers[at] = replace(layers[at], **changed)
    return replace(weights, layers=tuple(layers))


def turned(value: Any) -> Any:
    """A tensor or weight with its rows in reverse order; what has an element each, four times as large."""
    if isinstance(value, Tensor):
        return value.flip(0) * (4 if value.dim() == 1 else 1)
    return replace(value, data=value.data.flip(0))


def none_is_idle(whole: Decoder, case: Case, changes: Iterable[tuple[str, Decoder]]) -> list[str]:
    """The names of what was changed, each of which changes the logits, and greedy text where it can."""
    wanted, names = logits_of(whole, case.ids), []
    for name, model in changes:
        names.append(name)
        found = logits_of(model, case.ids)
        difference = float((found - wanted).abs().max())
        assert difference > 1e-2, f"{name} changes nothing: {difference}"
        same = torch.equal(found.argmax(-1), wanted.argmax(-1))
        assert same == (name in KEEP_ORDER), f"{name} and greedy text"
    return names
