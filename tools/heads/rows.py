"""Training rows and what the target leaves on them, kept in memory or in a folder."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .corpus import cut_prompts
from .recipe import Recipe
from .target import Target

LOGGER = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 28
PASS_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts of one length.

    Attributes:
        ids: int64 [rows, length].
        lengths: int64 [rows]: tokens of each that are text, the rest is padding.
    """

    ids: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with what the target left on them.

    Attributes:
        ids: int64 [rows, length].
        text: bool [rows, length], where it is not padding.
        features, last: As `target.Reading` has them.
    """

    ids: Tensor
    text: Tensor
    features: Tensor
    last: Tensor


def own_rows(target: Target, documents: Sequence[Tensor], recipe: Recipe, generator: torch.Generator) -> Rows:
    """Lets the target continue corpus text, batches at all prompt lengths and temperatures of the recipe in turn."""
    ids, lengths = [], []
    every = list(itertools.product(recipe.own_prompts, recipe.own_temperatures))
    order = torch.randperm(len(every), generator=generator).tolist()  # few batches shall not have all one length
    settings = itertools.cycle([every[index] for index in order])
    for start in range(0, recipe.own_rows, recipe.own_batch):
        length, temperature = next(settings)
        count = min(recipe.own_batch, recipe.own_rows - start)
        prompts = cut_prompts(documents, count, length, generator).to(target.device)
        texts, text = target.write(prompts, recipe.own_length - length, temperature)
        ids.append(texts.cpu())
        lengths.append(text.cpu())
        LOGGER.info("the target has written %d of %d rows", start + count, recipe.own_rows)
    return Rows(torch.cat(ids), torch.cat(lengths))


def real_rows(documents: Sequence[Tensor], recipe: Recipe, generator: torch.Generator) -> Rows:
    """Cuts rows of corpus text."""
    ids = cut_prompts(documents, recipe.real_rows, recipe.real_length, generator)
    return Rows(ids, torch.full((len(ids),), recipe.real_length))


class Chunks:
    """Rows with the target's hidden states, read once, in chunks of about CHUNK_BYTES.

    A token takes 2 bytes for each number: (boundaries + 1) * hidden of them.

    Args:
        target: Reads the rows, all of them, here.
        groups: Rows of different lengths.
        keep: Where the chunks stay: a device's memory, or a folder, which gets them as safetensors files.
        generator: Mixes the rows of a group.
    """

    def __init__(
        self, target: Target, groups: Sequence[Rows], keep: Path | torch.device, generator: torch.Generator
    ) -> None:
        self._kept: list[dict[str, Tensor] | Path] = []
        self._device, self._generator = target.device, generator
        token_bytes = 2 * (len(target.boundaries) + 1) * target.embedding.shape[1]
        for rows in groups:
            order = torch.randperm(len(rows.ids), generator=generator)
            for picked in order.split(max(1, CHUNK_BYTES // (token_bytes * rows.ids.shape[1]))):
                chunk = _read(target, Rows(rows.ids[picked], rows.lengths[picked]))
                self._kept.append(_keep(chunk, keep, len(self._kept)))
                LOGGER.info("the target has read %d chunks", len(self._kept))

    def batches(self, batch_tokens: int) -> Iterator[Batch]:
        """Yields batches of about `batch_tokens` tokens without end, chunks and their rows in a new order each time."""
        while True:
            for index in torch.randperm(len(self._kept), generator=self._generator).tolist():
                kept = self._kept[index]
                chunk = load_file(kept) if isinstance(kept, Path) else kept
                rows, length = chunk["ids"].shape
                for picked in torch.randperm(rows, generator=self._generator).split(max(1, batch_tokens // length)):
                    here = picked.to(chunk["ids"].device)
                    yield self._batch({name: tensor[here] for name, tensor in chunk.items()})

    def _batch(self, chunk: dict[str, Tensor]) -> Batch:
        ids = chunk["ids"].to(self._device)
        text = torch.arange(ids.shape[1], device=ids.device) < chunk["lengths"].to(ids.device)[:, None]
        return Batch(ids, text, chunk["features"].to(ids.device), chunk["last"].to(ids.device))


def _read(target: Target, rows: Rows) -> dict[str, Tensor]:
    features, last = [], []
    for ids in rows.ids.split(max(1, PASS_TOKENS // rows.ids.shape[1])):
        reading = target.read(ids.to(target.device))
        features.append(reading.features.to(torch.bfloat16).cpu())
        last.append(reading.last.to(torch.bfloat16).cpu())
    return {"ids": rows.ids, "lengths": rows.lengths, "features": torch.cat(features), "last": torch.cat(last)}


def _keep(chunk: dict[str, Tensor], keep: Path | torch.device, index: int) -> dict[str, Tensor] | Path:
    if isinstance(keep, torch.device):
        return {name: tensor.to(keep) for name, tensor in chunk.items()}
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"chunk-{index:05}.safetensors"
    save_file(chunk, path)
    return path
