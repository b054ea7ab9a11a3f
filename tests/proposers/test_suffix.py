"""Lookup in texts: the device's search against straight-line Python, exact text, forgetting, and who sees what."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastspec import FastSpecGenerator, demo_pair
from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.kernels import reference
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.lookup import (
    LOOKED_AT,
    LookUp,
    Predictions,
    RepeatedText,
    SharedTexts,
    follow,
    look_up_text,
)
from fastspec.output import GenerateOutput
from fastspec.proposers.combined import LookupThenModel
from fastspec.proposers.draft_model import DraftModel
from fastspec.proposers.suffix import NOBODY, SHARED, Suffix
from fastspec.proposers.texts import TextIndex, rungs_between
from fastspec.sampling.rules import COUPLED, MODES
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.lookup_definition import common, followed
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.helpers.variants import judging, proposing
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, sampled_row, texts

CPU = torch.device("cpu")
ROOM = 64


def indexed(
    shelf: list[tuple[int, list[int]]], row: list[int], owner: int, rungs: tuple[int, ...], k: int
) -> tuple[list[int], int]:
    """The definition of `look_up_text`: drafts, and tokens that match."""
    own = [text for of, text in shelf if of == owner]
    for rung in reversed(rungs):
        places = [
            (text, place)
            for text in own
            for place in range(rung, len(text))
            if len(row) >= rung and text[place - rung : place] == row[-rung:]
        ]
        if places:
            break
    else:
        return [], 0
    latest = [(common(text[:place], row, rungs[-1]), text[place : place + k]) for text, place in places[-LOOKED_AT:]]
    longest = max(run for run, _ in latest)
    follows = [text for run, text in latest if run == longest]
    sharing = [[sum(other[: j + 1] == one[: j + 1] for other in follows) for j in range(len(one))] for one in follows]
    best = max(range(len(follows)), key=lambda index: (sum(sharing[index]), index))
    count = next((j for j, alike in enumerate(sharing[best]) if alike * 4 < len(follows)), len(follows[best]))
    return follows[best][:count], longest if count else 0


few = st.integers(0, 3)
rows_of_few = st.lists(few, min_size=1, max_size=24)


@settings(deadline=None, max_examples=200)
@example([(2, [2, 2, 1]), (2, [2, 2, 1]), (2, [2, 0, 0, 0, 0])], [2], 1, 0, 4)  # five continuations, none shared enough
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(few, min_size=1, max_size=20)), max_size=6),
    rows_of_few,
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(1, 8),
)
def test_an_index_is_its_definition(
    shelf: list[tuple[int, list[int]]], row: list[int], min_n: int, more: int, k: int
) -> None:
    rungs = rungs_between(min_n, min_n + more)
    index, start = TextIndex(128, rungs, CPU), 0
    for number, (owner, text) in enumerate(shelf):
        index.write(start, text, number, owner)
        start += len(text)
    index.sort()
    width = rungs[-1]
    recent = torch.tensor([(row[::-1] + [0] * width)[:width]] * 3)
    known = (torch.arange(width) < len(row)).expand(3, -1)
    drafts, counts, matched = look_up_text(index.table, recent, known, torch.arange(3), k)
    for owner in range(3):
        expected = indexed(shelf, row, owner, rungs, k)
        assert (drafts[owner, : counts[owner]].tolist(), int(matched[owner])) == expected


@settings(deadline=None, max_examples=300)
@given(st.lists(few, max_size=20), rows_of_few, st.integers(0, 24), st.integers(1, 4), st.integers(0, 4))
def test_the_place_in_a_prediction_is_its_definition(
    prediction: list[int], row: list[int], answered: int, min_n: int, more: int
) -> None:
    answered = min(answered, len(row))
    padded = torch.tensor([prediction + [1] * (30 - len(prediction))])  # junk behind its end
    junk = torch.tensor([[*row, 2, 2, 2]])
    call = LookUp(junk, torch.tensor([len(row)]), min_n, min_n + more)
    place, matched = follow(call, RepeatedText(padded, torch.tensor([len(prediction)]), torch.tensor([answered])))
    expected = followed(prediction, row, answered, min_n, min_n + more)
    assert int(matched) == expected[1]
    assert not expected[1] or int(place) == expected[0]


@settings(deadline=None, max_examples=300)
@example([1, 2, 3, 0, 0, 0, 1, 2, 3, 3, 2], 3, 4)  # nothing matches, and the anchor tells the place
@example([1, 2, 3, 4, 5, 6, 8, 9, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 0], 1, 3)  # the longest anchor is not the latest
@given(st.lists(few, min_size=1, max_size=50), st.integers(1, 4), st.integers(0, 20))
def test_the_place_in_the_row_itself_is_its_definition(row: list[int], min_n: int, more: int) -> None:
    junk, length = torch.tensor([[*row, 2, 2, 2]]), torch.tensor([len(row)])
    drafts, counts = reference.look_up(LookUp(junk, length, min_n, min_n + more, per_match=2), 5)
    place, matched = followed(row, row, len(row), min_n, min_n + more)
    grown = list(row)
    for j in range(min(5, 2 * matched)):
        grown.append(grown[place + j])
    assert drafts[0, : int(counts)].tolist() == grown[len(row) :]


def strongest(
    row: list[int], prediction: list[int], answered: int, shelves: list[list[list[int]]], weights: list[float], k: int
) -> list[int]:
    """The definition of `look_up` for matches of 2 to 6 tokens: drafts of the strongest source.

    Weights are those of the row, the prediction and each shelf.
    """
    place, matched = followed(prediction, row, answered, 2, 6)
    found = [(matched * weights[1], prediction[place : place + k] if matched else [])]
    place, matched = followed(row, row, len(row), 2, 6)
    grown = list(row)
    for j in range(min(k, 2 * matched)):
        grown.append(grown[place + j])
    found.append((matched * weights[0], grown[len(row) :]))
    for shelf, weight in zip(shelves, weights[2:], strict=True):
        drafts, matched = indexed([(0, text) for text in shelf], row, 0, rungs_between(2, 6), k)
        found.append((matched * weight, drafts[: 2 * matched]))
    return max(((strength, drafts) for strength, drafts in found if drafts), key=lambda each: each[0], default=(0, []))[
        1
    ]


texts_of_few = st.lists(st.lists(few, min_size=1, max_size=20), max_size=3)
quarters = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.25, 2.0, 3.0])


@settings(deadline=None, max_examples=300)
@example(
    [1, 2, 3, 0, 1, 2], [1, 2, 9], 2, [[[7, 1, 2, 8]], [[0, 1, 2, 6]]], [1.0, 2.0, 1.0, 1.0]
)  # row beats prediction
@example([1, 2, 3, 1, 2], [1, 2, 9], 2, [[[1, 2, 8]], [[1, 2, 6]]], [1.0, 1.0, 1.0, 1.0])  # all are equally strong
@given(
    rows_of_few,
    st.lists(few, min_size=1, max_size=20),
    st.integers(0, 24),
    st.tuples(texts_of_few, texts_of_few).map(list),
    st.lists(quarters, min_size=4, max_size=4),
)
def test_the_strongest_source_drafts(
    row: list[int], prediction: list[int], answered: int, shelves: list[list[list[int]]], weights: list[float]
) -> None:
    """The strength of a match is its tokens times the weight of its source."""
    answered, k, shared = min(answered, len(row)), 5, []
    for shelf, weight in zip(shelves, weights[2:], strict=True):
        index, start = TextIndex(64, rungs_between(2, 6), CPU), 0
        for number, text in enumerate(shelf):
            index.write(start, text, number, 0)
            start += len(text)
        index.sort()
        shared.append(SharedTexts(index.table, torch.zeros(1, dtype=torch.int64), weight))
    length = torch.tensor([len(row)])
    given = Predictions(torch.tensor([prediction]), torch.tensor([len(prediction)]), length - answered, weights[1])
    call = LookUp(torch.tensor([[*row, 2, 2]]), length, 2, 6, given, tuple(shared), 2, weights[0])
    drafts, counts = reference.look_up(call, k)
    assert drafts[0, : int(counts)].tolist() == strongest(row, prediction, answered, shelves, weights, k)


EDITS = {
    "insertion": lambda text: [*text[:30], 90, 91, 92, *text[30:]],
    "deletion": lambda text: [*text[:30], *text[35:]],
    "rename": lambda text: [*text[:30], 90, *text[31:]],
    "rename to a longer name": lambda text: [*text[:30], 90, 91, 92, *text[31:]],
    "other beginning": lambda text: [90, 91, *text[3:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_prediction_is_followed_again_within_8_tokens(edit: str) -> None:
    """After the first token that differs from the prediction, a step drafts the right tokens within 8 tokens."""
    old = random.Random(5).sample(range(80), 60)
    new, prompt, k = EDITS[edit](old), [81, 82], 8
    engine = tiny_engine(batch=1, k=k, prediction_tokens=ROOM)
    state, lookup = engine.state, Suffix(prediction_tokens=ROOM)
    state.prompt_lengths.fill_(2)
    state.prediction[0, : len(old)] = torch.tensor(old)
    state.prediction_lengths.fill_(len(old))
    right = []
    for done in range(len(new) - 1):
        row = prompt + new[:done]
        state.tokens[0, : len(row)] = torch.tensor(row)
        state.lengths.fill_(len(row))
        drafts, counts = lookup.look_up(state, k)
        right.append(int(counts) > 0 and int(drafts[0, 0]) == new[done])
    missed = [done for done, hit in enumerate(right) if not hit]
    assert missed, "there is an edit"
    assert max(missed) - min(missed) <= 8
    assert all(right[max(missed) + 1 :])


def texts_engine(lookup: Suffix, k: int, *, model: bool = False, batch: int = 3, device: str = "cpu") -> Engine:
    engine = tiny_engine(k=k, batch=batch, device=device, prediction_tokens=lookup.prediction_tokens)
    bound = lookup.on(engine.state.lengths.device, engine.modules.ops)
    drafter = engine.modules.proposer
    assert isinstance(drafter, DraftModel)
    return replace(proposing(engine, LookupThenModel(bound, drafter) if model else bound), texts=bound)


def edited(text: list[int], seed: int) -> list[int]:
    """A text with about one change in ten tokens."""
    rng, made = random.Random(seed), []
    for token in text:
        kind = rng.random()
        made += [] if kind < 0.03 else [rng.randrange(VOCAB)] if kind < 0.07 else [token]
        made += [rng.randrange(VOCAB)] if kind > 0.97 else []
    return made


SOURCES = ("prediction", "corpus", "answers")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [1, 3, 5, 8, 15])
@pytest.mark.parametrize(
    ("sources", "model"), [*(((one,), False) for one in SOURCES), (SOURCES, False), (SOURCES, True)], ids=str
)
def test_greedy_text_is_plain_text(sources: tuple[str, ...], k: int, model: bool, device: str) -> None:
    rows, new = prompts(4, seed=3, longest=40)[1:], 24
    plain = texts(run(tiny_engine(k=k, device=device), rows, new, k=0))
    lookup = Suffix(
        prediction_tokens=ROOM if "prediction" in sources else 0,
        corpus_tokens=600 if "corpus" in sources else 0,
        remember="all" if "answers" in sources else None,
        remembered_tokens=300,
        weights={"prediction": 0.7, "answers": 1.5} if model else None,
    )
    engine = texts_engine(lookup, k, model=model, device=device)
    if "corpus" in sources:
        assert engine.texts is not None
        engine.texts.add_corpus("old", [token for text in plain for token in edited(text, 1)])
    options = [replace(GREEDY_ROW, prediction=tuple(edited(text, 2))) for text in plain]
    options = options if "prediction" in sources else [GREEDY_ROW] * len(rows)
    first = run(engine, rows, new, k=k, options=options)
    again = run(engine, rows, new, k=k, options=options)
    assert texts(first) == texts(again) == plain
    steps = sum(request.steps for request in again)
    assert steps < 0.8 * sum(map(len, plain)), "the texts draft"


@pytest.mark.filterwarnings("ignore::UserWarning")  # drafts may not pay
def test_32_drafts_of_a_step_are_accepted_on_a_cpu() -> None:
    target, _ = demo_pair()
    prompt, sizes = [[5, 6, 7, 8]], {"max_length": 160, "device": "cpu", "progress": False}
    with FastSpecGenerator(target, proposer=Suffix(), num_speculative_tokens=32, **sizes) as generator:

        def told(**options: Any) -> GenerateOutput:
            return generator.generate(
                prompt, max_new_tokens=66, eos_token_id=None, return_dict_in_generate=True, **options
            )

        plain = told(num_speculative_tokens=0).new_tokens
        for prediction in (plain[0], edited(plain[0], 3)):
            output = told(predictions=[prediction])
            assert output.new_tokens == plain
            assert prediction != plain[0] or output.stats.rows[0].steps <= 3, "above 17 tokens a step"
        assert output.stats.rows[0].steps < 15


@pytest.mark.parametrize("mode", MODES)
def test_sampled_rows_with_predictions_do_not_feel_their_neighbours(mode: str) -> None:
    """Rows end, and others move to their places with their predictions."""
    rows, caps = prompts(6, seed=8, longest=30), [30, 7, 25, 3, 18, 30]
    bare = [sampled_row(seed, temperature=0.4) for seed in range(6)]
    drawn = texts(run(judging(tiny_engine(), mode), rows, caps, k=0, options=bare))
    options = [replace(one, prediction=tuple(edited(text, 4))) for one, text in zip(bare, drawn, strict=True)]
    engine = judging(texts_engine(Suffix(prediction_tokens=ROOM), 4), mode)
    together = run(engine, rows, caps, options=options)
    assert sum(request.accepted for request in together) > 0
    if mode == COUPLED:
        assert texts(together) == drawn
    for index, row in enumerate(rows):
        alone = run(engine, [row], caps[index], options=[options[index]])
        assert texts(alone)[0] == together[index].new_tokens


def drafted(lookup: Suffix, row: list[int], owner: int = NOBODY, k: int = 4) -> list[int]:
    """Drafts of a row, from corpora and earlier answers."""
    state = DecodeState.allocate(batch=1, max_drafts=k, max_length=40, pages_per_row=1, vocab_size=VOCAB, device=CPU)
    state.tokens[0, : len(row)] = torch.tensor(row)
    state.lengths.fill_(len(row))
    state.owners.fill_(owner)
    drafts, counts = lookup.look_up(state, k)
    return drafts[0, : int(counts)].tolist()


def test_corpora_are_added_replaced_and_forgotten() -> None:
    lookup = Suffix(prediction_tokens=0, corpus_tokens=10).on(CPU, Ops())
    lookup.add_corpus("one", [1, 2, 3, 4, 5])
    lookup.add_corpus("two", [6, 7, 8])
    assert drafted(lookup, [2, 3]) == [4, 5]
    assert drafted(lookup, [6, 7]) == [8]
    assert drafted(lookup, [4, 5]) == [], "a text does not go on in the next one"
    with pytest.raises(ValueError, match="would have 11 tokens, and there is room for 10; remove one"):
        lookup.add_corpus("three", [9, 9, 9])
    lookup.add_corpus("one", [2, 3, 9, 9])
    assert drafted(lookup, [2, 3]) == [9, 9]
    lookup.remove_corpus("one")
    assert drafted(lookup, [2, 3]) == []
    assert drafted(lookup, [6, 7]) == [8]
    with pytest.raises(ValueError, match=r"no corpus 'one'; there are \['two'\]"):
        lookup.remove_corpus("one")


def test_weights_of_sources_decide_between_matches() -> None:
    """The row ends with 1, 2, which goes on with another token in each source."""

    def next_token(**weights: float) -> int:
        sizes: dict[str, Any] = {"prediction_tokens": 8, "corpus_tokens": 8, "remember": "all", "remembered_tokens": 8}
        lookup = Suffix(2, 4, **sizes, weights=weights).on(CPU, Ops())
        lookup.add_corpus("one", [1, 2, 30])
        lookup.remember_answer([], [1, 2, 40], None)
        state = DecodeState.allocate(
            batch=1, max_drafts=4, max_length=40, pages_per_row=1, vocab_size=VOCAB, device=CPU, prediction_tokens=8
        )
        state.tokens[0, :5] = torch.tensor([1, 2, 10, 1, 2])
        state.prediction[0, :3] = torch.tensor([1, 2, 20])
        state.lengths.fill_(5)
        state.prompt_lengths.fill_(5)
        state.prediction_lengths.fill_(3)
        state.owners.fill_(SHARED)
        return int(lookup.look_up(state, 4)[0][0, 0])

    assert next_token() == next_token(row=2, corpus=2, answers=2) == 20, "the prediction counts twice"
    assert next_token(prediction=0.9) == next_token(row=2.1) == 10
    assert next_token(answers=2.1) == 40
    assert next_token(corpus=2.1) == next_token(corpus=3, answers=2.9, row=1.1) == 30


def test_ranks_compare_weights() -> None:
    assert repr(Suffix()) == repr(Suffix(weights={"prediction": 2, "row": 1}))
    assert repr(Suffix()) != repr(Suffix(weights={"corpus": 0.5}))


@pytest.mark.parametrize("length", [3, 4, 5, 8, 13])
def test_answers_are_forgotten_in_order(length: int) -> None:
    """At every room: exactly the newest answers that fit are left."""
    for room in range(4, 27, 2 if length > 5 else 1):
        lookup = Suffix(prediction_tokens=0, remember="all", remembered_tokens=room).on(CPU, Ops())
        for number in range(5):
            lookup.remember_answer([], [100 * number + place for place in range(length)], None)
            for old in range(number + 1):
                end = [100 * old + place for place in range(length)][-3:]
                left = old > number - max(1, room // length)
                assert drafted(lookup, end[:2], SHARED) == (end[2:] if left else []), (room, number, old)


def test_an_answer_longer_than_the_room_keeps_its_end() -> None:
    lookup = Suffix(prediction_tokens=0, remember="all", remembered_tokens=5).on(CPU, Ops())
    lookup.remember_answer([], list(range(10, 30)), None)
    assert drafted(lookup, [25, 26], SHARED) == [27, 28, 29]
    assert drafted(lookup, [23, 24], SHARED) == []


def test_answers_draft_for_their_owner_alone() -> None:
    by_prompt = Suffix(prediction_tokens=0, remember="prompt").on(CPU, Ops())
    by_prompt.remember_answer([1, 2], [3, 4, 5, 6], None)
    mine, other = by_prompt.owner_of([1, 2], None), by_prompt.owner_of([1, 9], None)
    assert drafted(by_prompt, [3, 4], mine) == [5, 6]
    assert drafted(by_prompt, [1, 2], mine) == [3, 4, 5, 6], "the first tokens, too"
    assert drafted(by_prompt, [3, 4], other) == drafted(by_prompt, [3, 4], NOBODY) == []
    by_session = Suffix(prediction_tokens=0, remember="session").on(CPU, Ops())
    by_session.remember_answer([1, 2], [3, 4, 5, 6], "alice")
    by_session.remember_answer([1, 2], [3, 4, 7, 8], "bob")
    by_session.remember_answer([1, 2], [3, 4, 9, 9], None)
    assert drafted(by_session, [3, 4], by_session.owner_of([5], "alice")) == [5, 6]
    assert drafted(by_session, [3, 4], by_session.owner_of([5], "bob")) == [7, 8]
    assert drafted(by_session, [3, 4], by_session.owner_of([1, 2], None)) == []
    for_all = Suffix(prediction_tokens=0, remember="all").on(CPU, Ops())
    for_all.remember_answer([1, 2], [3, 4, 5, 6], "alice")
    assert drafted(for_all, [3, 4], for_all.owner_of([7], None)) == [5, 6]


def test_a_collision_of_hashes_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal hashes for all owners and tokens, owner and tokens are still compared."""
    index = TextIndex(8, (2,), CPU)
    index.table.factors.zero_()
    index.write(0, [1, 2, 3, 4], 0, owner=5)
    index.sort()
    known = torch.ones(1, 2, dtype=torch.bool)
    for recent, owner, expected in (([2, 1], 5, 2), ([2, 1], 6, 0), ([2, 9], 5, 0)):
        _, counts, matched = look_up_text(index.table, torch.tensor([recent]), known, torch.tensor([owner]), 2)
        assert int(matched) == expected
        assert (int(counts) > 0) == (expected > 0)


