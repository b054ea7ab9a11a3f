"""The host loop over small random decoders: stops, caps, batches, admissions, page orders, and bits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from fastspec.engine.engine import Engine
from fastspec.graphs.results import ResultRing
from fastspec.inputs.options import RowOptions, derive_seed
from fastspec.scheduling.prefill import PrefillQueue
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL, GREEDY, StepShape
from tests.helpers.devices import devices
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import VOCAB, tiny_engine

GREEDY_ROW = RowOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def sampled_row(seed: int, temperature: float = 1.0) -> RowOptions:
    return RowOptions(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


def prompts(count: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, 3, *(rng.randint(1, longest) for _ in range(count))][:count]
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def run(
    engine: Engine,
    rows: list[list[int]],
    new: int | list[int],
    *,
    k: int | Callable[[int], int] = 4,
    stop_ids: tuple[int, ...] = (),
    options: list[RowOptions] | None = None,
) -> list[Request]:
    caps = new if isinstance(new, list) else [new] * len(rows)
    chosen = options or [GREEDY_ROW] * len(rows)
    requests = [Request(list(row), cap, option) for row, cap, option in zip(rows, caps, chosen, strict=True)]
    sampler = FULL if options else GREEDY
    loop = run_all(engine, requests, stop_ids, sampler, k if callable(k) else lambda steps: k)
    streamed: dict[int, list[int]] = {index: [] for index in range(len(rows))}
    for emitted in loop:
        engine.pages.check_integrity()
        for index, tokens in emitted.items():
            streamed[index] += tokens
    for index, request in enumerate(requests):
        stats = request.stats()
        assert request.new_tokens == streamed[index]
        assert stats.emitted == len(request.new_tokens) == stats.steps + stats.accepted - stats.dropped
        assert sum(stats.histogram) == stats.steps
    assert engine.pages.num_free + engine.pages.num_idle == engine.pages.num_pages - 1
    return requests


def texts(requests: list[Request]) -> list[list[int]]:
    return [request.new_tokens for request in requests]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_speculative_text_is_plain_text(device: str, k: int) -> None:
    engine = tiny_engine(k=k, device=device)
    rows = prompts(6)
    plain = run(engine, rows, 36, k=0)
    drafted = run(engine, rows, 36, k=k)
    assert texts(drafted) == texts(plain)
    assert 0 < sum(request.accepted for request in drafted) < sum(request.drafted for request in drafted)


@pytest.mark.parametrize("device", devices())
def test_every_stop_place_and_every_cap(device: str) -> None:
    """Declare each produced token the stop id, at each cap: the cut is where plain decoding cuts."""
    k = 3
    engine = tiny_engine(k=k, device=device, same=True)  # full acceptance: every place of the block is reached
    row = prompts(5, seed=4)[4]
    length = 2 * (k + 1) + 1  # two whole blocks, and the first place of a third
    text = texts(run(engine, [row], length, k=0))[0]
    for stop_at in range(length):
        stop = text[stop_at]
        first = text.index(stop)
        for cap in range(1, length):
            (plain,) = run(engine, [row], cap, k=0, stop_ids=(stop,))
            (drafted,) = run(engine, [row], cap, k=k, stop_ids=(stop,))
            expected = text[: min(cap, first + 1)]
            reason = "stop" if first < cap else "length"
            for got in (plain, drafted):
                assert (got.new_tokens, got.finish_reason) == (expected, reason)


@pytest.mark.parametrize("device", devices())
def test_a_row_does_not_feel_its_neighbours(device: str) -> None:
    engine = tiny_engine(batch=3, device=device)
    rows = prompts(8, seed=1)
    caps = [5, 80, 17, 33, 1, 60, 2, 41]
    together = run(engine, rows, caps)
    for index, row in enumerate(rows):
        assert texts(run(engine, [row], caps[index]))[0] == together[index].new_tokens
    order = random.Random(3).sample(range(8), 8)
    permuted = run(engine, [rows[i] for i in order], [caps[i] for i in order])
    assert texts(permuted) == [together[i].new_tokens for i in order]


@pytest.mark.parametrize("device", devices())
def test_sampled_rows_depend_on_their_seed_alone(device: str) -> None:
    engine = tiny_engine(batch=3, device=device)
    rows = prompts(7, seed=2)
    options = [sampled_row(derive_seed(9, index, 0), temperature=index % 3 * 0.5) for index in range(7)]
    together = run(engine, rows, 24, options=options)
    for index, row in enumerate(rows):
        assert texts(run(engine, [row], 24, options=[options[index]]))[0] == together[index].new_tokens
    greedy_ones = [index for index in range(7) if options[index].temperature == 0]
    assert texts(run(engine, [rows[i] for i in greedy_ones], 24)) == [together[i].new_tokens for i in greedy_ones]
    other = run(engine, rows[:2], 40, options=[sampled_row(1), sampled_row(2)])
    assert texts(other)[1] != together[1].new_tokens


@pytest.mark.parametrize("device", devices())
def test_any_page_order_gives_the_same(device: str) -> None:
    rows = prompts(6, seed=5)
    expected = texts(run(tiny_engine(device=device), rows, 34))
    pages = tiny_engine().pages.num_pages
    for seed in range(3):
        order = random.Random(seed).sample(range(1, pages), pages - 1)
        assert texts(run(tiny_engine(order=order, device=device), rows, 34)) == expected
    for page_size in (1, 7, 64):
        assert texts(run(tiny_engine(page_size=page_size, device=device), rows, 34)) == expected


def test_rows_wait_until_their_pages_fit() -> None:
    """Pages for two long rows only: the third waits though a place is free, then runs the same."""
    rows = prompts(5, seed=6)
    expected = texts(run(tiny_engine(), rows, 60))
    scarce = tiny_engine(num_pages=1 + 2 * 9)
    assert texts(run(scarce, rows, 60)) == expected


@pytest.mark.parametrize("device", devices())
def test_poison_in_every_slot_changes_nothing(device: str) -> None:
    """A slot above a row's length, a free page and the trash page may hold anything, NaN included."""
    rows = prompts(6, seed=7)
    expected = texts(run(tiny_engine(device=device), rows, 60))
    engine = tiny_engine(device=device)
    for model in (engine.modules.target, engine.modules.proposer.model):  # type: ignore[union-attr]
        model.cache.keys.fill_(float("nan"))  # type: ignore[attr-defined]
        model.cache.values.fill_(float("nan"))  # type: ignore[attr-defined]
    engine.state.draft_probs.fill_(float("nan"))
    engine.state.tokens.fill_(VOCAB - 1)
    assert texts(run(engine, rows, 60)) == expected


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_model_accepts_itself(batch: int, device: str) -> None:
    """draft = target: all drafts accepted, over 800 tokens a row, k going 4, 0, 4 and rows coming and going."""
    engine = tiny_engine(k=4, batch=batch, max_length=900, device=device, same=True, chunks=(64,))
    rows = prompts(batch + 2, seed=8, longest=60)
    caps = [800] + [100] * (batch + 1)

    def choose_k(steps: int) -> int:
        return 0 if 40 <= steps < 100 or steps % 97 == 0 else 4

    requests = run(engine, rows, caps, k=choose_k)
    assert sum(request.drafted for request in requests) > 500  # most of the 800 tokens came from drafts
    for request in requests:
        assert request.accepted == request.drafted, request.stats()
    assert requests[0].plain_steps > 60


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("context", [1, 2, 30, 31, 32, 60])
def test_rows_outgrow_the_drafts_context(context: int, device: str) -> None:
    """Beyond the draft's context a row goes on without drafts, its neighbours with them; the text stays."""
    rows = prompts(5, seed=11, longest=50)
    plain = run(tiny_engine(device=device), rows, 70, k=0)
    requests = run(tiny_engine(device=device, same=True, draft_context=context), rows, 70)
    assert texts(requests) == texts(plain)
    for request in requests:
        last_drafted = max(0, context + 1 - len(request.prompt))
        assert (request.drafted > 0) == (last_drafted > 0)
        assert request.plain_steps >= request.limit - max(len(request.prompt), context + 1) - 4
        assert request.accepted == request.drafted  # the draft is the target: up to its context it is always right


