"""`calibrate` tries a draft that "auto" has rounded: the faster draft stays, texts are the same, and it is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, NGram
from fastspec.config import Config
from fastspec.engine import draft_format
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.scheduling import format_trial
from fastspec.scheduling.calibrate import FixedPolicy
from fastspec.scheduling.format_trial import DraftRate, FormatTrial, trial_of
from tests.engine.test_draft_format import LARGE, keeping
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices

IDS = torch.arange(5, 25)[None] % 97
NEW = 24
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_length": 96, "progress": False}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the pair has no tokenizers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trial")
    return (
        make_checkpoint(folder / "target", "llama3", **LARGE),
        make_checkpoint(folder / "draft", "llama3", **{**LARGE, "num_hidden_layers": 1}),
    )


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[str]]:
    """Makes "auto" choose int4 here, and steps with it take that many times those with the draft as it is stored."""

    def begin(ratio: float) -> list[str]:
        keeping(monkeypatch)
        monkeypatch.setattr(draft_format, "LEAST", 0)
        monkeypatch.setattr(format_trial, "free_bytes", lambda device: 2**40)
        monkeypatch.setattr(format_trial, "_LEAST", 8)
        monkeypatch.setattr(format_trial, "NEW", 8)
        used: list[str] = []
        real = format_trial.FormatTrial._use

        def use(self: Any, engine: Any, drafter: Any, form: Any, weights: Any) -> None:
            used.append(form or "stored")
            real(self, engine, drafter, form, weights)

        def seconds(self: FixedPolicy, bucket: int) -> list[float]:
            return [ratio if used[: len(used) - 1] and self is runs[0] else 1.0]

        runs: list[FixedPolicy] = []
        made = format_trial.FixedPolicy

        def fixed(k: int) -> FixedPolicy:
            runs.append(made(k))
            return runs[-1]

        monkeypatch.setattr(format_trial.FormatTrial, "_use", use)
        monkeypatch.setattr(FixedPolicy, "seconds", seconds)
        monkeypatch.setattr(format_trial, "FixedPolicy", fixed)
        return used

    return begin


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("ratio", "form"), [(0.01, "int4"), (100.0, "stored")])
def test_the_faster_draft_stays(
    pair: tuple[Path, Path], trying: Callable[[float], list[str]], ratio: float, form: str, device: str
) -> None:
    options = {**OPTIONS, "device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    with FastSpecGenerator(pair[0], **options) as plain:
        text = plain.generate(IDS, max_new_tokens=NEW)
    used = trying(ratio)
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **options) as made:

        def call() -> Any:
            return made.generate(IDS, max_new_tokens=NEW, return_dict_in_generate=True)

        first = call()
        assert not used, "a call tries nothing"
        assert first.stats.draft_format == "int4: not tried yet"
        assert "not compared yet with the stored draft: calibrate() does that" in made.explain()
        found = made.calibrate(IDS, max_new_tokens=NEW)
        assert used == ["int4", "stored", "stored", "int4", form]
        weights = made._loop.engine.modules.proposer.model.weights.layers[0].down.unpack()  # type: ignore[union-attr]
        assert (len(weights.unflatten(1, (-1, 128))[0, 0].unique()) <= 16) == (form == "int4")
        second = call()
        made.calibrate(IDS, max_new_tokens=NEW)
        assert len(used) == 5, "once"
        for each in (first, second):
            assert torch.equal(each.sequences, text)
        said = "int4 kept" if form == "int4" else "int4 undone"
        assert found.draft_format == second.stats.draft_format
        assert said in second.stats.draft_format
        assert said in str(found)
        assert said in made.explain()
        assert second.stats.draft_format.startswith(form if form == "int4" else "as it is stored")


@pytest.fixture
def chosen(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The draft in int4, as "auto" chooses it where weights stay in codes."""
    keeping(monkeypatch)
    monkeypatch.setattr(draft_format, "LEAST", 0)
    found = draft_format.with_format(
        *resolve_pair(*pair, (None, None), (None, None)),
        Config(device="cpu", dtype=torch.bfloat16, max_batch_size=1),
    )
    assert isinstance(found, Checkpoint)
    return found


@pytest.mark.parametrize(
    ("tokens", "milliseconds", "ratio", "form"),
    [
        ((2.0, 3.0), (1.0, 1.2), "0.80", None),  # steps are shorter, but too few drafts are accepted
        ((2.9, 3.0), (1.0, 1.2), "1.16", "int4"),
        ((3.0, 3.0), (1.3, 1.2), "0.92", None),  # as many are, but steps are not shorter
        ((3.1, 3.0), (1.2, 1.2), "1.03", "int4"),
        ((3.0, 3.0), (1.2, 1.2), "1.00", "int4"),  # takes less memory
    ],
)
def test_what_costs_more_than_it_brings_is_undone(
    chosen: Checkpoint,
    tokens: tuple[float, float],
    milliseconds: tuple[float, float],
    ratio: str,
    form: str | None,
) -> None:
    """By tokens a second, which are tokens of a step over its time; both are said."""
    trial = FormatTrial(chosen, torch.bfloat16)
    assert str(trial) == "int4: not tried yet"
    one, other = (DraftRate(count, took / 1e3) for count, took in zip(tokens, milliseconds, strict=True))
    assert trial._judge(one, other) == trial.draft.rounded == form
    facts = (
        f"{tokens[0]:.2f} tokens a step in int4 and {tokens[1]:.2f} as stored, steps of "
        f"{milliseconds[0]:.2f} and {milliseconds[1]:.2f} ms"
    )
    said = f"int4 {'undone' if form is None else 'kept'}, {ratio}x the tokens a second: {facts}"
    assert trial.found == said
    assert str(trial) == f"{form or 'as it is stored'}: {said}"
    assert trial.draft.stored.endswith(f"; {said}")
    assert trial.draft.stored.startswith(chosen.stored if form else 'as it is stored: "auto" went back from int4')


