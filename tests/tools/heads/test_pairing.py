"""A head learns from feature i beside token i + 1, and drafts from published tensors what it learned."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.head_by_hand import drafts_by_hand, laws_by_hand
from tests.helpers.tiny_targets import VOCAB, PairModel, tiny_model
from tools.heads.export import save
from tools.heads.head import Eagle3Head, Past
from tools.heads.recipe import Recipe
from tools.heads.rows import Chunks, Rows
from tools.heads.target import Target
from tools.heads.train import make_head, train

PLACES = 3


def test_chains_from_every_position_are_the_chains_by_hand() -> None:
    target = Target(tiny_model("llama"), (1, 3, 6))
    drafted = torch.arange(0, VOCAB, 2)
    head = make_head(target, drafted, Recipe())
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    features = target.read(ids).features
    said = head.unroll(features, ids, target.embedding, PLACES)
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 5000.0,
        "rms_norm_eps": target.model.config.rms_norm_eps,
        "vocab_size": VOCAB,
    }
    for row in range(2):
        for start in range(ids.shape[1] - PLACES):
            known, fed = ids[row, : start + 2].tolist(), ids[row, start + 2 :].tolist()
            fed = [*fed, 0]  # what follows the last place is not looked at
            by_hand = laws_by_hand(
                head.state_dict(), config, target.embedding, features[row, : start + 1], known, PLACES, fed
            )
            for place in range(PLACES):
                # float32 against float64, over one layer of small numbers
                torch.testing.assert_close(
                    said[place][row, start].double(), by_hand[place][drafted], rtol=1e-4, atol=1e-4
                )


def learn_pairs(model: PairModel, folder: Path) -> None:
    """Trains a head on random text, whose laws the model gives, and writes it."""
    target = Target(model, (1, 2, 3))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(2)
    rows = Rows(torch.randint(12, (256, 64), generator=generator), torch.full((256,), 64))
    recipe = Recipe(steps=250, batch_tokens=512, lr=2e-2, warmup=10, ema=0.9, unroll=PLACES)
    head = make_head(target, torch.arange(12), recipe)
    train(head, target, Chunks(target, [rows], torch.device("cpu"), generator).batches(recipe.batch_tokens), recipe)
    save(head, model.config, target.boundaries, folder)  # type: ignore[arg-type]


def accepted(model: PairModel, folder: Path) -> list[float]:
    """Share of starts whose chain by hand is right at least so far, over greedy text."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    right = []
    for first in range(12):
        text = model.text(first, (5 * first + 1) % 12, 12)
        features = model.embedding(torch.tensor(text)).repeat(1, 3).detach()
        for known in range(2, 12 - PLACES):
            drafted = drafts_by_hand(
                tensors, config, model.embedding.weight.detach(), features[: known - 1], text[:known], PLACES
            )
            right.append([drafted[: place + 1] == text[known : known + place + 1] for place in range(PLACES)])
    return torch.tensor(right).double().mean(0).tolist()


def test_a_head_learns_a_law_of_two_tokens(tmp_path: Path) -> None:
    model = PairModel()
    learn_pairs(model, tmp_path)
    assert min(accepted(model, tmp_path)) >= 0.95


def test_learning_with_the_wrong_pairing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Eagle3Head.unroll

    def feature_beside_its_own_token(
        head: Eagle3Head, features: Tensor, ids: Tensor, embedding: Tensor, passes: int
    ) -> list[Tensor]:
        return right(head, features, ids.roll(1, 1), embedding, passes)

    monkeypatch.setattr(Eagle3Head, "unroll", feature_beside_its_own_token)
    model = PairModel()
    learn_pairs(model, tmp_path)
    assert max(accepted(model, tmp_path)) < 0.5


def test_learning_towards_the_law_of_another_position_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Target.logits
    monkeypatch.setattr(Target, "logits", lambda target, last: right(target, last.roll(1, -2)))
    monkeypatch.setattr(Target, "_check_head", lambda target: None)
    model = PairModel()
    learn_pairs(model, tmp_path)
    assert max(accepted(model, tmp_path)) < 0.5


def test_a_start_sees_neither_later_positions_nor_other_chains() -> None:
    past = Past()
    generator = torch.Generator().manual_seed(4)
    first, second = (torch.randn(1, 1, 5, 8, generator=generator) for _ in range(2))
    past.keys, past.values = [first, second], [first, second]
    before = past.attend(second)
    changed = [tensor.clone() for tensor in (first, second)]
    changed[0][:, :, 3:] += 1
    changed[1][:, :, [0, 1, 3, 4]] += 1
    past.keys = past.values = changed
    assert torch.equal(past.attend(second)[:, :, 2], before[:, :, 2])
    assert not any(torch.equal(past.attend(second)[:, :, start], before[:, :, start]) for start in (0, 1, 3, 4))


def test_batches_go_on_without_end_and_bring_every_row_once_a_pass() -> None:
    target = Target(tiny_model("llama"), (1, 2, 3))
    rows = Rows(torch.arange(10)[:, None].repeat(1, 4), torch.tensor([4, 3] * 5))
    batches = Chunks(target, [rows], torch.device("cpu"), torch.Generator().manual_seed(1)).batches(16)
    drawn = list(islice(batches, 6))
    assert [batch.ids[:, 0].tolist() for batch in drawn[:3]] != [batch.ids[:, 0].tolist() for batch in drawn[3:]]
    for one_pass in (drawn[:3], drawn[3:]):
        assert sorted(first for batch in one_pass for first in batch.ids[:, 0].tolist()) == list(range(10))
    for batch in drawn:
        assert batch.text.sum(1).tolist() == [4 - first % 2 for first in batch.ids[:, 0].tolist()]
        reading = target.read(batch.ids)
        assert torch.equal(batch.features, reading.features.bfloat16())
        assert torch.equal(batch.last, reading.last.bfloat16())
