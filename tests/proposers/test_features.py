"""Proposers that read hidden states of the target."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastspec import DeterministicProposer, FastSpecGenerator, demo_pair
from fastspec.engine.engine import Engine
from fastspec.models.decoder import Decoder
from fastspec.proposers.choose import Guarded
from fastspec.proposers.interface import feature_buffer, features_of
from fastspec.sampling.verify import Draws
from fastspec.shapes import UNTILED, ForwardBatch, StepShape
from fastspec.state import DecodeState
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.scheduling.test_scheduler import prompts, run, texts

CAP = 20


class Head:
    """Drafts a known text in rows whose features explain their last token, and nothing in others.

    The features behind the last layer, at the position before a row's last token, are what that token was chosen by.
    """

    max_length = 0
    deterministic = True
    features = (0, 1)

    def __init__(self, target: Decoder, known: list[list[int]]) -> None:
        self.target, self.known = target, known
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, *, features: Tensor) -> None:
        rows = torch.arange(state.batch)
        chosen_by = features[rows, state.emitted.clamp_min(1) - 1, 1]
        explained = self.target.logits(chosen_by, UNTILED).argmax(-1) == state.tokens[rows, state.lengths - 1]
        stepped = features.flatten(1).any(dim=1)
        state.draft_counts.zero_()
        for row in range(state.batch):
            text = state.tokens[row, : state.lengths[row]].tolist()
            ahead = next((known[len(text) :] for known in self.known if known[: len(text)] == text), [])
            drafts = ahead[: shape.num_drafts]
            if explained[row] and stepped[row]:
                state.draft_tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
                state.draft_counts[row] = len(drafts)
        self.seen.append((state.lengths.clone(), state.emitted.clone(), state.tokens.clone(), features.clone()))

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        return


class Quiet:
    """Reads features and drafts nothing."""

    max_length = 0
    deterministic = True

    def __init__(self, features: tuple[int, ...]) -> None:
        self.features = features

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        state.draft_counts.zero_()

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        return


def reading(engine: Engine, given: list[list[int]]) -> tuple[Engine, Head]:
    """The engine with a head that knows how it goes on after these prompts."""
    target = engine.modules.target
    assert isinstance(target, Decoder)
    plain = texts(run(tiny_engine(batch=engine.state.batch), given, CAP, k=0))
    head = Head(target, [[*prompt, *text] for prompt, text in zip(given, plain, strict=True)])
    buffer = feature_buffer(head, engine.state.batch, engine.shapes.max_drafts, 64, torch.float32, torch.device("cpu"))
    return replace(engine, modules=replace(engine.modules, proposer=Guarded(head, VOCAB), features=buffer)), head


def of_the_text(target: Decoder, tokens: Tensor, table: Tensor) -> Tensor:
    """Features of all tokens of a row in one pass: [1, n, 2, hidden]."""
    n = tokens.shape[1]
    nothing = torch.zeros(1, n, dtype=torch.bool)  # K and V are there already
    rows = ForwardBatch(tokens, torch.arange(n)[None], nothing, table, 1, UNTILED)
    return target.hidden_with_features(rows, (0, 1))[1]


@torch.inference_mode()
def test_features_are_those_of_the_last_step() -> None:
    given = prompts(1, seed=3)
    engine, head = reading(tiny_engine(batch=1, k=2), given)
    (request,) = run(engine, given, CAP, k=2)
    assert request.accepted == request.drafted > CAP // 2
    assert not head.seen[0][3].any(), "of a prompt of one token there is no hidden state"
    lengths, _, tokens, _ = head.seen[-1]
    table = torch.arange(1, engine.state.block_table.shape[1] + 1)[None]  # of an only row, as its pages are handed out
    whole = of_the_text(head.target, tokens[:, : int(lengths[0]) - 1], table)
    for now, emitted, _, features in head.seen[1:]:
        n = int(emitted[0])
        first = int(now[0]) - 1 - n
        # sums in another order, for another number of tokens is fed at once
        torch.testing.assert_close(features[0, :n], whole[0, first : first + n], rtol=1e-4, atol=1e-4)


class Told:
    """Takes in all it is told, drafts a wrong token, and keeps the position."""

    max_length = 0
    deterministic = True
    features = (-1, 0, 1, 2)
    kept = (1,)

    def __init__(self, target: Decoder) -> None:
        self.target = target
        self.rows: list[tuple[int, int, int, Tensor]] = []  # page, position, token behind it, hidden states
        self.newest: list[tuple[int, int, int]] = []  # length, emitted, what is kept

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        for row, place in rows.write_mask.nonzero().tolist():
            at = int(rows.positions[row, place]), int(rows.ids[row, place])
            self.rows.append((int(rows.block_table[row, 0]), *at, features[row, place]))
        return rows.positions[..., None].float()

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, *, features: Tensor) -> None:
        state.draft_tokens[:, : shape.num_drafts] = 3
        state.draft_counts.fill_(shape.num_drafts)
        for row in state.running.nonzero()[:, 0].tolist():
            self.newest.append((int(state.lengths[row]), int(state.emitted[row]), int(features[row, 0])))

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        raise AssertionError("it is told all")


@torch.inference_mode()
def test_every_position_is_told_once_with_what_follows_it() -> None:
    engine = tiny_engine(batch=2, k=3)
    assert isinstance(engine.modules.target, Decoder)
    told = Told(engine.modules.target)
    modules = replace(engine.modules, proposer=Guarded(told, VOCAB), features=torch.zeros(2, 1))
    engine = replace(engine, modules=modules)
    given = [[5, 6, 7, 8], list(range(70)), [9]]
    requests = run(engine, given, [6, 9, 5], k=lambda steps: (3, 0, 1)[steps % 3])
    known = {page: [row for row in told.rows if row[0] == page] for page in {row[0] for row in told.rows}}
    whole = sorted([[*request.prompt, *request.new_tokens] for request in requests], key=len)
    rows = [each for page in known for each in known[page]]
    assert len(rows) == len({(page, position, token) for page, position, token, _ in rows})
    for text in whole:
        pairs = [(position, token) for _, position, token, _ in rows]
        assert all(pair in pairs for pair in enumerate(text[1:])), "those of the step that ended the row, too"
    assert told.newest
    assert all(kept == length - 2 for length, emitted, kept in told.newest if length > 1)


@torch.inference_mode()
def test_the_ends_of_the_stream_can_be_read() -> None:
    """Layer -1 is the embedding, one more than there are is behind the final norm."""
    target = tiny_engine(batch=1, k=2).modules.target
    assert isinstance(target, Decoder)
    ids = torch.tensor([[5, 6, 7]])
    rows = ForwardBatch(ids, torch.arange(3)[None], ids > 0, torch.arange(1, 5)[None], 1, UNTILED)
    last, features = target.hidden_with_features(rows, (2, -1, 1))
    assert torch.equal(features[:, :, 1], target.weights.embed.unpack()[ids])
    assert torch.equal(features[:, :, 2], last)
    normed = last / (last.pow(2).mean(-1, keepdim=True) + target.spec.rms_eps).sqrt() * target.weights.norm
    torch.testing.assert_close(features[:, :, 0], normed)


class LastHidden(DeterministicProposer):
    """Drafts what the target's head makes of the newest hidden state: the last token once more."""

    features = (1,)

    def __init__(self, target: Decoder) -> None:
        self.target = target
        self.right = 0

    def guess(self, tokens: Tensor, lengths: Tensor, k: int, features: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        picked = self.target.logits(features[:, :1], UNTILED)[:, 0].argmax(-1)
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        self.right += int((picked == last).sum())
        return picked[:, None].expand(-1, k), torch.full_like(lengths, k)


def test_a_guess_may_ask_for_the_newest_hidden_state() -> None:
    engine = tiny_engine(batch=1, k=2)
    assert isinstance(engine.modules.target, Decoder)
    proposer = LastHidden(engine.modules.target)
    buffer = feature_buffer(proposer, 1, 2, 64, torch.float32, torch.device("cpu"))
    modules = replace(engine.modules, proposer=proposer, features=buffer)
    (request,) = run(replace(engine, modules=modules), [[5, 6, 7]], 12, k=2)
    assert proposer.right == request.steps - 1, "all but the first, whose last token nobody picked"


def test_rows_read_their_own_features() -> None:
    """Rows come, go and move: with another row's features their last token would not be explained."""
    given = prompts(5, seed=4)
    engine, head = reading(tiny_engine(batch=3, k=2), given)
    caps = [7, CAP, 12, 18, 15]
    for request, known in zip(run(engine, given, caps, k=2), head.known, strict=True):
        assert request.new_tokens == known[len(request.prompt) :][: request.max_new_tokens]
        # all steps but the first draft, and those near the end of what is known
        assert request.accepted >= 2 * (request.steps - 2)


def test_most_proposers_read_none() -> None:
    assert features_of(None) == features_of(tiny_engine().modules.proposer) == ()
    assert feature_buffer(object(), 1, 4, 8, torch.float32, torch.device("cpu")) is None
    engine, _ = reading(tiny_engine(batch=1, k=2), [[1, 2]])
    with pytest.raises(TypeError, match="features"):
        run(replace(engine, modules=replace(engine.modules, features=None)), [[1, 2]], 3)


def test_the_buffer_is_in_the_memory_plan() -> None:
    target = demo_pair()[0]
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]

    def planned(features: tuple[int, ...]) -> int:
        with FastSpecGenerator(
            target,
            proposer=Quiet(features),
            max_batch_size=2,
            num_speculative_tokens=3,
            max_length=60,
            device="cpu",
            progress=False,
        ) as generator:
            return generator.memory_plan.buffers

    buffer = feature_buffer(Quiet((0, 1)), 2, 3, hidden, torch.float32, torch.device("cpu"))
    assert buffer is not None
    rows = 3  # two, and the one that prompts pass through
    left = 2 * hidden * 4  # of both layers, of a long prompt's last token
    assert planned((0, 1)) - planned(()) == buffer.nbytes * rows // 2 + rows * left
