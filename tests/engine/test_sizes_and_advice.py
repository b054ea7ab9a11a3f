"""What a generator takes and says of itself: sizes, memory plans, `explain`, advice."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastspec import FastSpecGenerator, NGram
from fastspec.engine import explain, settings
from fastspec.engine.engine import Engine
from fastspec.engine.explain import attention_kernels, break_even_advice
from fastspec.engine.warmup import timed_ks
from fastspec.kernels.gpu import Gpu
from fastspec.models.checkpoints.resolve import resolve
from fastspec.output import RowStats, Stats
from tests.helpers.checkpoints import make_checkpoint
from tests.scheduling.test_generator import full

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 33}, "between 0 and 16"),
        (
            {"num_speculative_tokens": 17},
            "more than 16 need a CPU, and NGram.. or Suffix.. .* nothing drafts. Use",
        ),
        ({"num_speculative_tokens": 33, "proposer": NGram()}, "between 0 and 32"),
        ({"num_speculative_tokens": 17, "proposer": NGram(), "compile": True}, "compile=True and hosted .* 16 at most"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"page_size": 0}, "page_size"),
        ({"max_length": 10**9}, "max_length"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"dtype": torch.float64}, "dtype must be"),
        ({"device": "meta"}, "device meta is not supported"),
        ({"device": "foo"}, "not one torch knows"),
        ({"device": 3.5}, "not one torch knows"),
        ({"device": "cuda:99"}, "cuda:99 is not there"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused_by_name(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastSpecGenerator(directory, progress=False, **{"device": "cpu", **options})


def test_more_than_16_drafts_are_for_lookup_alone_on_a_cpu(directory: Path) -> None:
    draft = resolve(directory, role="draft")
    assert settings._drafts(32, None, NGram(), torch.device("cpu")) == 32
    with pytest.raises(ValueError, match="here the device is cuda, and lookup of the last 1 to 4 tokens"):
        settings._drafts(17, None, NGram(), torch.device("cuda"))
    with pytest.raises(ValueError, match=f"here the device is cpu, and {re.escape(draft.name)} drafts"):
        settings._drafts(32, draft, NGram(), torch.device("cpu"))


MIB = 2**20


def test_too_little_memory_names_what_fits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the libraries' 32 MiB, and a little more for the rows
    monkeypatch.setattr(settings, "free_bytes", lambda device: 38 * MIB)
    options: dict[str, Any] = {"max_batch_size": 8, "device": "cpu", "progress": False}
    with pytest.raises(MemoryError, match=r"With max_batch_size=8 the largest max_length that fits is \d+;") as caught:
        FastSpecGenerator(directory, max_length=480, **options)
    fits = int(str(caught.value).split("that fits is ")[1].split(";")[0])
    assert 2 <= fits < 480
    with FastSpecGenerator(directory, max_length=fits, **options) as gen:
        assert gen.memory_plan.total <= 0.9 * 38 * MIB
        assert gen.memory_plan.headroom == gen.memory_plan.free - gen.memory_plan.total > 0
    with pytest.raises(MemoryError, match="the largest max_batch_size is 7"):
        FastSpecGenerator(directory, max_length=fits + 1, **options)
    with FastSpecGenerator(directory, **options) as gen:
        assert gen.max_length == fits
    with pytest.raises(
        MemoryError, match=r"no max_length fits|that fits is \d+; with max_length=480 the largest max_batch_size is \d"
    ):
        FastSpecGenerator(directory, max_length=480, **{**options, "max_batch_size": 512})
    monkeypatch.setattr(settings, "free_bytes", lambda device: MIB)
    with pytest.raises(MemoryError, match="not even one row fits"):
        FastSpecGenerator(directory, **options)


def test_the_chosen_length_is_printed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FastSpecGenerator(directory, device="cpu", max_batch_size=1) as gen:
        pass
    assert f"max_length = {gen.max_length} (the models' context)" in capsys.readouterr().err


def test_the_plan_counts_what_is_allocated(gen: FastSpecGenerator) -> None:
    engine = gen._open().engine
    assert engine is not None
    plan = gen.memory_plan
    target, draft = engine.modules.target, engine.modules.proposer.model  # type: ignore[union-attr]
    for model, weights, cache in (
        (target, plan.target_weights, plan.target_cache),
        (draft, plan.draft_weights, plan.draft_cache),
    ):
        assert model.weights.nbytes() == weights  # type: ignore[attr-defined]
        assert model.cache.keys.nbytes + model.cache.values.nbytes == cache  # type: ignore[attr-defined]
    tables = sum(table.nbytes for m in (target, draft) for table in m._tables[0])  # type: ignore[attr-defined]
    slot = engine.prompts.slots[1]
    ends = sum(each.hidden.nbytes for each in (engine.modules.prompt_ends, slot.prompt_ends) if each is not None)
    held = tables + engine.state.nbytes + slot.state.nbytes + ends
    # on a GPU the plan has room for passes over several prompts, which matrices with so few rows do not allow
    assert held == plan.buffers if gen.device.type == "cpu" else held <= plan.buffers
    assert "headroom" in str(plan)


def test_planning_loads_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastspec.engine import build

    monkeypatch.setattr(build, "allocate_weights", lambda *args, **options: pytest.fail("weights were loaded"))
    plan = FastSpecGenerator.plan(directory, directory, max_length=100, max_batch_size=3, device="cpu")
    assert plan.draft_weights == plan.target_weights > 0
    monkeypatch.undo()
    with FastSpecGenerator(directory, directory, max_length=100, max_batch_size=3, device="cpu", progress=False) as gen:
        assert dataclasses.replace(gen.memory_plan, free=0) == dataclasses.replace(plan, free=0)


def test_explain_says_what_runs_how(gen: FastSpecGenerator, directory: Path) -> None:
    text = gen.explain()
    for fact in (str(gen.device), "llama", "up to 4 tokens a step", "exact=True", "captured", "200 tokens each"):
        assert fact in text
    assert ("Triton kernel" in text) == (gen.device.type == "cuda")
    with FastSpecGenerator(directory, exact=False, max_length=64, device="cpu", progress=False) as plain:
        assert "none: plain decoding" in plain.explain()
        assert "exact=False" in plain.explain()
        stats = plain.generate([[5]], max_new_tokens=1, return_dict_in_generate=True).stats
        assert not stats.exact
        assert "exact=False" in str(stats)


@pytest.mark.parametrize(("capability", "said"), [((9, 0), "measured on sm_90"), ((8, 0), "UNTESTED on sm_80")])
def test_explain_says_which_gpu_its_plans_were_measured_on(
    capability: tuple[int, int], said: str, gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "generation_of", lambda device: Gpu(capability, 0))
    assert said in explain.launch_plans(gen._settings)


def test_explain_says_which_kernels_decode_and_why(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gen._settings.layout.target.head_dim not in (64, 128)
    found = attention_kernels(gen._settings)
    assert set(found) == {"target", "draft"}
    assert all(text.startswith("the portable kernel (decode)") for text in found.values())


def test_a_losing_pair_is_told(directory: Path, tmp_path: Path) -> None:
    """A random draft as large as its target: hardly a token accepted at twice the cost and more."""
    draft = make_checkpoint(tmp_path, "llama2", seed=5)
    with FastSpecGenerator(directory, draft, max_length=200, device="cpu", progress=False) as gen:
        with pytest.warns(UserWarning, match="drafting does not pay here: 1.* tokens per step"):
            full(gen, max_new_tokens=60)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            full(gen, max_new_tokens=60, num_speculative_tokens=0)
            full(gen, max_new_tokens=5)


def test_lookup_that_loses_is_told_by_measured_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random text repeats nothing, so lookup's drafts are refused: they pay only if they cost nothing."""
    measured: list[tuple[int, int]] = []
    costs = {0: 1.0, 4: 1.8}

    def seconds(self: Engine, rows: int, k: int, sampler: str) -> float:
        measured.append((rows, k))
        return costs[k]

    monkeypatch.setattr(Engine, "step_seconds", seconds)
    options = {"proposer": NGram(), "num_speculative_tokens": 4, "max_batch_size": 2}
    with FastSpecGenerator(directory, max_length=200, device="cpu", progress=False, **options) as gen:
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"drafting does not pay here: 1\.\d+ tokens per step.* 1\.80 plain"):
                full(gen, max_new_tokens=100)
        assert measured == [(2, 0), (2, 4)], "once"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            full(gen, max_new_tokens=100, num_speculative_tokens=0)
            full(gen, max_new_tokens=5)
            costs[4] = 0.9
            gen._drafting.controllers.clear()
            full(gen, max_new_tokens=100)


