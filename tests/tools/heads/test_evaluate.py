"""What `decode` counts is what speculative decoding accepts, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.head_by_hand import drafts_by_hand
from tests.helpers.tiny_targets import VOCAB, tiny_model
from tools.heads.evaluate import Steps, decode, draft_with, draft_with_model
from tools.heads.export import load, save
from tools.heads.recipe import Recipe
from tools.heads.rows import Chunks, Rows
from tools.heads.target import Target
from tools.heads.train import make_head, train

PLACES, NEW = 3, 24


def prompts(count: int) -> Tensor:
    return torch.randint(VOCAB, (count, 6), generator=torch.Generator().manual_seed(8))


def speculate_by_hand(text: list[int], prompt: int, drafts_after: object) -> list[int]:
    """Accepted tokens of each greedy step over a text, the first new token being the target's own."""
    counts, known = [], prompt + 1
    while known + PLACES < len(text):
        drafted = drafts_after(text[:known])  # type: ignore[operator]
        count = 0
        while count < PLACES and drafted[count] == text[known + count]:
            count += 1
        counts.append(count)
        known += count + 1
    return counts


def test_steps_of_a_head_are_those_taken_by_hand(tmp_path: Path) -> None:
    target, generator = Target(tiny_model("llama"), (2, 4, 6)), torch.Generator().manual_seed(2)
    rows = Rows(*target.write(prompts(16), NEW, 0.0))
    recipe = Recipe(steps=60, batch_tokens=480, lr=5e-3, warmup=5, ema=0.8, unroll=PLACES)
    head = make_head(target, torch.arange(VOCAB), recipe)
    train(head, target, Chunks(target, [rows], torch.device("cpu"), generator).batches(480), recipe)
    save(head, target.model.config, target.boundaries, tmp_path)
    steps = decode(target, draft_with(load(tmp_path)[0], target), prompts(4), NEW, PLACES, 0.0)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())

    def drafts_after(known: list[int]) -> list[int]:
        features = target.read(torch.tensor([known])).features[0, :-1]
        return drafts_by_hand(tensors, config, target.embedding, features, known, PLACES)

    texts, _ = target.write(prompts(4), NEW, 0.0)
    assert steps.accepted == [speculate_by_hand(text, 6, drafts_after) for text in texts.tolist()]
    assert 0 < sum(map(sum, steps.accepted)) < PLACES * sum(map(len, steps.accepted))  # some are, and not all


def blurred(model: torch.nn.Module, noise: float) -> torch.nn.Module:
    """The model with noise on its output head: a draft model that is right at times."""
    again = tiny_model("llama")
    again.load_state_dict(model.state_dict())
    torch.manual_seed(6)
    again.lm_head.weight.data += noise * torch.randn_like(again.lm_head.weight)
    return again


def test_steps_of_a_draft_model_are_those_taken_by_hand() -> None:
    target = Target(tiny_model("llama"), (1, 2, 3))
    draft = blurred(target.model, 0.1)
    steps = decode(target, draft_with_model(draft), prompts(8), NEW, PLACES, 0.0)

    def drafts_after(known: list[int]) -> list[int]:
        for _ in range(PLACES):
            known = [*known, int(draft(input_ids=torch.tensor([known])).logits[0, -1].argmax())]
        return known[-PLACES:]

    texts, _ = target.write(prompts(8), NEW, 0.0)
    assert steps.accepted == [speculate_by_hand(text, 6, drafts_after) for text in texts.tolist()]
    assert 0 < sum(map(sum, steps.accepted)) < PLACES * sum(map(len, steps.accepted))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draft_with_the_targets_law_is_always_accepted(temperature: float) -> None:
    target = Target(tiny_model("llama"), (1, 2, 3))
    torch.manual_seed(1)
    steps = decode(target, draft_with_model(target.model), prompts(4), NEW, PLACES, temperature)
    assert {count for counts in steps.accepted for count in counts} == {PLACES}


def test_sampled_acceptance_is_the_overlap_of_the_laws() -> None:
    target = Target(tiny_model("llama"), (1, 2, 3))
    draft = blurred(target.model, 0.2)
    torch.manual_seed(1)
    steps = decode(target, draft_with_model(draft), prompts(256), 2 + PLACES, PLACES, 0.8)
    assert all(len(counts) == 1 for counts in steps.accepted)
    with torch.no_grad():
        torch.manual_seed(1)
        texts = torch.cat([target.write(part, 2 + PLACES, 0.8)[0] for part in prompts(256).split(16)])
        p, q = ((model(input_ids=texts).logits[:, 6] / 0.8).softmax(-1) for model in (target.model, draft))
    wanted = torch.minimum(p, q).sum(-1)
    deviation = (wanted * (1 - wanted)).sum().sqrt().item() / 256
    found = steps.figures()["accepted_at_least"][0]  # type: ignore[index]
    assert 0.2 < wanted.mean() < 0.8
    assert abs(found - wanted.mean().item()) < 4 * deviation


def test_figures_count_steps_and_bound_them() -> None:
    figures = Steps([[2, 0], [1, 1, 2]], 2).figures()
    assert (figures["steps"], figures["tokens_per_step"], figures["accepted_at_least"]) == (5, 2.2, [0.8, 0.4])
    low, high = figures["tokens_per_step_95"]  # type: ignore[misc]
    assert low == 2.0  # the first text alone
    assert high == pytest.approx(1 + 4 / 3, abs=1e-4)  # the second alone
