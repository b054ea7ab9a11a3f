"""Every formula of the sampler broken, one at a time, and the test that fails.

A row of the table: the module, what stands there, what it becomes, and the check, which is a test of another file.
Nothing in processors, sampling, verify, modes or the ops that put them together may lack a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import (
    SyntheticAcceptance,
    announce_synthetic,
    checked,
    needs_draft_probs,
    synthetic_name,
)
from fastspec.shapes import FULL, StepShape
from fastspec.step import step
from tests.helpers import tables
from tests.helpers.mutants import Mutant, bodies
from tests.proposers import test_proposers as proposers
from tests.sampling import test_coupled as coupled
from tests.sampling import test_distribution as sampling
from tests.sampling import test_numerics_edges as edges_of_laws
from tests.sampling import test_processors as processors
from tests.sampling import test_verify as verify
from tests.sampling import test_verify_rules as verify_modes
from tests.scheduling import test_sampler_scheduler as loop
from tests.step import test_step_law as law
from tests.step import test_step_law_rules as law_modes


def filters() -> None:
    for top_k, top_p, min_p in ((1, 1.0, 0.0), (3, 0.5, 0.05), (50, 0.9, 0.05), (0, 1.0, 0.6)):
        sampling.test_filters_equal_transformers(0.6, top_k, top_p, min_p)


def penalties() -> None:
    processors.test_presence_and_frequency_by_their_formula(0)


def masked() -> None:
    processors.test_ids_without_a_bit_are_forbidden(33)


def at_least_one() -> None:
    for options in ({"top_p": 0.0}, {"min_p": 1.0}):
        processors.test_at_least_one_token_is_kept(options, 1)


def vectors() -> None:
    known = next(mark for mark in sampling.test_philox_known_answers.pytestmark if mark.name == "parametrize")
    for counter, key, expected in known.args[1]:
        sampling.test_philox_known_answers(counter, key, expected)


def tail() -> None:
    sampling.test_uniforms_keep_their_precision_however_small()
    with pytest.MonkeyPatch.context() as patch:
        sampling.test_the_race_is_exact_in_the_small_tail(1e-9, patch)


def rejection() -> None:
    verify.assert_lossless(2, range(6))


def some_count() -> None:
    verify_modes.test_when_only_some_drafts_count("rejection", 2, 1)


def block() -> None:
    verify_modes.test_rejection_and_block_emit_exactly_the_targets_law("block", 2, range(6))


def deterministic() -> None:
    verify_modes.test_certain_drafts_need_no_law("rejection", 2, 2)


def coupled_law() -> None:
    verify_modes.test_coupled_emits_exactly_the_targets_law(1, range(6))


def synthetic() -> None:
    verify_modes.test_a_synthetic_rate_is_the_rate(0.8)
    verify_modes.test_a_synthetic_pattern_takes_turns_and_never_more_than_counts()


def decodes() -> None:
    """Stops and caps: what a commit cuts."""
    for stop_ids in ([3], [0, 2]):
        assert law.compare(seed=3, k=2, limit=5, stop_ids=stop_ids, temperature=1.0) < law.TOLERANCE


def decodes_by_block() -> None:
    assert law_modes.compare("block", 2, seed=5) < law_modes.TOLERANCE


def decodes_coupled() -> None:
    assert law_modes.compare("coupled", 1) < law_modes.TOLERANCE


def any_k() -> None:
    plain = coupled.decoded(coupled.coupled(k=0, batch=1), 0)
    assert coupled.decoded(coupled.coupled(k=3), 3) == plain


def own_drafts() -> None:
    loop.test_a_model_accepts_itself_where_drafts_penalise_each_other("cpu")
    coupled.test_a_model_that_drafts_for_itself_is_always_right("cpu")


def broken_target() -> None:
    edges_of_laws.test_a_broken_target_emits_nothing(math.nan, "block", "cpu")


def broken_draft() -> None:
    edges_of_laws.test_a_broken_draft_costs_acceptance_alone(math.inf, "block", "cpu")


def more_by_block() -> None:
    """Two letters, the paper's example through the step: 11/9 drafts accepted as a block, 10/9 one by one."""
    rows = 20_000
    laws = [torch.tensor(law, dtype=torch.float64).log().expand(9, 2, 2) for law in ((1 / 3, 2 / 3), (2 / 3, 1 / 3))]
    state = tables.table_state(torch.ones(rows, 2, dtype=torch.int64), k=2, vocab=2, limit=9, stop_ids=[])
    state.seeds.copy_(torch.arange(rows))
    shape = StepShape(2, FULL, 1, tables.WHOLE, verification="block")
    step(tables.table_modules(*laws), state, shape, PhiloxDraws(state.seeds))
    assert abs(float(state.accepted.double().mean()) - 11 / 9) < 0.03  # five standard errors; the rules are 0.11 apart