@pytest.mark.parametrize("device", devices())
def test_logprobs_are_the_raw_targets(device: str) -> None:
    engine = tiny_engine(device=device)
    row = prompts(5, seed=12)[4]
    options = [RowOptions(temperature=1.5, top_k=5, top_p=0.9, min_p=0.0, seed=3)]
    found = {}
    for k in (0, 4):
        request = Request(list(row), 40, options[0])
        for _ in run_all(engine, [request], (), FULL, lambda steps, k=k: k, top_logprobs=3):  # type: ignore[misc]
            pass
        assert len(request.logprobs) == len(request.top_logprobs) == 40
        for token, logprob, top in zip(request.new_tokens, request.logprobs, request.top_logprobs, strict=True):
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
            assert logprob <= top[0][1]
            assert dict(top).get(token, logprob) == logprob
        found[k] = dict(zip(request.new_tokens, request.logprobs, strict=False))
    assert found[0].keys() & found[4].keys()


def test_a_draft_that_never_catches_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: without catching up, acceptance after plain steps drops."""
    monkeypatch.setattr(PrefillQueue, "catch_up", lambda self, rows, ahead: 0.0)
    engine = tiny_engine(k=4, batch=1, same=True)
    (request,) = run(engine, prompts(4, seed=8)[3:], 100, k=lambda steps: 0 if steps < 20 else 4)
    assert request.accepted < request.drafted


@pytest.mark.parametrize("device", devices())
def test_windows_are_respected_across_blocks(device: str) -> None:
    engine = tiny_engine(window=9, device=device)
    rows = prompts(4, seed=9)
    assert texts(run(engine, rows, 100, k=4)) == texts(run(engine, rows, 100, k=0))
    wide = tiny_engine(device=device)
    assert texts(run(wide, rows, 100)) != texts(run(engine, rows, 100))


def test_statistics_cost_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and counts come by way of the ring, which is host memory; no tensor of the state is ever read."""
    engine = tiny_engine(batch=2)
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: object, _name: str = name, _original: object = original) -> object:
            reads.append(_name)
            return _original(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, counted)
    requests = run(engine, prompts(5, seed=13), 30)
    monkeypatch.undo()
    assert set(reads) <= {"cpu", "numpy"}
    assert len(reads) < 5 * sum(request.steps for request in requests)  # one entry for all rows of a step


