"""The two models of a workload, made or loaded once for all that is measured on them, and the run of a case on them."""

from __future__ import annotations

import argparse
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastspec import FastSpecGenerator, demo_pair
from perf.experiment import Say, law
from perf.pairs import plant
from perf.prompts import code_prompts
from perf.records import Row
from perf.workloads import ACCEPTED, OWN, SHIPPED, WORKLOADS

SEED = 1234  # of sampled calls
Prompts = list[list[list[int]]]  # one batch a call


@dataclass(frozen=True, slots=True)
class Run:
    """The calls of one case.

    Attributes:
        target, draft: as FastSpecGenerator takes them: directories or live modules. No draft: None.
        batches: prompts of each call, all of one length.
        new: tokens per prompt.
        ks: drafts per step; 0 is plain decoding, and always measured.
        sampled: True if drawn at temperature 1 from the whole vocabulary, else greedy.
        device, dtype: of the generators.
        max_length: of the generators; None: just the room that prompts and new tokens take.
    """

    target: Any
    draft: Any
    batches: Prompts
    new: int
    ks: tuple[int, ...]
    sampled: bool
    device: str
    dtype: torch.dtype
    max_length: int | None = None

    def options(self, call: int) -> dict[str, Any]:
        """Keywords of a call of `generate`."""
        return {**law(self.sampled, SEED + call), "eos_token_id": None, "pad_token_id": 0}


def generator_of(run: Run, *, k: int, exact: bool = True, nvtx: bool = False) -> FastSpecGenerator:
    """A generator for up to k drafts, with just the room that the run needs if the run names none."""
    needed = max(len(prompt) for batch in run.batches for prompt in batch) + run.new
    # every call computes its prompts, with the draft as it is stored; an older base of a gate may lack an option
    known, wanted = inspect.signature(FastSpecGenerator).parameters, {"prefix_cache": False, "draft_quantization": None}
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    return FastSpecGenerator(
        run.target,
        run.draft if k else None,
        num_speculative_tokens=k,
        max_batch_size=max(len(batch) for batch in run.batches),
        max_length=run.max_length or needed,
        dtype=run.dtype,
        device=run.device,
        exact=exact,
        nvtx=nvtx,
        progress=False,
        **options,
    )


@dataclass(slots=True)
class Models:
    """Two models, ready for every engine.

    Attributes:
        workload: their name.
        directories: of both on disk; None if they are only live. The draft's may be None.
        prompts: gives so many lists of ids of such a length.
        configs: of both; no draft: None.
        report: how the pair was made.
        dtype, device: of live models.
    """

    workload: str
    directories: tuple[Path, Path | None] | None
    prompts: Callable[[int, int], list[list[int]]]
    configs: tuple[PretrainedConfig, PretrainedConfig | None]
    report: Row
    dtype: torch.dtype
    device: str
    _live: list[PreTrainedModel]

    @property
    def live(self) -> list[PreTrainedModel]:
        """transformers models: target and, if there is one, draft. Loaded when first asked for."""
        if not self._live and self.directories:
            found: Any = (AutoModelForCausalLM.from_pretrained(str(d), dtype=self.dtype) for d in self.directories if d)
            self._live = [model.to(self.device).eval() for model in found]
        return self._live

    @property
    def sources(self) -> tuple[Any, Any]:
        """Target and draft as FastSpecGenerator takes them: directories if there are any, else live models."""
        return self.directories or (self._live[0], self._live[1])

    def let_go(self) -> None:
        """Drops the weights of live models, which a generator has copied or which lie on disk."""
        for model in self._live:
            for parameter in model.parameters():
                parameter.data = parameter.new_empty(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(
        self, batches: Prompts, *, new: int, ks: tuple[int, ...], sampled: bool, max_length: int | None = None
    ) -> Run:
        """The run of these prompts, from disk if the models lie there: a start then is one that a user waits for."""
        return Run(*self.sources, batches, new, ks, sampled, self.device, self.dtype, max_length)


@contextmanager
def open_models(
    workload: str,
    *,
    device: str,
    acceptance: float = ACCEPTED,
    seed: int = 0,
    target: Path | None = None,
    draft: Path | None = None,
    save: bool = False,
    say: Say = lambda _: None,
) -> Iterator[Models]:
    """Makes or loads the pair.

    Args:
        workload: name of it.
        device: of live models.
        acceptance, seed: of a planted pair.
        target, draft: checkpoints of the user's own; they replace the workload.
        save: True to write checkpoints too, for engines that take no live models; removed when the context is left.
        say: told of progress.
    """
    if target is not None or workload == SHIPPED:
        yield stored(target, draft, device) if target is not None else stored(*demo_pair(), device, SHIPPED)
        return
    with tempfile.TemporaryDirectory() as scratch:
        pair = plant(WORKLOADS[workload], acceptance=acceptance, seed=seed, device=device)
        say(f"planted: {pair.report}")
        directories = pair.save(Path(scratch)) if save else None
        live, dtype = [pair.target, pair.draft], WORKLOADS[workload].dtype
        configs = (pair.target.config, pair.draft.config)
        yield Models(workload, directories, pair.prompts, configs, pair.report, dtype, device, live)
        live.clear()
    del pair
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def opened(
    given: argparse.Namespace, *, save: bool = False, say: Say = lambda _: None
) -> AbstractContextManager[Models]:
    """`open_models` by the options of a command (`add_pair_options`)."""
    names = ("workload", "device", "acceptance", "seed", "target", "draft")
    return open_models(**{name: getattr(given, name) for name in names}, save=save, say=say)


def stored(target: Path, draft: Path | None, device: str, workload: str = OWN) -> Models:
    """Checkpoints on disk, prompted with source code. No row names their path."""
    configs: list[Any] = [AutoConfig.from_pretrained(str(place)) if place else None for place in (target, draft)]
    dtype = WORKLOADS[SHIPPED].dtype if workload == SHIPPED else getattr(configs[0], "dtype", None) or torch.bfloat16
    report: Row = {"pair": workload}
    for role, config in zip(("target", "draft"), configs, strict=True):
        if workload == OWN and config is not None:
            report[role] = f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}"
    prompts = partial(code_prompts, target)
    return Models(workload, (target, draft), prompts, (configs[0], configs[1]), report, dtype, device, [])


def add_pair_options(made: argparse.ArgumentParser, workload: str | None) -> None:
    """Adds the options that choose a pair of models."""
    made.add_argument("--workload", choices=sorted(WORKLOADS.keys() - {OWN}), default=workload, help="a named pair")
    made.add_argument("--target", type=Path, help="a checkpoint of your own, in place of a workload")
    made.add_argument("--draft", type=Path, help="its draft")
    made.add_argument("--acceptance", type=float, default=ACCEPTED, help="of a planted pair")
    made.add_argument("--seed", type=int, default=0, help="of a planted pair")


def batches_of(prompts: list[list[int]], batch: int) -> Prompts:
    """Prompts in batches; those left over are left out.

    Raises:
        ValueError: there is not one whole batch.
    """
    if len(prompts) < batch:
        raise ValueError(f"{len(prompts)} prompts make no batch of {batch}")
    return [prompts[start : start + batch] for start in range(0, len(prompts) - batch + 1, batch)]
