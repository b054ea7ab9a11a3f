"""A run of TRL's GRPOTrainer: the shipped pair's target learns a toy reward on a CPU. `perf training --tasks grpo`.

The reward is how often "e" comes. The run is made without a draft and with the shipped one. Needs the package trl.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastspec import demo_pair
from fastspec.integrations.trl import rollout
from perf.records import Row

ROWS, COPIES, NEW = 16, 8, 16  # rows of a step, rows of a prompt, tokens of a row
PROMPTS = ("def f(x):\n", "import os\n", "class A:\n", "for i in x:\n")


@dataclass(slots=True)
class Run:
    """What a run of the trainer gave.

    Attributes:
        rewards: mean reward of each step.
        versions: version of the weights that drew each step's texts.
        texts: ids of all texts.
        rollout_s: seconds of all rollouts.
        seconds: seconds of the whole.
        trainer: the trainer, when it has ended.
    """

    rewards: list[float] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    rollout_s: float = 0.0
    seconds: float = 0.0
    trainer: Any = None

    def reward(
        self, completions: list[str], completion_ids: list[list[int]], weight_version: list[Any], **more: Any
    ) -> list[float]:
        """The number of letters "e" of each text, by the tokens it may have."""
        found = [text.count("e") / NEW for text in completions]
        self.rewards.append(sum(found) / len(found))
        self.versions.append(weight_version[0])
        self.texts += completion_ids
        return found


def train(draft: str | None, steps: int) -> Run:
    """Trains the shipped pair's target from its stored weights. Two calls differ in the draft alone."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    run, target = Run(), str(demo_pair()[0])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    draw = rollout(draft)

    def timed(prompts: Any, trainer: Any) -> Any:
        start = time.perf_counter()
        drawn = draw(prompts, trainer)
        run.rollout_s += time.perf_counter() - start
        return drawn

    with tempfile.TemporaryDirectory() as scratch:
        args = trl.GRPOConfig(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            num_generations=COPIES,
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
        run.trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32),
            reward_funcs=run.reward,
            args=args,
            train_dataset=datasets.Dataset.from_dict({"prompt": [*PROMPTS] * 8}),
            processing_class=tokenizer,
            rollout_func=timed,
        )
        run.trainer.rollouts = draw
        start = time.perf_counter()
        run.trainer.train()
        run.seconds = time.perf_counter() - start
    return run


def curves(steps: int) -> Iterator[Row]:
    """A row of each run, with the reward of each step."""
    plain = None
    for k, draft in ((0, None), (4, str(demo_pair()[1]))):
        run = train(draft, steps)
        plain = plain or run
        yield {
            "bench": "grpo",
            "case": f"grpo, {steps} steps of {ROWS} rows of {NEW} tokens",
            "engine": f"fastspec k={k}",
            "batch": ROWS,
            "new": NEW,
            "k": k,
            "seconds": round(run.seconds, 2),
            "rollout_s": round(run.rollout_s, 2),
            "rewards": run.rewards,
            "texts_equal": run.texts == plain.texts and run.rewards == plain.rewards,
            "status": "ok",
        }