def counts_of_text() -> None:
    loop.test_counts_are_those_of_the_text_after_every_step(False, "cpu")


def decodes_lookup_beyond() -> None:
    """A draft that knows fewer ids than the target: those left out have no chance in its law."""
    assert law_modes.compare("block", 2, shared=2) < law_modes.TOLERANCE


def lookup() -> None:
    proposers.test_lookup_is_its_definition(1, 4, "cpu")


def lookup_first() -> None:
    law_modes.test_lookup_before_a_model_follows_the_targets_law("rejection", law_modes.NGram, 1000)


def processed_lines() -> None:
    from tests.kernels.sampling import test_processed  # skips without Triton

    test_processed.compare(0, "cpu")


def unknown_ids() -> None:
    proposers.test_a_proposer_of_ones_own(proposers.Unknown, "rejection")


def modes() -> None:
    verify_modes.test_modes_are_named()
    rule = SyntheticAcceptance(rate=0.5)
    assert checked(rule) is rule
    assert [needs_draft_probs(mode) for mode in ("rejection", "block", "coupled", rule)] == [True, True, False, False]
    assert [synthetic_name(mode) for mode in ("block", rule)] == [None, "synthetic acceptance at a rate of 0.5"]
    assert str(SyntheticAcceptance(pattern=[1, 0])) == "synthetic acceptance of 1, 0 drafts in turn"
    with pytest.warns(UserWarning, match="for benchmarks only"):
        announce_synthetic(rule)


def bad_synthetic() -> None:
    cases = next(
        mark for mark in verify_modes.test_bad_synthetic_acceptance_is_refused.pytestmark if mark.name == "parametrize"
    )
    for options in cases.args[1]:
        verify_modes.test_bad_synthetic_acceptance_is_refused(options)


def logits(*names: str) -> Callable[[], None]:
    """Logits equal transformers' at every place, under the options of these names."""

    def check() -> None:
        for name in names:
            processors.test_logits_equal_transformers_at_every_place(name, 1)

    return check


repetition, biases, least, everything = logits("repetition"), logits("bias"), logits("min new"), logits("all")
narrow = processors.test_a_smaller_vocabulary_sees_the_same
counted = processors.test_counts_take_in_what_was_emitted_and_no_more
marks = processors.test_broken_places_are_marked_where_they_are_needed
no_draft_law = processors.test_a_draft_law_of_nothing_is_one_on_some_id
race = sampling.test_the_race_follows_its_law
keys = sampling.test_every_part_of_the_key_matters
coins = sampling.test_certain_acceptance_never_fails_and_impossible_never_happens
one_hot = sampling.test_greedy_rows_are_one_hot_on_the_lowest_of_equals
ties = sampling.test_top_k_keeps_ties_as_transformers_does
edges = verify.test_accept_probability_at_the_edges
equal_laws = verify.test_residual_of_equal_laws_is_the_law
lowest = verify.test_greedy_takes_the_lowest_of_equal_logits
after = verify.test_an_acceptance_after_a_rejection_does_not_count
committed = verify.test_a_commit_is_its_definition

