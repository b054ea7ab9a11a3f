"""The law of whole decodes with a head of fewer ids than its target, by enumeration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastspec.kernels.ops import TORCH_OPS
from fastspec.proposers import draft_model
from fastspec.proposers.heads import Eagle3Drafts
from fastspec.shapes import ForwardBatch, Tiling
from fastspec.step import StepModules
from tests.helpers.tables import TableModel
from tests.step import test_step_law
from tests.step.test_step_law import TOLERANCE, VOCAB, compare

DRAFTED = torch.tensor([3, 0, 2])  # the target's ids of the head's


class TableTarget(TableModel):
    """A target whose hidden state behind any layer is the token fed."""

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return self.hidden(rows), rows.ids[:, :, None, None].double()


class TableHead:
    """A head whose logits are a table of (position and token that follow what it read), in its own ids."""

    head = SimpleNamespace(kept=(2,), readings=((1,),), target=SimpleNamespace(vocab_size=VOCAB, layers=1))
    vocab_size = len(DRAFTED)

    def __init__(self, logits: Tensor) -> None:
        self.table = logits[..., DRAFTED]

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        return features[:, :, 0]

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        return self.drafted(g, rows).double()

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        return made.long()

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        return torch.stack((rows.positions + 1, rows.ids), dim=-1)

    def logits(self, x: Tensor, tiling: Tiling) -> Tensor:
        return self.table[x[..., 0].clamp(max=len(self.table) - 1), x[..., 1]]

    def feature(self, x: Tensor) -> Tensor:
        return x


def head_modules(target: Tensor, draft: Tensor | None, shared: int | None = None, context: int = 1000) -> StepModules:
    assert draft is not None
    drafts = Eagle3Drafts(TableHead(draft), TORCH_OPS, DRAFTED)  # type: ignore[arg-type]
    return StepModules(TableTarget(target), drafts, features=torch.zeros(100000, 2, dtype=torch.float64))


@pytest.fixture(autouse=True)
def with_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_step_law, "table_modules", head_modules)


@pytest.mark.parametrize("stop_ids", [[], [3, 1]], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_decodes_follow_the_targets_law(k: int, stop_ids: list[int]) -> None:
    found = compare(seed=20 + k, k=k, limit=5, stop_ids=stop_ids, temperature=1.0, shared=VOCAB)
    assert found < TOLERANCE


def test_the_enumeration_catches_a_law_in_the_heads_own_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts named right, and judged by a law that is somewhere else in the vocabulary."""

    def unmoved(self: draft_model.VocabMap, logits: Tensor) -> Tensor:
        wide = logits.new_full((*logits.shape[:-1], VOCAB), -torch.inf)
        wide[..., : logits.shape[-1]] = logits
        return wide

    monkeypatch.setattr(draft_model.VocabMap, "in_target_ids", unmoved)
    assert compare(seed=21, k=1, limit=5, stop_ids=[], temperature=1.0, shared=VOCAB) < TOLERANCE, "another law, exact"
    original = Eagle3Drafts.propose

    def judged_by_another(self: Eagle3Drafts, state: object, shape: object, draws: object, **features: Tensor) -> None:
        original(self, state, shape, draws, **features)  # type: ignore[arg-type]
        state.draft_probs.copy_(state.draft_probs.roll(1, -1))  # type: ignore[attr-defined]

    monkeypatch.setattr(Eagle3Drafts, "propose", judged_by_another)
    assert compare(seed=21, k=1, limit=5, stop_ids=[], temperature=1.0, shared=VOCAB) > 1e-3
