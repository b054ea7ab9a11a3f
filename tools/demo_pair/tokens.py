"""From documents to token ids: the tokenizer, and the rows that training and measurement read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from .corpus import Document

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Learns a byte-level BPE whose id 0 is the end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Tensor]:
    """Encodes each document as int32 ids [length], led by the end of text that parts it from the last."""
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return [torch.tensor([END_OF_TEXT_ID, *encoding.ids], dtype=torch.int32) for encoding in encodings]


def cut_rows(stream: Tensor, length: int) -> Tensor:
    """Cuts a stream [n] into whole rows [n // length, length], leaving out what is left over."""
    return stream[: len(stream) // length * length].view(-1, length)


def random_windows(stream: Tensor, count: int, length: int) -> Tensor:
    """Picks windows at random places of a stream: int64 [count, length]."""
    starts = torch.randint(len(stream) - length + 1, (count, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs documents into rows, in a new random order on each pass.

    Attributes:
        library: Encoded documents that every pass reads.
        tests: Encoded test documents; test suites are long and repetitive.
        test_share: Share of the test documents that one pass reads, drawn anew each time.
        device: Where the rows go.
    """

    library: list[Tensor]
    tests: list[Tensor]
    test_share: float
    device: torch.device

    def batches(self, batch: int, length: int) -> Iterator[Tensor]:
        """Yields int64 rows [batch, length] without end."""
        while True:
            rows = cut_rows(self._one_pass(length), length)
            rows = rows[torch.randperm(len(rows), device=self.device)]
            if len(rows) < batch:
                rows = rows.repeat(-(-batch // len(rows)), 1)
            for start in range(0, len(rows) - batch + 1, batch):
                yield rows[start : start + batch].long()

    def _one_pass(self, length: int) -> Tensor:
        chosen = torch.randperm(len(self.tests))[: round(self.test_share * len(self.tests))]
        documents = self.library + [self.tests[index] for index in chosen.tolist()]
        order = torch.randperm(len(documents)).tolist()
        stream = torch.cat([documents[index] for index in order])
        # A random start moves the cuts: a document is not split at the same place every time.
        return stream[int(torch.randint(length, ())) :].to(self.device)
