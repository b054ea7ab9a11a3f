"""Predictions, corpora, sessions and earlier answers in calls of a generator and in requests to a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, NGram, Suffix, UnsupportedOption
from fastspec.kernels.ops import Ops
from fastspec.server.access import Access
from tests.helpers.services import opened, small_pair
from tests.server.conftest import running
from tests.server.test_refusals import post

NEW = 40
PROMPTS = [[5, 6, 7], [70, 71, 72, 73]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with opened(pair, num_speculative_tokens=0) as generator:
        yield generator


def lookup_alone(pair: tuple[Path, Path], **options: Any) -> FastSpecGenerator:
    sizes = {"max_length": 160, "device": "cpu", "progress": False, "num_speculative_tokens": 8}
    return FastSpecGenerator(pair[0], **{**sizes, **options})


def told(generator: FastSpecGenerator, **options: Any) -> Any:
    return generator.generate(PROMPTS, max_new_tokens=NEW, return_dict_in_generate=True, **options)


def test_predictions_are_ids_or_texts_for_all_prompts_or_each(
    pair: tuple[Path, Path], plain: FastSpecGenerator
) -> None:
    expected = told(plain)
    first, second = (row.tolist()[-NEW:] for row in expected.sequences)
    with lookup_alone(pair, proposer=Suffix()) as generator:
        without = told(generator)
        for given in ([first, second], [first, None], [torch.tensor(first), "abc"], first, "abc", ["abc", None]):
            found = told(generator, predictions=given)
            assert torch.equal(found.sequences, expected.sequences)
        assert told(generator, predictions=[first, second]).stats.rows[1].accepted >= NEW - NEW // 8 - 1
        assert told(generator, predictions=[first, None]).stats.rows[1] == without.stats.rows[1]
        handle = generator.submit(PROMPTS[0], max_new_tokens=NEW, predictions=[first])
        assert list(handle) == first
        text = generator.tokenizer.decode(generator.tokenizer("abc def")["input_ids"])
        assert generator.submit(PROMPTS[0], max_new_tokens=2, predictions=text).result().stats.rows[0].drafted > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"predictions": 5}, "predictions must be a text or a list of token ids"),
        ({"predictions": [[1], [2], [3]]}, "predictions has 3 values for 2 prompts"),
        ({"predictions": [[1, 999], None]}, "predictions: an id must be a whole number between 0 and 258, got 999"),
        ({"predictions": [1] * 5000}, "one has 5000 tokens, and there is room for 4096; shorten it"),
        ({"session": ""}, "session must be a non-empty text"),
        ({"session": "a"}, 'session needs a generator with proposer=Suffix\\(remember="session"\\)'),
    ],
    ids=str,
)
def test_bad_predictions_and_sessions_are_refused(pair: tuple[Path, Path], given: dict[str, Any], says: str) -> None:
    with lookup_alone(pair, proposer=Suffix()) as generator, pytest.raises(ValueError, match=says):
        told(generator, **given)


@pytest.mark.parametrize("proposer", [None, NGram()], ids=str)
def test_a_generator_that_looks_into_no_text_refuses_it(pair: tuple[Path, Path], proposer: NGram | None) -> None:
    with lookup_alone(pair, proposer=proposer) as generator:
        with pytest.raises(UnsupportedOption, match=r"predictions need a generator with proposer=Suffix\(\)"):
            told(generator, predictions=[1, 2, 3])
        with pytest.raises(UnsupportedOption, match=r"corpora need a generator with proposer=Suffix\(corpus_tokens="):
            generator.add_corpus("one", [1, 2])


def test_a_corpus_drafts_until_it_is_removed(pair: tuple[Path, Path], plain: FastSpecGenerator) -> None:
    expected = told(plain)
    text = [token for row in expected.sequences for token in row.tolist()[-NEW:]]
    proposer = Suffix(prediction_tokens=0, corpus_tokens=100)
    with lookup_alone(pair, proposer=proposer) as generator, lookup_alone(pair, proposer=proposer) as other:
        before = told(generator).stats.rows
        generator.add_corpus("answers", text)
        generator.add_corpus("words", "abc")
        found = told(generator)
        assert torch.equal(found.sequences, expected.sequences)
        assert sum(row.accepted for row in found.stats.rows) > 2 * NEW - 20
        assert told(other).stats.rows == before, "each generator has its own"
        generator.remove_corpus("answers")
        assert told(generator).stats.rows == before
        with pytest.raises(ValueError, match="no corpus 'answers'"):
            generator.remove_corpus("answers")
        with pytest.raises(ValueError, match="corpus: an id must be a whole number"):
            generator.add_corpus("bad", [999])
        with pytest.raises(ValueError, match="corpus must be a text or a list of token ids"):
            generator.add_corpus("bad", 5)  # type: ignore[arg-type]
        for empty in ("", []):
            with pytest.raises(ValueError, match=r"corpus 'bad' has no tokens; .* remove_corpus\('bad'\)"):
                generator.add_corpus("bad", empty)
        stream = generator.stream(PROMPTS, max_new_tokens=4)
        next(stream)
        with pytest.raises(RuntimeError, match="in use"):
            generator.add_corpus("late", [1])
        for _ in stream:
            pass


@pytest.mark.parametrize("model", [False, True])
def test_answers_draft_for_the_next_rollouts_of_a_prompt(pair: tuple[Path, Path], model: bool) -> None:
    proposer = Suffix(remember="prompt")
    with opened(pair, proposer=proposer) if model else lookup_alone(pair, proposer=proposer) as generator:
        assert generator.remembers == "prompt"
        first, again = told(generator), told(generator)
        assert torch.equal(first.sequences, again.sequences)
        steps = [sum(row.steps for row in one.stats.rows) for one in (first, again)]
        assert steps[1] < 0.8 * steps[0]


def test_the_memory_of_texts_is_in_the_plan(pair: tuple[Path, Path]) -> None:
    def buffers(**options: Any) -> int:
        return FastSpecGenerator.plan(pair[0], max_length=100, max_batch_size=2, device="cpu", **options).buffers

    bare = buffers(proposer=Suffix(prediction_tokens=0))
    assert buffers(proposer=Suffix(prediction_tokens=1000)) - bare == 8 * 3 * 1000, "two rows, and the one of prompts"
    with_corpus = buffers(proposer=Suffix(prediction_tokens=0, corpus_tokens=1000)) - bare
    lookup = Suffix(corpus_tokens=1000).on(torch.device("cpu"), Ops())
    assert lookup._corpus is not None
    table = lookup._corpus.table
    held = [getattr(table, each.name) for each in fields(table) if each.name != "rungs"]
    assert with_corpus == sum(each.nbytes for each in held if each.numel() >= 1000)


def test_a_server_takes_predictions_and_counts_them(pair: tuple[Path, Path]) -> None:
    body: dict[str, Any] = {"model": "small", "prompt": "the", "max_tokens": 24, "temperature": 0}
    with lookup_alone(pair, proposer=Suffix(remember="session")) as generator, running(generator) as server:
        text = post(server, body)[1]["choices"][0]["text"]
        for content in ("abc abc", [{"type": "text", "text": "abc "}, {"type": "text", "text": "abc"}]):
            status, answer = post(server, {**body, "prediction": {"type": "content", "content": content}})
            assert (status, answer["choices"][0]["text"]) == (200, text)
            details = answer["usage"]["completion_tokens_details"]
            assert details["rejected_prediction_tokens"] > 0
            assert details["accepted_prediction_tokens"] >= 0
        for bad in ({"type": "text", "content": "x"}, {"type": "content"}, {"type": "content", "content": []}, "x"):
            status, answer = post(server, {**body, "prediction": bad})
            assert (status, answer["error"]["param"]) == (400, "prediction")
        long = {"type": "content", "content": "x" * 5000}
        status, answer = post(server, {**body, "prediction": long})
        assert (status, answer["error"]["param"]) == (400, "prediction")
        assert "room for 4096" in answer["error"]["message"]
    with lookup_alone(pair) as generator, running(generator) as server:
        status, answer = post(server, {**body, "prediction": {"type": "content", "content": "x"}})
        assert (status, answer["choices"][0]["text"]) == (200, text), "it changes no answer, so it is taken"


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_server_remembers_for_clients_with_a_key_alone(pair: tuple[Path, Path], key: str | None) -> None:
    body: dict[str, Any] = {"model": "small", "prompt": "the", "max_tokens": 32, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    proposer, access = Suffix(prediction_tokens=0, remember="session"), Access((key,) if key else ())
    with lookup_alone(pair, proposer=proposer) as generator, running(generator, access=access) as server:
        usage = [post(server, body, headers=headers)[1]["usage"]["completion_tokens_details"] for _ in range(2)]
        accepted = [each["accepted_prediction_tokens"] for each in usage]
    assert accepted[1] > accepted[0] if key else accepted[1] == accepted[0]