def test_abandoned_loop_leaves_nothing_behind() -> None:
    rows = prompts(5, seed=10)
    engine = tiny_engine(batch=2)
    expected = texts(run(engine, rows, 50))
    for steps in (0, 1, 3):
        requests = [Request(list(row), 50, GREEDY_ROW) for row in rows]
        loop = iter(run_all(engine, requests, (), GREEDY, lambda made: 4))
        for _ in range(steps):
            next(loop)
        del loop
        assert texts(run(engine, rows, 50)) == expected


def test_inference_mode_does_not_leak_between_steps() -> None:
    engine = tiny_engine()
    for _ in run_all(engine, [Request([1, 2], 20, GREEDY_ROW)], (), GREEDY, lambda made: 4):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("depth", [2, 3, 7])
def test_launching_ahead_changes_nothing(depth: int, device: str) -> None:
    """Rows that ended, rows admitted and rows that moved while later steps were under way already."""
    rows = prompts(9, seed=14)
    caps = [5, 80, 17, 33, 1, 60, 2, 41, 50]
    expected = run(tiny_engine(device=device), rows, caps, stop_ids=(7, 21))
    ahead = tiny_engine(device=device, depth=depth)
    for _ in range(2):
        got = run(ahead, rows, caps, stop_ids=(7, 21))
        assert texts(got) == texts(expected)
        assert [request.stats() for request in got] == [request.stats() for request in expected]


