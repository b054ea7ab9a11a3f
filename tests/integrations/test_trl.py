"""TRL's GRPOTrainer, the real one, with rollouts of fastspec: the reward rises, equally with and without drafts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl", reason="runs with `make test-integrations`")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fastspec import FastSpecGenerator, demo_pair
from fastspec.integrations.trl import rollout

TARGET, DRAFT = map(str, demo_pair())
STEPS, ROWS, NEW = 20, 16, 16
pytestmark = pytest.mark.filterwarnings("ignore")


def train(path: Path, draft: str | None, steps: int = STEPS) -> tuple[list[float], list[Any], list[list[int]], Any]:
    """(mean reward of each step, versions, completions, trainer) of a run."""
    rewards: list[float] = []
    versions: list[Any] = []
    texts: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], weight_version: list[Any], **more: Any) -> Any:
        found = [text.count("e") / NEW for text in completions]
        rewards.append(sum(found) / len(found))
        versions.append(weight_version[0])
        texts.extend(completion_ids)
        return found

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    args = GRPOConfig(
        output_dir=str(path),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        num_generations=8,
        max_completion_length=NEW,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        seed=1,
        beta=0.0,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["def f(x):\n", "import os\n", "class A:\n", "for i in x:\n"] * 8}),
        processing_class=tokenizer,
        rollout_func=rollout(draft),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return rewards, versions, texts, trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return [train(tmp_path_factory.mktemp("run"), draft) for draft in (None, DRAFT)]


def test_the_reward_rises(runs: Any) -> None:
    rewards, versions, texts, _ = runs[1]
    assert len(rewards) == STEPS
    assert versions == list(range(STEPS)), "every rollout has the weights of its step"
    assert len(texts) == STEPS * ROWS
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


def test_drafts_change_nothing(runs: Any) -> None:
    plain, drafted = runs
    assert plain[0] == drafted[0]
    assert plain[2] == drafted[2]
    for one, other in zip(plain[3].model.parameters(), drafted[3].model.parameters(), strict=True):
        assert torch.equal(one, other)
    generator: FastSpecGenerator = drafted[3].rollout_func._generator
    stats = generator.generate([[5, 6]], max_new_tokens=8, return_dict_in_generate=True).stats
    assert stats.drafted > 0
