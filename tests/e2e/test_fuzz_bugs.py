"""The machine of `test_fuzz` itself: it finds bugs that are planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.errors import Flaky

from fastspec import generator as generator_module
from fastspec.graphs.results import RowResult
from fastspec.sampling import processors, verify
from fastspec.sampling.rules import BLOCK, COUPLED
from fastspec.scheduling import admission
from fastspec.scheduling.loop import Loop
from fastspec.scheduling.requests import Request
from fastspec.state import IDLE, DecodeState
from fastspec.text.stop_strings import StopWatch
from tests.e2e.test_fuzz import fuzz, fuzz_calls
from tests.helpers.fuzz_calls import DRAFTS
from tests.helpers.fuzzing import CI, Pair

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the pair has no tokenizers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


def stop_ids_are_kept(plant: pytest.MonkeyPatch) -> None:
    fill = admission.fill_prompt

    def planted(state: DecodeState, row: int, *given: Any) -> None:
        before = state.stop_ids[row].clone()
        fill(state, row, *given)
        after = state.stop_ids[row]
        after.copy_(torch.where(after < 0, before, after))

    plant.setattr(admission, "fill_prompt", planted)
    plant.setattr(DecodeState, "reset", lambda state: state.finish.fill_(IDLE))


def a_stop_at_the_last_place_is_missed(plant: pytest.MonkeyPatch) -> None:
    commit = verify.commit

    def planted(state: DecodeState, accepted: torch.Tensor, block: torch.Tensor) -> None:
        kept = state.stop_ids.clone()
        last = block.gather(1, accepted[:, None])
        drafts = block.shape[1] - 1
        whole = (accepted == drafts) & (drafts > 0)
        state.stop_ids.masked_fill_((state.stop_ids == last) & whole[:, None], -1)
        commit(state, accepted, block)
        state.stop_ids.copy_(kept)

    plant.setattr(verify, "commit", planted)


def a_draft_too_many_is_accepted(plant: pytest.MonkeyPatch) -> None:
    commit = verify.commit

    def planted(state: DecodeState, accepted: torch.Tensor, block: torch.Tensor) -> None:
        if block.shape[1] > 2:
            accepted = torch.where(accepted == 1, 2, accepted)
            block[:, 1] = state.draft_tokens[:, 1]
        commit(state, accepted, block)

    plant.setattr(verify, "commit", planted)


def seeds_depend_on_the_place(plant: pytest.MonkeyPatch) -> None:
    fill = admission.fill_options

    def planted(state: DecodeState, rows: Sequence[admission.NewRow], sampler: str) -> None:
        fill(state, rows, sampler)
        for row in (each.row for each in rows):
            state.seeds[row] += row

    plant.setattr(admission, "fill_options", planted)


def pages_are_shared(plant: pytest.MonkeyPatch) -> None:
    fill = admission.fill_prompt

    def planted(state: DecodeState, row: int, prompt: list[int], pages: tuple[int, ...], *given: Any) -> None:
        fill(state, row, prompt, (1, *pages[1:]), *given)

    plant.setattr(admission, "fill_prompt", planted)


def dropped_drafts_are_not_counted(plant: pytest.MonkeyPatch) -> None:
    record = Request.record

    def planted(self: Request, result: RowResult, *given: Any, **options: Any) -> list[int]:
        tokens = record(self, result, *given, **options)
        self.dropped = 0
        return tokens

    plant.setattr(Request, "record", planted)


def a_call_that_was_left_goes_on(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Loop, "leave", lambda self, requests: None)


def counts_outlive_their_row(plant: pytest.MonkeyPatch) -> None:
    tables = admission.fill_tables

    def planted(state: DecodeState, row: int, *given: Any) -> None:
        kept = state.output_counts[row].clone()
        tables(state, row, *given)
        state.output_counts[row].copy_(kept)

    plant.setattr(admission, "fill_tables", planted)


def biases_outlive_their_row(plant: pytest.MonkeyPatch) -> None:
    tables = admission.fill_tables

    def planted(state: DecodeState, row: int, *given: Any) -> None:
        kept = state.bias[row].clamp(-9, 9)
        tables(state, row, *given)
        state.bias[row].add_(kept)

    plant.setattr(admission, "fill_tables", planted)
    plant.setattr(DecodeState, "reset", lambda state: state.finish.fill_(IDLE))


def penalties_do_not_see_drafts(plant: pytest.MonkeyPatch) -> None:
    process = processors.process

    def planted(logits: Any, rows: Any, lengths: Any, drafts: torch.Tensor) -> torch.Tensor:
        return process(logits, rows, lengths, torch.full_like(drafts, -1))

    plant.setattr(processors, "process", planted)


def rejected_drafts_are_counted(plant: pytest.MonkeyPatch) -> None:
    count = processors.count

    def planted(counts: torch.Tensor, block: torch.Tensor, emitted: torch.Tensor) -> None:
        count(counts, block, torch.where(emitted > 0, block.shape[1], 0))

    plant.setattr(processors, "count", planted)


def a_stop_may_come_one_early(plant: pytest.MonkeyPatch) -> None:
    fill = admission.fill_options

    def planted(state: DecodeState, rows: Sequence[admission.NewRow], sampler: str) -> None:
        fill(state, rows, sampler)
        for row in (each.row for each in rows):
            state.min_lengths[row] -= 1

    plant.setattr(admission, "fill_options", planted)


def draft_limits_are_forgotten(plant: pytest.MonkeyPatch) -> None:
    fill = admission.fill_options

    def planted(state: DecodeState, rows: Sequence[admission.NewRow], sampler: str) -> None:
        fill(state, rows, sampler)
        for row in (each.row for each in rows):
            state.draft_limits[row] = DRAFTS

    plant.setattr(admission, "fill_options", planted)


def stop_strings_end_whole_steps(plant: pytest.MonkeyPatch) -> None:
    call = StopWatch.__call__
    plant.setattr(StopWatch, "__call__", lambda self, tokens: None if call(self, tokens) is None else len(tokens))


def copies_share_a_seed(plant: pytest.MonkeyPatch) -> None:
    requests_of = generator_module.requests_of

    def planted(prompts: Any, chosen: Any, *given: Any) -> Any:
        made = requests_of(prompts, chosen, *given)
        for index, request in enumerate(made):
            request.options = made[index - index % chosen.copies].options
        return made

    plant.setattr(generator_module, "requests_of", planted)


def coupled_numbers_go_by_step(plant: pytest.MonkeyPatch) -> None:
    coupled = verify.coupled

    def planted(p: Any, drafts: Any, counts: Any, positions: torch.Tensor, *rest: Any) -> Any:
        return coupled(p, drafts, counts, positions - positions[:, :1], *rest)

    plant.setattr(verify, "coupled", planted)


IN_SEQUENCES = [
    stop_ids_are_kept,
    a_stop_at_the_last_place_is_missed,
    a_draft_too_many_is_accepted,
    seeds_depend_on_the_place,
    pages_are_shared,
    dropped_drafts_are_not_counted,
    a_call_that_was_left_goes_on,
]
IN_CALLS = [
    counts_outlive_their_row,
    biases_outlive_their_row,
    penalties_do_not_see_drafts,
    rejected_drafts_are_counted,
    a_stop_may_come_one_early,
    draft_limits_are_forgotten,
    stop_strings_end_whole_steps,
    copies_share_a_seed,
    coupled_numbers_go_by_step,
]
# what one call leaves to the next shows once, and not when hypothesis tries the same call again
FOUND = (AssertionError, RuntimeError, Flaky)
FIRST = {"phases": [Phase.generate], "report_multiple_bugs": False}  # one failure is enough, of any size


@pytest.mark.parametrize("bug", IN_SEQUENCES, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch, bug: Callable[..., None]) -> None:
    assert pair.lonely(BLOCK, "model")  # made and compared with while it is whole
    bug(monkeypatch)
    with pytest.raises(FOUND):
        fuzz(pair, settings(CI, **FIRST))


@pytest.mark.parametrize("bug", IN_CALLS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_sampler_is_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, bug: Callable[..., None]
) -> None:
    bug(monkeypatch)
    with pytest.raises(FOUND):
        fuzz_calls(pair, COUPLED, settings(CI, **FIRST))
