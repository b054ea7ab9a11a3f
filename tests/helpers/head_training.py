"""Training of a small head with tools.heads, on text that its target writes."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.tiny_targets import VOCAB
from tools.heads.head import DraftHead
from tools.heads.recipe import Recipe
from tools.heads.rows import Chunks, Rows
from tools.heads.target import Target
from tools.heads.train import History, choose_drafted, make_head, train

DRAFTED = 40  # of the 48 tokens


def prompts() -> Tensor:
    return torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(8))


def trained_head(target: Target, recipe: Recipe, new: int) -> tuple[DraftHead, History]:
    """A head that drafts DRAFTED ids, trained on answers of `new` tokens, and how its training went."""
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(2)
    rows = Rows(*target.write(prompts(), new, 0.0))
    head = make_head(target, choose_drafted([rows], VOCAB, DRAFTED), recipe)
    batches = Chunks(target, [rows], torch.device("cpu"), generator).batches(recipe.batch_tokens)
    return head, train(head, target, batches, recipe)