def test_what_is_not_tried(chosen: Checkpoint) -> None:
    """A draft that was named, one beside a target that ranks share, and one whose module gave its memory away."""
    one = {"released": False}
    assert trial_of(chosen, torch.bfloat16, **one) is not None
    assert trial_of(replace(chosen, chosen=False), torch.bfloat16, **one) is None
    assert trial_of(chosen, torch.bfloat16, **one, ranks=2) is None
    assert trial_of(None, torch.bfloat16, **one) is None
    assert not FormatTrial(replace(chosen, module=torch.nn.Module()), torch.bfloat16).found


def test_a_released_draft_is_not_tried(
    pair: tuple[Path, Path], trying: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = trying(1.0)
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **OPTIONS) as made:
        trial: Any = made._trial
        trial.released, trial.draft = True, replace(trial.draft, module=torch.nn.Module())
        monkeypatch.setattr(Checkpoint, "bytes_loaded", lambda *given: 0)
        said = made.calibrate(IDS, max_new_tokens=NEW).draft_format
    assert (said, used) == ("int4: not tried: release_source has released the stored draft", [])


def test_texts_that_end_before_steps_are_timed_may_be_tried_anew(
    pair: tuple[Path, Path], trying: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = trying(100.0)
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **OPTIONS) as made:
        with monkeypatch.context() as short:
            short.setattr(format_trial, "_rate_of", lambda run, bucket: None)
            found = made.calibrate(IDS, max_new_tokens=NEW)
        assert used[-1] == "int4"
        assert found.draft_format == "int4: not tried: texts end before steps could be timed"
        assert "not tried: texts end" in made.explain()
        used.clear()
        assert "int4 kept, 1.00x" in str(made.calibrate(IDS, max_new_tokens=NEW))
        assert used == ["int4", "stored", "stored", "int4", "int4"]


def test_handles_and_a_lookup_before_the_draft(pair: tuple[Path, Path], trying: Callable[[float], list[str]]) -> None:
    used = trying(100.0)
    with FastSpecGenerator(*pair, proposer=NGram(), num_speculative_tokens="auto", **OPTIONS) as made:
        texts = [made.submit(IDS, max_new_tokens=NEW).result().new_tokens[0]]
        assert not used
        made.calibrate(IDS, max_new_tokens=NEW)
        assert used[-1] == "stored"
        texts.append(made.submit(IDS, max_new_tokens=NEW).result().new_tokens[0])
        assert texts[0] == texts[1]
        assert "int4 undone" in made.explain()
    with FastSpecGenerator(pair[0], **OPTIONS) as plain:
        assert plain.generate(IDS, max_new_tokens=NEW)[0, IDS.shape[1] :].tolist() == texts[0]


def test_what_keeps_it_from_being_tried_is_said(
    pair: tuple[Path, Path], trying: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = trying(1.0)
    monkeypatch.setattr(format_trial, "free_bytes", lambda device: 0)
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **OPTIONS) as made:
        made.calibrate(IDS, max_new_tokens=NEW)
        assert not used
        assert "not tried: the stored draft needs" in made.explain()


def test_an_error_meanwhile_leaves_the_draft_that_was_chosen(
    pair: tuple[Path, Path], trying: Callable[[float], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = trying(1.0)

    def fails(*given: Any) -> None:
        raise RuntimeError("no such step")

    monkeypatch.setattr(format_trial, "_run", fails)
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **OPTIONS) as made:
        first = made.generate(IDS, max_new_tokens=NEW)
        with pytest.warns(
            UserWarning, match="the draft stays in int4, not compared with the stored draft: no such step"
        ):
            made.calibrate(IDS, max_new_tokens=NEW)
        assert used[-1] == "int4"
        assert "not tried: no such step" in made.explain()
        assert torch.equal(made.generate(IDS, max_new_tokens=NEW), first)


def test_prompts_kept_with_one_draft_are_not_found_with_the_other() -> None:
    from fastspec.kv_cache.pages import PageTable

    table = PageTable(9, 4)
    cache = PrefixCache(table, 4)
    tokens = list(range(8))
    pages = table.reserve(0, 8)
    cache.insert([], tokens, pages, 8)
    cache.use_variant("other")
    assert cache.match(tokens, 8) == []
    cache.use_variant(None)
    assert len(cache.match(tokens, 8)) == 2