def test_few_steps_are_timed_where_ks_cost_the_same() -> None:
    ks = (0, 1, 2, 4, 6, 8)

    def by(cost: Callable[[int], float]) -> tuple[dict[int, float], list[int]]:
        asked: list[int] = []
        found = timed_ks(ks, lambda k: (asked.append(k), cost(k))[1])  # type: ignore[func-returns-value]
        return found, asked

    flat, asked = by(lambda k: 1 + k / 100)
    assert asked == [0, 8]
    assert flat == pytest.approx({k: 1 + k / 100 for k in ks})
    tiles, asked = by(lambda k: 2.0 if k + 1 > 8 else 1.0)  # a second tile of eight rows
    assert tiles == {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0, 8: 2.0}
    assert sorted(asked) == [0, 2, 4, 6, 8]
    assert by(lambda k: 1.0 + k)[0] == {k: 1.0 + k for k in ks}


def test_a_winning_pair_is_left_in_peace(directory: Path) -> None:
    with FastSpecGenerator(directory, max_length=400, device="cpu", progress=False) as gen:
        cheap = Stats.of((RowStats(100, 0, 400, 300, 400, 0, (25, 0, 0, 0, 75)),), 4, 1.0)
        small = dataclasses.replace(gen._target.spec, plans=gen._target.spec.plans[:1], vocab_size=10)
        layout = dataclasses.replace(gen._settings.layout, draft=small, weights=None)
    assert break_even_advice(cheap, layout) is None
    costly = Stats.of((RowStats(100, 0, 400, 0, 100, 0, (100, 0, 0, 0, 0)),), 4, 1.0)
    assert "drafting does not pay" in (break_even_advice(costly, layout) or "")


