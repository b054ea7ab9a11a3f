"""Training rows and what the target leaves on them, kept in memory or in a folder."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
        begins: int64 [rows]: tokens of each, its prompt, from which nothing is learnt. None: no tokens.
    """

    ids: Tensor
    lengths: Tensor
    begins: Tensor | None = None

    def __getitem__(self, picked: Tensor) -> Rows:
        """Takes some rows."""
        return Rows(self.ids[picked], self.lengths[picked], None if self.begins is None else self.begins[picked])

    def texts(self) -> list[Tensor]:
        """The tokens of each row that teach."""
        begins = [0] * len(self.ids) if self.begins is None else self.begins.tolist()
        return [row[start:end] for row, start, end in zip(self.ids, begins, self.lengths.tolist(), strict=True)]

    def by_length(self, unit: int) -> list[Rows]:
        """Parts these rows by their lengths, each part padded only to the next multiple of `unit`."""
        units = (self.lengths + unit - 1) // unit
        parts = [(int(count) * unit, self[units == count]) for count in units.unique()]
        return [Rows(part.ids[:, :length], part.lengths, part.begins) for length, part in parts]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with what the target left on them.

    Attributes:
        ids: int64 [rows, length].
        text: bool [rows, length], where it teaches: neither padding nor a prompt.
        features, last: As `target.Reading` has them.
        log_sums: [rows, length] for some temperatures T: logarithm of the sum of exp(logit / T) over the vocabulary.
    """

    ids: Tensor
    text: Tensor
    features: Tensor
    last: Tensor
    log_sums: dict[float, Tensor] = field(default_factory=dict)


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
        temperatures: Those of `Batch.log_sums`. With them a loss needs the target's logits of drafted tokens only.
    """

    def __init__(
        self,
        target: Target,
        groups: Sequence[Rows],
        keep: Path | torch.device,
        generator: torch.Generator,
        temperatures: Sequence[float] = (),
    ) -> None:
        self._temperatures = temperatures
        self._kept: list[dict[str, Tensor] | Path] = []
        self._device, self._generator = target.device, generator
        token_bytes = 2 * (len(target.boundaries) + 1) * target.embedding.shape[1]
        for rows in groups:
            order = torch.randperm(len(rows.ids), generator=generator)
            for picked in order.split(max(1, CHUNK_BYTES // (token_bytes * rows.ids.shape[1]))):
                stays = keep if isinstance(keep, torch.device) else torch.device("cpu")
                chunk = _read(target, rows[picked], stays, temperatures)
                self._kept.append(_keep(chunk, keep, len(self._kept)))
                LOGGER.info("the target has read %d chunks", len(self._kept))

    def batches(self, batch_tokens: int) -> Iterator[Batch]:
        """Yields batches of about `batch_tokens` tokens without end, chunks and their rows in a new order each time."""
        while True:
            for index in torch.randperm(len(self._kept), generator=self._generator).tolist():
                kept = self._kept[index]
                chunk = load_file(kept) if isinstance(kept, Path) else kept
                rows, length = chunk["ids"].shape
                count = -(-rows // max(1, batch_tokens // length))  # batches of one size: no small one takes a step
                for picked in torch.randperm(rows, generator=self._generator).tensor_split(count):
                    here = picked.to(chunk["ids"].device)
                    yield self._batch({name: tensor[here] for name, tensor in chunk.items()})

    def _batch(self, chunk: dict[str, Tensor]) -> Batch:
        ids = chunk["ids"].to(self._device)
        places = torch.arange(ids.shape[1], device=ids.device)
        text = places < chunk["lengths"].to(ids.device)[:, None]
        if "begins" in chunk:
            text &= places >= chunk["begins"].to(ids.device)[:, None]
        sums = {temperature: chunk[_sum_name(temperature)].to(ids.device) for temperature in self._temperatures}
        return Batch(ids, text, chunk["features"].to(ids.device), chunk["last"].to(ids.device), sums)


def _sum_name(temperature: float) -> str:
    return f"log_sum_{temperature}"


def _read(target: Target, rows: Rows, device: torch.device, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """The tensors of a chunk, on `device`: states never go through another memory."""
    features, last = [], []
    sums: dict[str, list[Tensor]] = {_sum_name(temperature): [] for temperature in temperatures}
    for ids in rows.ids.split(max(1, PASS_TOKENS // rows.ids.shape[1])):
        reading = target.read(ids.to(target.device))
        features.append(reading.features.to(device, torch.bfloat16))
        kept = reading.last.to(torch.bfloat16)
        last.append(kept.to(device))
        if temperatures:
            logits = target.logits(kept)  # of the rounded states, which the loss reads
            for temperature, found in zip(temperatures, sums.values(), strict=True):
                found.append((logits / temperature).logsumexp(-1).to(device))
    known = {"ids": rows.ids, "lengths": rows.lengths}
    if rows.begins is not None:
        known["begins"] = rows.begins
    states = {"features": torch.cat(features), "last": torch.cat(last)}
    states |= {name: torch.cat(found) for name, found in sums.items()}
    return {name: tensor.to(device) for name, tensor in known.items()} | states


def _keep(chunk: dict[str, Tensor], keep: Path | torch.device, index: int) -> dict[str, Tensor] | Path:
    if isinstance(keep, torch.device):
        return chunk
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"chunk-{index:05}.safetensors"
    save_file(chunk, path)
    return path
