"""Kernels that calls with options launch, against those that a constructor compiles. Prints a JSON line.

Usage: python -m tests.helpers.option_kernels 90 4             the architecture, and drafts of a step
       python -m tests.helpers.option_kernels 90 4 FULL        without the steps of the list that sample
       python -m tests.helpers.option_kernels 90 4 early       sampled calls, against greedy and early steps
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.engine import build, settings
from fastspec.engine.engine import EARLY, Engine
from fastspec.engine.warmup import steps_of_options
from fastspec.kernels.triton_ops import TRITON_OPS
from fastspec.shapes import FULL, GRAMMARS, GREEDY, LONG_PROMPT_CUDA, StepShape
from tests.helpers import recorder
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.recorder import Calls

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 40_000}
ROWS, LONGEST = 4, 20_000  # more than one kernel of attention serves
LISTED, ASKED = "listed", "asked"
EARLY_ALONE = "early"
Steps = list[tuple[int, StepShape]]


def of_calls(engine: Engine, ks: tuple[int, ...]) -> Steps:
    """Steps of calls with all options and lengths."""
    lengths = [(upto, start) for upto in (100, 3000, LONGEST) for start in (0, upto)]
    kinds = itertools.product((GREEDY, FULL), (None, 0, 20), lengths)
    found = [engine.missing(ROWS, ks, *kind, *length, (None, *GRAMMARS)) for *kind, length in kinds]
    return list(dict.fromkeys(step for steps in found for step in steps if step[0] in (1, ROWS)))


def made(directory: str, k: int) -> Engine:
    """The engine of a generator on a CPU, as if it captured graphs."""
    checkpoint = make_checkpoint(Path(directory), "llama3", **SIZES)
    options: dict[str, Any] = {"max_batch_size": ROWS, "max_length": LONGEST, "num_speculative_tokens": k}
    generator = FastSpecGenerator(
        checkpoint, checkpoint, **options, dtype=torch.bfloat16, device="cpu", progress=False, prefix_cache=False
    )
    engine = generator._open().engine
    engine.shapes = replace(engine.shapes, static=True)
    engine.runner = SimpleNamespace(  # type: ignore[assignment]
        static=True, ready=lambda key: False, on_stream=engine.runner.on_stream
    )
    return engine


def calls(k: int, left_out: str | None) -> Calls:
    """The steps that a constructor compiles, then those of calls."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "ops_for", lambda device: TRITON_OPS.replaced(name="torch"))
        patch.setattr(build, "LONG_PROMPT", LONG_PROMPT_CUDA)
        engine, ks = made(directory, k), (0, k)
        choice: Any = SimpleNamespace(ks=ks)
        behind = [step for step in steps_of_options(engine, ROWS, choice) if step[1].sampler != left_out]
        greedy = engine.missing(ROWS, ks, GREEDY, None)
        asked = of_calls(engine, ks)
        if left_out == EARLY_ALONE:
            behind, asked = behind[:EARLY], engine.missing(1, (k,), FULL, None)
            assert any(shape.first_token for _, shape in asked)
        with engine.on_device():
            yield LISTED, lambda: engine.compile(greedy + behind, prompts=False)
            for rows, shape in asked:
                yield f"{ASKED} {rows} {shape}", lambda one=(rows, shape): engine.compile([one], prompts=False)  # type: ignore[misc]


def missing(arch: int, k: int, left_out: str | None) -> Iterator[str]:
    """Names the kernels that calls launch and the constructor has not compiled, with the first such call."""
    found = recorder.record(arch, lambda: calls(k, left_out))
    known = {recorder.specialised(launch) for launch in found if launch.call == LISTED}
    assert known
    asked = [launch for launch in found if launch.call.startswith(ASKED)]
    assert asked
    for launch in recorder.first_of_each(asked, recorder.specialised):
        if recorder.specialised(launch) not in known:
            yield f"{launch.name} in {launch.call}"


def main() -> None:
    arch, k, *left_out = sys.argv[1:]
    recorder.use(recorder.cuda(int(arch)))
    print(json.dumps({"missing": list(missing(int(arch), int(k), *(left_out or [None])))}))


if __name__ == "__main__":
    main()