# vLLM's order: what min-p takes is gone before top-p looks
MIN_P_FIRST = (
    "floor = options.min_p[:, None, None] * scaled.softmax(-1).amax(-1, keepdim=True)\n"
    "    scaled = scaled.masked_fill(scaled.softmax(-1) < floor, -torch.inf)"
)
Check = Callable[[], None]
TABLE: dict[str, list[tuple[str, str, Check]]] = {
    "sampling.processors": [
        ("logits + rows.bias", "logits - rows.bias", biases),
        ("[:, None, :vocab] | (counts > 0)", "[:, None, :vocab] & (counts > 0)", repetition),
        ("[:, None, :vocab] | (counts > 0)", "[:, None, :vocab] & True", repetition),
        ("biased < 0", "biased > 0", repetition),
        ("biased * penalty", "biased / penalty", repetition),
        ("torch.where(biased < 0", "torch.where(logits < 0", logits("bias then repetition")),
        ("rows.frequency[:, None, None] * counts", "rows.frequency[:, None, None] * (counts > 0)", penalties),
        ("rows.presence[:, None, None] * (counts > 0)", "rows.presence[:, None, None] * counts", penalties),
        ("rows.presence[:, None, None] * (counts > 0)", "rows.presence[:, None, None] * seen", penalties),
        ("at < rows.min_lengths", "at <= rows.min_lengths", least),
        ("early & _among", "early | _among", least),
        (")[:, None], -torch.inf)", ")[:, None], -30.0)", least),
        (".cumsum(dim=1, dtype=counts.dtype)", "", everything),
        ("drafts < vocab)", "drafts < vocab + 999)", narrow),
        ("first = counts.scatter_add", "first = 0 * counts.scatter_add", penalties),
        ("torch.where((ids >= 0) & (ids < vocab), ids, vocab)", "ids.clamp(0, vocab)", least),
        ("places < emitted", "places <= emitted", counted),
        ("~logits.amax(dim=-1).isfinite()", "logits.amax(dim=-1).isnan()", marks),
        ("first <= accepted", "first < accepted", marks),
        ("first - 1, accepted", "first, accepted", marks),
        ("places.shape[1]).amin", "places.shape[1]).amax", marks),
        (".isnan().any(", ".isnan().all(", no_draft_law),
        ("bits == 0", "bits != 0", masked),
        ("masks[:, :places]", "masks[:, -places:]", masked),
    ],
    "sampling.distribution": [
        ("range(_ROUNDS)", "range(_ROUNDS - 1)", vectors),
        ("^ c1 ^ k0", "^ k0", vectors),
        ("high.float() * 2.0**-32 + (low.float() + 0.5) * 2.0**-64", "high.float() * 2.0**-32 + 2.0**-33", tail),
        ("high.float() * 2.0**-32 + (low", "(high >> 8).float() * 2.0**-24 + (low", tail),
        ("max=_BELOW_ONE", "max=1.0", tail),
        ("-torch.log1p(-torch", "-torch.log(torch", tail),
        ("torch.full_like(pairs, purpose)", "torch.zeros_like(pairs)", keys),
        ("(pairs, positions[:, None] & _MASK,", "(pairs, positions[:, None] & 0,", keys),
        ("(even, odd)", "(even, even)", race),
        ("zero + purpose", "zero", keys),
        ("ACCEPT) < probability", "ACCEPT) > probability", coins),
        ("probs / times", "probs * times", race),
        ("probs / times", "probs - times", race),
        ("1.0, options.temperature", "1.0, 1.0 / options.temperature", filters),
        ("logits.argmax(-1", "logits.argmin(-1", one_hot),
        ("softmax(-1)\n    one_hot", "square()\n    one_hot", filters),
        ("order = scaled.sort(", f"{MIN_P_FIRST}\n    order = scaled.sort(", filters),
        ("probs.amax(-1, keepdim=True)", "1.0", filters),
        ("probs < floor", "probs <= floor", at_least_one),
        ("descending >= kth", "descending > kth", ties),
        ("tail > 1.0 - options.top_p", "tail > options.top_p", filters),
        ("descending.masked_fill(~kept, -torch.inf)", "descending", filters),
        ("(heavy | first)", "heavy", at_least_one),
    ],
    "sampling.verify": [
        ("p / q.clamp_min", "q / p.clamp_min", rejection),
        ("ratio.clamp(max=1.0)", "(ratio >= 1).to(p.dtype)", rejection),
        ("return torch.where(p > 0, ratio.clamp(max=1.0), 0.0)", "return torch.where(q > 0, ratio, 0.0)", edges),
        ("(p - q).clamp_min", "(q - p).clamp_min", rejection),
        ("(p - q).clamp_min(0.0)", "p.clone()", rejection),
        ("torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)", "excess", equal_laws),
        ("picks = logits.argmax(dim=-1)", "picks = logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)", lowest),
        ('"""\n    return _leading(picks[:, :-1] ==', '"""\n    return _leading(picks[:, :-1] !=', lowest),
        ("positions[:, :k]), counts)\n", "positions[:, :k]), counts + 1)\n", some_count),
        ("return accepted, _ended(p, p, q,", "return accepted, _ended(p, p, p[:, :k],", rejection),
        ("scaled = carried[:, :, None] * p", "scaled = p", block),
        ("(scaled[:, 1:k] - q[:, 1:])", "(p[:, 1:k] - q[:, 1:])", block),
        ("(places * below).amax(dim=1)", "below.long().cumprod(dim=1).sum(dim=1)", block),
        (
            "places == counts[:, None])",
            "places == k)",
            lambda: verify_modes.test_when_only_some_drafts_count("block", 2, 1),
        ),
        ("excess / (excess + missing)", "excess / (excess + 1.0)", block),
        ("torch.where(last, carried, inner)", "inner", block),
        ("(carried[-1] * ratio[:, j]).clamp(max=1.0)", "carried[-1] * ratio[:, j]", block),
        ("(carried[-1] * ratio[:, j]).clamp(max=1.0)", "ratio[:, j].clamp(max=1.0)", block),
        ("drafts[:, :, None], 1.0)", "drafts[:, :, None], 0.5)", deterministic),
        ("(accepted < counts)[:, None], beyond", "(accepted <= counts)[:, None], beyond", rejection),
        ("residual(scaled[row, accepted]", "residual(p[row, accepted]", decodes_by_block),
        ("last[:, None], padded)", "padded, last[:, None])", rejection),
        (
            "purpose)\n    return _leading(picks[:, :-1] == drafts",
            "purpose)\n    return _leading(picks[:, :-1] != drafts",
            coupled_law,
        ),
        ("draws.sample(p, positions, purpose)", "draws.sample(p, positions - positions[:, :1], purpose)", any_k),
        ("number % len(rule.pattern)", "(number + 1) % len(rule.pattern)", synthetic),
        ("rule.rate or 0.0", "1.0 - (rule.rate or 0.0)", synthetic),
        ("torch.minimum(asked, counts.clamp(max=drafts.shape[1]))", "asked.clamp(max=drafts.shape[1])", synthetic),
        (".cumprod(dim=1).sum(dim=1)", ".sum(dim=1)", after),
        ("flags.shape[1], device=flags.device) < counts", "flags.shape[1], device=flags.device) <= counts", some_count),
        ("(places <= accepted[:, None])", "(places < accepted[:, None])", decodes),
        ("torch.where(is_stop, places + 1, k + 2)", "torch.where(is_stop, places, k + 2)", decodes),
        ("torch.minimum(accepted + 1, upto_stop)", "accepted + 1", decodes),
        ("upto_stop), room)", "upto_stop), room + 1)", committed),
        ("upto_stop <= room", "upto_stop < room", decodes),
        ("(count == room), AT_LIMIT", "(count == room + 9), AT_LIMIT", committed),
        ("rows.draft_counts - 1", "rows.draft_counts", committed),
        ("torch.where(running, accepted, -1)", "accepted", committed),
    ],
    "sampling.rules": [
        ("(self.rate is None) == (self.pattern is None)", "self.rate is self.pattern", bad_synthetic),
        ("0 <= self.rate <= 1", "0 <= self.rate", bad_synthetic),
        ("count >= 0", "count >= -1", bad_synthetic),
        ("at a rate of {self.rate:g}", "at a rate", modes),
        ("verification in MODES", "verification", modes),
        ("in (REJECTION, BLOCK)", "in (REJECTION,)", modes),
        ("in (REJECTION, BLOCK)", "in (REJECTION,)", decodes_by_block),
        ("str(verification) if", "None if", modes),
        ("warnings.warn(f", "str(f", modes),
    ],
    "shapes": [
        ("shape.sampler != GREEDY and needs", "shape.sampler == GREEDY and needs", decodes_by_block),
        ("TARGET if shape", "DRAFT if shape", decodes_coupled),
    ],
    "proposers.draft_model": [
        ("(1, token[:, None], 1.0), probs)", "(1, token[:, None], 1.0), 0 * probs)", lookup_first),
    ],
    "kernels.reference.sampled": [
        (
            "torch.arange(k + 1, device=logits.device)\n    judged",
            "torch.arange(k + 1) - rows.lengths[:, None]\n    judged",
            any_k,
        ),
        ("torch.where(rows.processed[", "torch.where(~rows.processed[", processed_lines),
        ("invalid = processors.invalid(judged)\n", "invalid = processors.invalid(judged) & False\n", broken_target),
        ("None if deterministic else", "None if True else", own_drafts),
        ("verify.block if rule == BLOCK", "verify.block if rule != BLOCK", more_by_block),
        ("processors.flag_invalid(accepted, invalid)", "accepted", broken_target),
        ("processors.count(rows", "(lambda *given: None)(rows", counts_of_text),
        ("rows.draft_tokens[:, :j])", "rows.draft_tokens[:, :0])", own_drafts),
        (
            "masked_fill(processors.invalid(judged), torch.nan)",
            "masked_fill(processors.invalid(judged), 0.5)",
            broken_draft,
        ),
        ("processors.drawable(probs)\n", "probs.clone()\n", broken_draft),
        ("rows.lengths + j, purpose", "rows.lengths, purpose", own_drafts),
        ("known] = probs", "known] = probs.square()", decodes_by_block),
        ("known:] = 0.0", "known:] = 1.0", decodes_lookup_beyond),
    ],
    "kernels.reference.lookup": [
        ("run * (room + 1) + room - distance", "room - distance", lookup),
        ("(run >= min_n) | close", "(run > min_n) | close", lookup),
        ("max(ANCHOR, min_n)", "1", lookup),
        ("(GAP + 1) + GAP - back)", "(GAP + 1) + back)", lookup),
        ("% period[:, None]", "% 1000", lookup),
    ],
    "proposers.choose": [("drafts < self._vocab_size", "drafts <= self._vocab_size", unknown_ids)],
}
MUTANTS = [(Mutant(module, old, new), check) for module, rows in TABLE.items() for old, new, check in rows]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
def test_a_broken_formula_fails_its_check(mutant: Mutant, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in MUTANTS), ids=lambda check: check.__name__)
def test_the_checks_pass_on_what_is_right(check: Check) -> None:
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize(
    "module",
    ["sampling.processors", "sampling.distribution", "sampling.verify", "sampling.rules", "kernels.reference.sampled"],
)
def test_no_formula_lacks_a_mutant(module: str) -> None:
    invalid = {mutant.owner for mutant, _ in MUTANTS if mutant.module == module}
    # `SamplerRows` and the like are data; a protocol's methods are descriptions
    assert {name for name, _ in bodies(module)} - invalid == set()