def test_requests_of_one_session_do_not_feel_those_of_another() -> None:
    """The number of drafts of a request tells of its own session alone."""
    rows = prompts(3, seed=12, longest=30)
    alice, bob = (replace(GREEDY_ROW, session=name) for name in ("alice", "bob"))

    def drafts(before: list[RowOptions]) -> list[tuple[int, int]]:
        engine = texts_engine(Suffix(prediction_tokens=0, remember="session"), 4)
        for options in before:
            run(engine, rows, 40, options=[options] * 3)
        return [(one.drafted, one.accepted) for one in run(engine, rows, 40, options=[bob] * 3)]

    assert drafts([]) == drafts([alice]) == drafts([alice, GREEDY_ROW])
    assert drafts([]) != drafts([bob])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"min_n": 0}, "Suffix needs whole numbers 1 <= min_n"),
        ({"remember": "user"}, "remember must be 'prompt', 'session', 'all' or None, got 'user'"),
        ({"corpus_tokens": -1}, "corpus_tokens must be a whole number from 0"),
        ({"prediction_tokens": 1.5}, "prediction_tokens must be a whole number from 0"),
        ({"remembered_tokens": 1}, "remembered_tokens must be a whole number from 2"),
        ({"weights": {"prompt": 1}}, "names of 'row', 'prediction', 'corpus', 'answers', got the name 'prompt'"),
        ({"weights": [1, 2]}, r"weights must be a dict with names of .*, got \[1, 2\]"),
        ({"weights": {"corpus": 0}}, r"weights\['corpus'\] must be a number from 0.001 to 1000, got 0"),
        ({"weights": {"row": 1e40}}, r"weights\['row'\] must be a number from 0.001 to 1000, got 1e\+40"),
        ({"weights": {"row": float("nan")}}, r"weights\['row'\] must be a number from 0.001 to 1000, got nan"),
        ({"weights": {"row": True}}, r"weights\['row'\] must be a number from 0.001 to 1000, got True"),
    ],
    ids=str,
)
def test_bad_sizes_are_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Suffix(**bad)  # type: ignore[arg-type]
