"""A draft whose ids are other ones than the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.models.decoder import Decoder
from fastspec.proposers.draft_model import DraftModel, VocabMap
from fastspec.sampling.rules import MODES
from fastspec.scheduling.scheduler import Request
from tests.helpers.devices import devices
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.helpers.variants import judging, proposing
from tests.scheduling.test_scheduler import prompts, run, sampled_row, texts


def renamed(engine: Engine, order: Tensor, target_ids: Tensor) -> Engine:
    """Draft id i is what `order[i]` was; the map says that it is target id `target_ids[i]`."""
    model = engine.modules.proposer
    assert isinstance(model, DraftModel)
    draft = model.model
    assert isinstance(draft, Decoder)
    order = order.to(draft.weights.norm.device)
    embed, head = (draft.ops.store(w.unpack()[order], False) for w in (draft.weights.embed, draft.weights.head))
    held = replace(draft.weights, embed=embed, head=head)
    spec = replace(draft.spec, vocab_size=len(order))
    other = Decoder(
        spec, held, draft.cache, draft.ops, max_positions=draft._tables[0][0].shape[0], batch=4, max_queries=5
    )
    mapped = DraftModel(
        other,
        model.ops,
        VOCAB,
        model.max_length,
        work=engine.modules.work,
        vocab_map=VocabMap.of(target_ids.to(order.device), VOCAB),
    )
    return proposing(engine, mapped)


def told(requests: list[Request]) -> list[tuple[list[int], int]]:
    return [(request.new_tokens, request.accepted) for request in requests]


ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", devices())
def test_a_permuted_draft_drafts_as_before(device: str) -> None:
    rows = prompts(5, seed=6)
    before = run(tiny_engine(device=device, same=True), rows, 20)
    after = run(renamed(tiny_engine(device=device, same=True), ORDER, ORDER), rows, 20)
    assert told(after) == told(before)
    assert sum(request.accepted for request in after) == sum(request.drafted for request in after) > 0
    wrong = run(renamed(tiny_engine(device=device, same=True), ORDER, torch.arange(VOCAB)), rows, 20)
    assert texts(wrong) == texts(before)
    assert sum(request.accepted for request in wrong) < sum(request.drafted for request in wrong) / 2


@pytest.mark.parametrize("mode", MODES)
def test_sampled_rows_draft_as_before(mode: str) -> None:
    rows, options = prompts(3, seed=7), [sampled_row(seed) for seed in range(3)]
    before = run(judging(tiny_engine(same=True), mode), rows, 12, options=options)
    after = run(judging(renamed(tiny_engine(same=True), ORDER, ORDER), mode), rows, 12, options=options)
    assert told(after) == told(before)


def test_a_draft_with_fewer_ids_in_another_order_changes_no_text() -> None:
    """Most of the target's ids, in another order, and one id that the target does not have."""
    order = ORDER[5:]
    target_ids = order.clone()
    target_ids[3] = -1
    rows = prompts(4, seed=8)
    requests = run(renamed(tiny_engine(same=True), order, target_ids), rows, 30)
    assert texts(requests) == texts(run(tiny_engine(), rows, 30, k=0))
    assert 0 < sum(request.accepted for request in requests) < sum(request.drafted for request in requests)


def test_both_directions_of_a_map() -> None:
    made = VocabMap.of(torch.tensor([4, -1, 0]), 6)
    assert made.to_draft.tolist() == [2, 0, 0, 0, 0, 0]
    assert made.in_target_ids(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[3.0, *[-torch.inf] * 3, 1.0, -torch.inf]]
    for bad in ([1, 1], [6, 0]):
        with pytest.raises(ValueError, match="must name different target ids below 6"):
            VocabMap.of(torch.tensor(bad), 6)