def test_exact_off_still_decodes(directory: Path) -> None:
    with FastSpecGenerator(directory, exact=False, max_length=64, device="cpu", progress=False) as gen:
        loose = full(gen).new_tokens
    with FastSpecGenerator(directory, max_length=64, device="cpu", progress=False) as gen:
        assert full(gen).new_tokens == loose  # these texts have no near-ties


def test_compile_needs_what_it_cannot_promise_to_be_waived(directory: Path) -> None:
    with pytest.raises(ValueError, match="compile=True needs exact=False"):
        FastSpecGenerator(directory, compile=True, device="cpu", max_length=64, progress=False)


def test_sizes_in_numpy(directory: Path) -> None:
    sizes: dict[str, Any] = {"max_batch_size": np.int64(2), "max_length": torch.tensor(64), "page_size": np.int32(16)}
    with FastSpecGenerator(directory, **sizes, num_speculative_tokens=np.int64(0), progress=False) as made:
        assert made.max_length == 64
        assert made.generate([[1]], max_new_tokens=np.int64(3)).shape == (1, 4)
        made.warmup(np.int64(0), length=np.int64(9))
        for wrong in (-1, 1.5, "many", True):
            with pytest.raises(ValueError, match="num_speculative_tokens must be a whole number at least 0"):
                made.warmup(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"stop_strings": "a"}, {"regex": "a+"}], ids=str)
def test_a_tokenizer_of_another_kind_is_refused(directory: Path, options: dict[str, Any]) -> None:
    with FastSpecGenerator(directory, max_length=64, device="cpu", progress=False) as made:
        with pytest.raises(ValueError, match=r"tokenizer must be one of transformers' tokenizers, got str$"):
            made.generate([[1]], max_new_tokens=1, tokenizer="gpt2", **options)
        processor = SimpleNamespace(decode=str, tokenizer=None)
        with pytest.raises(ValueError, match=r"got SimpleNamespace; pass its .tokenizer"):
            made.submit([1], max_new_tokens=1, tokenizer=processor, **options)
