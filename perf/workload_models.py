"""The two models of a workload, made or loaded once for all that is measured on them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastspec import demo_pair
from perf.e2e import Run
from perf.pairs import plant
from perf.prompts import code_prompts
from perf.records import Row
from perf.workloads import WORKLOADS

SHIPPED = "shipped"


@dataclass(frozen=True, slots=True)
class Models:
    """Two models, ready for every engine.

    Attributes:
        workload: their name.
        target, draft: live transformers models. directories: of the same on disk, where they were written.
        prompts: gives so many lists of ids of such a length.
        configs: of both.
        report: how the pair was made.
    """

    workload: str
    target: PreTrainedModel
    draft: PreTrainedModel
    directories: tuple[Path, Path] | None
    prompts: Callable[[int, int], list[list[int]]]
    configs: tuple[PretrainedConfig, PretrainedConfig]
    report: Row

    def run(
        self,
        batches: list[list[list[int]]],
        *,
        new: int,
        ks: tuple[int, ...],
        sampled: bool,
        device: str,
        max_length: int | None = None,
    ) -> Run:
        """What is measured, from disk where the models lie there: starting up is then what a user waits for."""
        target, draft = self.directories or (self.target, self.draft)
        return Run(target, draft, batches, new, ks, sampled, device, WORKLOADS[self.workload].dtype, max_length)


@contextmanager
def open_models(
    workload: str,
    *,
    acceptance: float,
    seed: int,
    device: str,
    save: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Models]:
    """Makes or loads the pair.

    Args:
        acceptance, seed: of a planted pair.
        save: also write checkpoints, for engines that take no live models; they go when the context is left.
    """
    if workload == SHIPPED:
        yield _shipped(device)
        return
    with tempfile.TemporaryDirectory() as scratch:
        pair = plant(WORKLOADS[workload], acceptance=acceptance, seed=seed, device=device)
        say(f"planted: {pair.report}")
        directories = pair.save(Path(scratch)) if save else None
        configs = (pair.target.config, pair.draft.config)
        yield Models(workload, pair.target, pair.draft, directories, pair.prompts, configs, pair.report)
    del pair
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _shipped(device: str) -> Models:
    directories = demo_pair()
    dtype = WORKLOADS[SHIPPED].dtype
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(str(place), dtype=dtype) for place in directories]
    target, draft = (model.to(device).eval() for model in models)
    configs = [AutoConfig.from_pretrained(str(place)) for place in directories]
    prompts = partial(code_prompts, directories[0])
    return Models(SHIPPED, target, draft, directories, prompts, (configs[0], configs[1]), {"pair": SHIPPED})


def batches_of(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """Prompts in batches; those left over are left out.

    Raises:
        ValueError: there is not one whole batch.
    """
    if len(prompts) < batch:
        raise ValueError(f"{len(prompts)} prompts make no batch of {batch}")
    return [prompts[start : start + batch] for start in range(0, len(prompts) - batch + 1, batch)]
