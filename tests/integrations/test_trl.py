"""TRL's GRPOTrainer, the real one, with rollouts of fastspec: the reward rises, equally with and without drafts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="runs with `make test-integrations`")

from fastspec import FastSpecGenerator, demo_pair
from perf.grpo import ROWS, train

STEPS = 20
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def runs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train(draft, STEPS) for draft in (None, str(demo_pair()[1]))]


def test_the_reward_rises(runs: Any) -> None:
    run = runs[1]
    assert len(run.rewards) == STEPS
    assert run.versions == list(range(STEPS)), "every rollout has the weights of its step"
    assert len(run.texts) == STEPS * ROWS
    assert sum(run.rewards[-5:]) > 1.5 * sum(run.rewards[:5])


def test_drafts_change_nothing(runs: Any) -> None:
    plain, drafted = runs
    assert plain.rewards == drafted.rewards
    assert plain.texts == drafted.texts
    weights = (run.trainer.model.parameters() for run in runs)
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    generator: FastSpecGenerator = drafted.trainer.rollouts._generator
    stats = generator.generate([[5, 6]], max_new_tokens=8, return_dict_in_generate=True).stats
    assert stats.drafted > 0
