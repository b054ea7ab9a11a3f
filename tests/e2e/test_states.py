"""Short convolutions, Mamba and Kimi delta attention, by family; nightly also the gated delta rule.

Text is transformers', and states are those of plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from fastspec import FastSpecGenerator
from fastspec.engine.explain import states_of_layers
from fastspec.models.decoder import Decoder
from fastspec.shapes import ConvRule, DeltaRule, MambaRule, SelectiveRule
from tests.helpers.fuzzing import CI
from tests.helpers.hybrid import KINDS, STATES, VOCAB, make_hybrid, make_states
from tests.helpers.state_runs import DRAFTS, OPTIONS, One, output, same

NEW, LONG = 100, 300
LENGTHS = (1, 9, 70)
# of which each is a family, or a part of one that no other has; see tests/models/families for the others
SEEDS = {
    **{"lfm2": 0, "lfm2_moe": 0, "lfm3": 0, "granite4_moe": 0, "bamba": 0, "falcon_h1": 0, "nemotron_h": 0},
    **{"jamba": 0, "kimi_linear": 0, "ling": 0, "zamba2": 0},
}
# of weights whose long texts have no near tie; 0 where none is named
LONG_SEEDS = {"falcon_h1_plain": 1, "nemotron_super": 1, "qwen3_5": 1}
GAP = 1e-4  # of logits of transformers around 10: fp32 sums of chunks there, and token by token here

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # no tokenizers, drafts that do not pay


class Model:
    """A checkpoint as transformers saves it, and its plain texts."""

    def __init__(self, kind: str, root: Path, seeds: dict[str, int] = SEEDS) -> None:
        make = make_hybrid if kind in KINDS else make_states
        self.live: PreTrainedModel = make(kind, seeds.get(kind, 0))
        self.directory = root / kind
        self.live.save_pretrained(self.directory)
        rng = random.Random(3)
        self.prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
        self.texts: list[list[int]] = []


@pytest.fixture(scope="module", params=SEEDS)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[One]:
    """A model in one row, whose drafts are scripted."""
    model = Model(request.param, tmp_path_factory.mktemp("states"))
    with FastSpecGenerator(
        model.directory, model.directory, num_speculative_tokens=DRAFTS, max_batch_size=2, **OPTIONS
    ) as gen:
        out = output(gen, model.prompts[:2], NEW, num_speculative_tokens=0)
        model.texts = out.new_tokens
        for k, new in ((DRAFTS, 30), (1, 9), (3, 9)):  # three rows in two places: rows end, move and begin
            out = output(gen, model.prompts[::-1], new, num_speculative_tokens=k)
            model.texts = (model.texts + out.new_tokens[:1])[:3]
            assert out.new_tokens == [text[:new] for text in model.texts[::-1]]
            assert out.stats.acceptance_rate == 1.0
    made = One(model)
    with made.gen:
        yield made


def test_greedy_text_is_that_of_transformers(one: One) -> None:
    assert isinstance(one.model, Model)
    check_is_transformers(one.model)


@torch.inference_mode()
def check_is_transformers(model: Model) -> None:
    for prompt, text in zip(model.prompts, model.texts, strict=True):
        logits = model.live(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == text
        top = logits.topk(2, dim=-1).values
        assert float((top[:, 0] - top[:, 1]).min()) > GAP
        assert len(set(text)) > min(len(text), VOCAB) // 4, "a text that repeats itself tests little"


def test_explain_names_the_states_and_what_computes_them(one: One) -> None:
    kinds = {
        **{ConvRule: "short convolutions", MambaRule: "Mamba-2", SelectiveRule: "Mamba-1"},
        DeltaRule: "Kimi delta attention",
    }
    kind = kinds[type(one.rules[0])]
    layers = f"{len(one.rules)} layers with {kind}"
    assert f"states     {layers}: torch, token by token" in one.gen.explain()
    modules = SimpleNamespace(target=one.engine.modules.target, ops=SimpleNamespace(name="triton"))
    engine: Any = SimpleNamespace(modules=modules)
    assert states_of_layers(engine).startswith(f"{layers}: Triton kernels")


def test_a_rejection_at_every_place_leaves_the_states_of_plain_decoding(one: One) -> None:
    for place in range(DRAFTS + 1):
        same(one, 1, 9, [place], [DRAFTS])
    assert one.proposer.steps == 2, "the last script was right"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*STATES, *KINDS])
def test_long_text_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """In uneven batches with and without drafts, and by itself with a rejection at every place."""
    model = Model(kind, tmp_path, LONG_SEEDS)
    with FastSpecGenerator(
        model.directory, model.directory, num_speculative_tokens=DRAFTS, max_batch_size=2, **OPTIONS
    ) as gen:
        model.texts = output(gen, model.prompts, LONG, num_speculative_tokens=0).new_tokens
        for k in (1, 3, DRAFTS):
            out = output(gen, model.prompts, LONG, num_speculative_tokens=k)
            assert out.new_tokens == model.texts
            assert out.stats.acceptance_rate == 1.0
    check_is_transformers(model)
    made = One(model)
    with made.gen:
        for k in (1, 3, DRAFTS):
            for place in range(k + 1):
                same(made, 1, LONG, [place], [k])


patterns = st.tuples(
    st.sampled_from((0, 1)),
    st.integers(1, 9),
    st.lists(st.integers(0, DRAFTS), min_size=1, max_size=6),
    st.lists(st.sampled_from([0, 1, 2, 3, DRAFTS]), min_size=1, max_size=4),
)


@settings(CI, max_examples=5)
@given(pattern=patterns)
def test_states_after_any_pattern_are_those_of_plain_decoding(
    one: One, pattern: tuple[int, int, list[int], list[int]]
) -> None:
    same(one, *pattern)


def states(gen: FastSpecGenerator, length: int) -> list[Tensor]:
    """The state after the last token but one of the one row there is, in each layer, and its inputs."""
    target = gen._open().engine.modules.target
    assert isinstance(target, Decoder)
    assert target.cache.states is not None
    cache, fed = target.cache.states, length - 1
    slots, places = cache.states.shape[2], cache.inputs.shape[2]
    inputs = [cache.inputs[:, 0, position % places] for position in range(fed - (places - slots), fed)]
    return [each.clone() for each in (cache.states[:, 0, (fed - 1) % slots], *inputs)]


def test_a_prompt_goes_on_from_the_kept_state_of_another(one: One) -> None:
    rng = random.Random(5)
    shared, more = ([rng.randrange(VOCAB) for _ in range(count)] for count in (70, 9))
    prompts = [shared, shared[:66] + more]
    options = {**OPTIONS, "max_batch_size": 1, "num_speculative_tokens": 0}
    with FastSpecGenerator(one.model.directory, **options) as gen:
        output(gen, prompts[:1], 3)
        found = output(gen, prompts[1:], 5)
        left = states(gen, len(prompts[1]) + 5)
    with FastSpecGenerator(one.model.directory, prefix_cache=False, **options) as fresh:
        wanted = output(fresh, prompts[1:], 5)
        assert (found.stats.cached_tokens, wanted.stats.cached_tokens) == (64, 0)
        assert found.new_tokens == wanted.new_tokens
        assert all(map(torch.equal, left, states(fresh, len(prompts[1]) + 5)))