@pytest.mark.parametrize("depth", [1, 3])
def test_log_probabilities_do_not_depend_on_the_depth(depth: int) -> None:
    def recorded(depth: int) -> list[Request]:
        requests = [Request(row, 20, GREEDY_ROW) for row in prompts(5, seed=15)]
        for _ in run_all(tiny_engine(batch=2, depth=depth), requests, (), GREEDY, lambda made: 4, 3):
            pass
        return requests

    assert [(request.logprobs, request.top_logprobs) for request in recorded(depth)] == [
        (request.logprobs, request.top_logprobs) for request in recorded(1)
    ]


def test_a_draft_catches_up_when_steps_are_launched_ahead() -> None:
    """Plain steps in between: the draft must know how many tokens they made before it goes on."""
    engine = tiny_engine(k=4, batch=2, same=True, depth=3)
    for request in run(engine, prompts(3, seed=8), 100, k=lambda steps: 0 if steps // 5 % 2 else 4):
        assert request.accepted == request.drafted > 0


def test_rows_move_down_when_half_of_them_end() -> None:
    """One long row in the last place: it goes on in a bucket of one row, on the pages it had."""
    engine = tiny_engine(batch=4, depth=2)
    launched: list[int] = []
    launch = engine.launch

    def counted(rows: int, shape: StepShape) -> int:
        launched.append(rows)
        return launch(rows, shape)

    rows, caps = prompts(4, seed=3), [6, 6, 6, 70]
    expected = texts(run(tiny_engine(batch=4), rows, caps))
    spied = _Spied(engine, counted)
    assert texts(run(spied, rows, caps)) == expected  # type: ignore[arg-type]
    assert launched[0] == 4
    assert launched[-1] == 1
    assert launched.count(1) > 10


class _Spied:
    """An engine whose launches are seen."""

    def __init__(self, engine: Engine, launch: Callable[[int, StepShape], int]) -> None:
        self._engine, self.launch = engine, launch

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_no_step_is_launched_that_caps_make_useless() -> None:
    """Rows emit at least a token a step: of steps launched ahead none may start after the cap is sure to be reached."""
    engine = tiny_engine(batch=1, depth=6)
    (request,) = run(engine, prompts(1), 9, k=0)
    assert engine.ring.launched == request.steps == 9


def test_no_step_is_launched_ahead_that_acceptance_may_make_useless() -> None:
    """However many drafts are accepted, the device has nothing left to do when the last token was read."""
    for same in (True, False):
        engine = tiny_engine(batch=1, depth=2, same=same)
        (request,) = run(engine, prompts(1), 43, k=4)
        assert engine.ring.launched == request.steps
    engine = tiny_engine(batch=2, depth=2, same=True)
    short, long = run(engine, prompts(2), [10, 43], k=4)
    assert engine.ring.launched == long.steps > short.steps, "a row that needs it is not kept waiting"


def test_the_ring_says_so_when_a_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastspec.graphs.results.PATIENCE", 0.01)
    ring = ResultRing(batch=2, max_drafts=3, num_top=1, device=torch.device("cpu"), pinned=False)
    sequence = ring.count(lambda: None)
    with pytest.raises(RuntimeError, match=r"step 1 left no result \(the last one there is 0\)"):
        ring.read(sequence, 1)


def test_an_interrupted_launch_is_counted_right() -> None:
    """Ctrl-C between the launch and its counting: the next loop asks the device how many steps there were."""
    engine = tiny_engine(batch=1)
    rows = prompts(2, seed=4)[1:]
    expected = texts(run(engine, rows, 20))

    def interrupted() -> None:
        engine.ring.outbox.counter.add_(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.ring.count(interrupted)
    assert texts(run(engine, rows, 20)) == expected
