"""Prompts that begin like earlier ones go on from kept states: text and states are a fresh generator's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, GenerateOutput
from fastspec.engine.engine import Engine
from fastspec.inputs.row_options import RowOptions
from fastspec.models.interface import states_of
from fastspec.scheduling.requests import CallPlan, Request
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import eagle3_tensors, write_eagle3
from tests.helpers.hybrid import VOCAB, make_hybrid
from tests.helpers.mtp import add_to, random_mtp, stored_names
from tests.helpers.scheduling import check_pages

NEW, UNIT = 8, 64
OPTIONS: dict[str, Any] = {
    **{"max_length": 400, "page_size": 16, "dtype": "float32", "device": "cpu", "progress": False},
    **{"max_batch_size": 1, "num_speculative_tokens": 3},
}
KINDS = ("plain", "itself", "other", "mtp", "eagle3", "dflash")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # no tokenizers, drafts that do not pay


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with an MTP layer, a smaller one, and heads."""
    path, target = tmp_path_factory.mktemp("hybrid"), make_hybrid("qwen3_5", num_hidden_layers=2, layer_types=_LAYERS)
    target.save_pretrained(path / "target")
    add_to(path / "target", stored_names("mtp", random_mtp(target, neutral=0.0), 0))
    make_hybrid("next", 9, num_hidden_layers=1, layer_types=_LAYERS[:1]).save_pretrained(path / "other")
    write_eagle3(path / "eagle3", eagle3_tensors(vocab=VOCAB, read=3), vocab=VOCAB, eagle_config=_READ)
    write_z_lab(path / "dflash", Head(target.config.hidden_size, VOCAB, target_layers=2))
    return path


_LAYERS = ["linear_attention", "full_attention"]
_READ = {"layer_ids": [0, 1, 2]}


def a_generator(root: Path, kind: str, **options: Any) -> FastSpecGenerator:
    draft = {"plain": None, "itself": root / "target", "mtp": "mtp"}.get(kind, root / kind)
    k = {} if draft else {"num_speculative_tokens": 0}
    return FastSpecGenerator(root / "target", draft, **{**OPTIONS, **k, **options})


def output(gen: FastSpecGenerator, prompt: list[int]) -> GenerateOutput:
    out = gen.generate([prompt], max_new_tokens=NEW, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(out, GenerateOutput)
    return out


def engine_of(gen: FastSpecGenerator) -> Engine:
    return gen._open().engine


def states(gen: FastSpecGenerator, length: int) -> list[Tensor]:
    """The state behind the last token but one of the one row there is, in each layer of the target, and its inputs."""
    cache = states_of(engine_of(gen).modules.target)
    assert cache is not None
    fed, slots, places = length - 1, cache.states.shape[2], cache.inputs.shape[2]
    inputs = [cache.inputs[:, 0, position % places] for position in range(fed - 3, fed)]
    return [each.clone() for each in (cache.states[:, 0, (fed - 1) % slots], *inputs)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[FastSpecGenerator, FastSpecGenerator]]:
    """A generator, and one that computes every prompt anew."""
    with a_generator(root, request.param) as gen, a_generator(root, request.param, prefix_cache=False) as fresh:
        yield gen, fresh


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def test_chats_go_on_and_branch_off_as_in_a_fresh_generator(
    pair: tuple[FastSpecGenerator, FastSpecGenerator],
) -> None:
    gen, fresh = pair
    rng, cached = random.Random(4), []
    system = drawn(rng, 150)
    chats = [system + drawn(rng, count) for count in (100, 90, 1, 60)]
    for turn in (0, 1, 2, 0, 3, 1, 1):
        prompt = chats[turn]
        found, wanted = output(gen, prompt), output(fresh, prompt)
        assert found.new_tokens == wanted.new_tokens
        assert found.stats.acceptance_rate == wanted.stats.acceptance_rate
        assert torch.equal(engine_of(gen).state.draft_tokens, engine_of(fresh).state.draft_tokens)
        length = len(prompt) + NEW
        assert all(map(torch.equal, states(gen, length), states(fresh, length)))
        check_pages(engine_of(gen))
        cached.append(found.stats.cached_tokens)
        chats[turn] = prompt + found.new_tokens[0] + drawn(rng, 20)
    # the second prompt computes all that it shares, and keeps the state where it branches off
    assert cached == [0, 0, 128, 192, 128, 128, 256]


def test_there_is_room_for_few_and_the_newest_stay(root: Path) -> None:
    with a_generator(root, "itself") as gen:
        engine, rng = engine_of(gen), random.Random(1)
        assert engine.prefix_states is not None
        assert engine.prefix is not None
        prompts = [drawn(rng, 80) for _ in range(7)]
        for prompt in prompts:
            output(gen, prompt)
        assert len(engine.prefix_states) == 4, "as the memory plan has it"
        assert [output(gen, prompt).stats.cached_tokens for prompt in reversed(prompts)] == [UNIT] * 4 + [0] * 3
        engine.prefix.make_room(engine.pages.num_pages - 1)
        assert not len(engine.prefix_states), "they go with their pages"


def test_a_prompt_that_is_cancelled_half_way_keeps_nothing(root: Path) -> None:
    with a_generator(root, "itself", prefill_budget=UNIT, max_batch_size=2) as gen:
        engine, rng = engine_of(gen), random.Random(2)
        assert engine.prefix_states is not None
        scheduler, options = Scheduler(engine), RowOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        running, late = Request(drawn(rng, 10), 60, options), Request(drawn(rng, 200), 4, options)
        for request in (running, late):
            scheduler.add(request, CallPlan((), GREEDY, lambda made: 3, lengths=(300, 10), joined=True))
            for _ in range(3):  # of `late`, all passes but the last one
                scheduler.step()
        assert len(engine.prefix_states) == 1
        assert not late.new_tokens
        scheduler.cancel(late)
        while not scheduler.idle:
            scheduler.step()
        assert not len(engine.prefix_states)
        check_pages(engine)


def test_after_an_error_nothing_is_kept(root: Path) -> None:
    with a_generator(root, "plain") as gen:
        engine, prompt = engine_of(gen), drawn(random.Random(3), 100)
        assert engine.prefix_states is not None
        output(gen, prompt)
        assert len(engine.prefix_states) == 1
        gen._loop.scheduler._reset()
        assert not len(engine.prefix_states)
        assert output(gen, prompt).stats.cached_tokens == 0
