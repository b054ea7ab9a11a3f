"""On the device: hybrid models in captured steps. Drafts change no text and no state, nothing waits, memory is flat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.inputs.row_options import RowOptions
from fastspec.models.checkpoints.quantised.write import write_quantised
from fastspec.models.interface import states_of
from fastspec.output import GenerateOutput
from fastspec.scheduling.requests import Request
from fastspec.shapes import GREEDY
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import eagle3_tensors, write_eagle3
from tests.helpers.hybrid import STATES, VOCAB, make_hybrid, make_states
from tests.helpers.mtp import add_to, random_mtp, stored_names
from tests.helpers.scheduling import run_all
from tests.helpers.steady import check_nothing_waits_or_allocates, check_one_launch, waits_raise
from tests.helpers.tiny import capture_all

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]  # no tokenizers, drafts do not pay
NEW, DRAFTS, STEPS = 100, 4, 100
# heads as published ones have them, and widths of which every product is packed: else no piece of a prompt is kept
SIZES: dict[str, Any] = {
    **{
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    **{"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
}
OPTIONS: dict[str, Any] = {"device": "cuda", "max_batch_size": 4, "page_size": 16, "progress": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_hybrid("qwen3_5", std=0.1, **SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is mostly wrong."""
    path = tmp_path_factory.mktemp("other")
    make_hybrid("next", 7, num_hidden_layers=1, layer_types=["linear_attention"]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with an MTP layer in its checkpoint."""
    path = tmp_path_factory.mktemp("mtp")
    live = make_hybrid("qwen3_5", std=0.1, **SIZES)
    live.save_pretrained(path)
    return add_to(path, stored_names("mtp", random_mtp(live, std=0.1, neutral=0.0), 0))


def drawn(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def output(gen: FastSpecGenerator, prompts: list[list[int]], **options: Any) -> GenerateOutput:
    options = {"max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True, **options}
    out = gen.generate(prompts, **options)
    assert isinstance(out, GenerateOutput)
    return out


def states(gen: FastSpecGenerator, row: int, length: int) -> Tensor:
    """States of a row behind its last token but one, in every layer of the target."""
    engine = gen._open().engine
    cache = states_of(engine.modules.target)
    assert cache is not None
    held = int(engine.state.state_rows[row])
    return cache.states[:, held, (length - 2) % cache.states.shape[2]].clone()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_that_drafts_for_itself_is_always_right(target: Path, dtype: str) -> None:
    prompts = [drawn(count, count) for count in (1, 7, 70, 300)]
    with FastSpecGenerator(
        target, target, num_speculative_tokens=DRAFTS, dtype=dtype, max_length=512, **OPTIONS
    ) as gen:
        plain = output(gen, prompts, num_speculative_tokens=0).new_tokens
        for k in (1, 3, DRAFTS):
            out = output(gen, prompts, num_speculative_tokens=k)
            assert out.new_tokens == plain
            # a prompt's last token but one is read by a step of the draft and by a prompt pass of the target, which
            # round apart in 16 bits; a prompt of one token has none
            assert dtype == "bfloat16" or out.stats.acceptance_rate == 1.0
            assert output(gen, prompts[:1], num_speculative_tokens=k).stats.acceptance_rate == 1.0
        assert [output(gen, [prompt]).new_tokens[0] for prompt in prompts] == plain


@pytest.mark.parametrize("kind", STATES)
def test_other_states_give_the_text_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    make_states(kind, std=0.1).save_pretrained(tmp_path)
    prompts = [drawn(count, count) for count in (1, 7, 300)]
    with FastSpecGenerator(
        tmp_path, tmp_path, num_speculative_tokens=DRAFTS, dtype="bfloat16", max_length=512, **OPTIONS
    ) as gen:
        plain = output(gen, prompts, num_speculative_tokens=0).new_tokens
        for k in (1, DRAFTS):
            assert output(gen, prompts, num_speculative_tokens=k).new_tokens == plain
        assert [output(gen, [prompt]).new_tokens[0] for prompt in prompts] == plain


def test_refused_drafts_leave_the_states_of_plain_decoding(target: Path, other: Path) -> None:
    with FastSpecGenerator(
        target, other, num_speculative_tokens=DRAFTS, dtype="bfloat16", max_length=512, **OPTIONS
    ) as gen:
        for count in (1, 40, 130):
            prompt, found = drawn(count, count), []
            for k in (0, 1, DRAFTS):
                out = output(gen, [prompt], num_speculative_tokens=k)
                found.append((out.new_tokens, states(gen, 0, count + NEW)))
                assert not k or out.stats.acceptance_rate < 0.9
            for text, left in found[1:]:
                assert text == found[0][0]
                assert torch.equal(left, found[0][1])


def test_chats_are_those_of_a_generator_that_keeps_no_states(target: Path) -> None:
    system = drawn(300)
    prompts = [system + drawn(count, count) for count in (30, 150, 500, 30)]
    results = []
    for prefix_cache in (True, False):
        with FastSpecGenerator(
            target, target, dtype="bfloat16", max_length=1024, prefix_cache=prefix_cache, num_speculative_tokens=DRAFTS,
            **OPTIONS,
        ) as gen:  # fmt: skip
            found, cached = [], []
            for prompt in prompts:
                out = output(gen, [prompt])
                found.append((out.new_tokens, states(gen, 0, len(prompt) + NEW)))
                cached.append(out.stats.cached_tokens)
            results.append(found)
            prefix = gen._open().engine.prefix
            # of the first prompt the state behind its last piece is kept, and behind what is shared from the second on
            shared, last = (0 if prefix is None else n // prefix.unit * prefix.unit for n in (300, len(prompts[0]) - 2))
            assert cached == [0, shared if shared == last else 0, shared, last]
            assert (shared > 0) == prefix_cache
    for mine, theirs in zip(*results, strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])


@pytest.fixture(scope="module")
def of_mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2, attention, an MLP and experts."""
    path = tmp_path_factory.mktemp("mamba")
    make_states("nemotron_h", std=0.1, hidden_size=256).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pairs(
    target: Path, with_mtp: Path, of_mamba: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path | str]]:
    """A target, and what drafts for it."""
    path, sizes = tmp_path_factory.mktemp("heads"), {"inner": 256, "dim": 64}
    tensors = eagle3_tensors(hidden=256, target_hidden=256, vocab=VOCAB, drafted=VOCAB, **sizes)
    read = {"eagle_config": {"layer_ids": [1, 2, 3]}, "head_dim": sizes["dim"]}
    return {
        "itself": (target, target),
        "mtp": (with_mtp, "mtp"),
        "mamba": (of_mamba, of_mamba),
        "eagle3": (of_mamba, write_eagle3(path / "eagle3", tensors, vocab=VOCAB, **read)),
        "dflash": (target, write_z_lab(path / "dflash", Head(256, VOCAB, **sizes))),
    }


def check_texts(target: Path, draft: Path | str, **options: Any) -> None:
    """Drafts change no text, and neither does a row alone."""
    prompts = [drawn(count, count) for count in (1, 7, 70, 300)]
    options = {**OPTIONS, "dtype": "bfloat16", "max_length": 512, **options}
    with FastSpecGenerator(target, draft, num_speculative_tokens=DRAFTS, **options) as gen:
        plain = output(gen, prompts, num_speculative_tokens=0).new_tokens
        for k in (1, 3, DRAFTS):
            assert output(gen, prompts, num_speculative_tokens=k).new_tokens == plain
        for prompt, text in zip(prompts, plain, strict=True):
            assert output(gen, [prompt]).new_tokens == [text]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_learned_drafters_change_no_text(kind: str, pairs: dict[str, tuple[Path, Path | str]]) -> None:
    check_texts(*pairs[kind])


@pytest.mark.parametrize(("kind", "form"), [("mtp", "int8"), ("dflash", "fp8"), ("itself", "int4")])
def test_drafters_change_no_text_of_a_rounded_target(
    kind: str, form: str, pairs: dict[str, tuple[Path, Path | str]]
) -> None:
    check_texts(*pairs[kind], target_quantization=form)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_head_changes_no_text_of_a_target_that_is_stored_quantised(
    form: str, pairs: dict[str, tuple[Path, Path | str]], tmp_path: Path
) -> None:
    """Mamba-2, attention, and experts, all in codes."""
    target, head = pairs["eagle3"]
    write_quantised(str(target), tmp_path / "q", form)
    check_texts(tmp_path / "q", head)


@pytest.fixture(params=["itself", "mtp", "mamba", "eagle3", "dflash"])
def engine(request: pytest.FixtureRequest, pairs: dict[str, tuple[Path, Path | str]]) -> Iterator[Engine]:
    options = {**OPTIONS, "dtype": "bfloat16", "max_length": 1024}
    with FastSpecGenerator(*pairs[request.param], num_speculative_tokens=DRAFTS, **options) as gen:
        yield gen._open().engine


ROW = RowOptions(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def steps(engine: Engine, requests: list[Request], k: int) -> Iterator[object]:
    return iter(run_all(engine, requests, (), GREEDY, lambda made: k))


def long_requests() -> list[Request]:
    """Of many more steps than are looked at, even if all drafts were right."""
    return [Request(drawn(3), 900, ROW), Request(drawn(1), 900, ROW)]


@pytest.mark.parametrize("k", [0, DRAFTS])
def test_nothing_waits_or_allocates(engine: Engine, k: int) -> None:
    capture_all(engine, {k}, GREEDY)

    def admissions() -> None:
        requests = [Request(drawn(count, count), 20 + count, ROW) for count in (1, 300, 3, 300, 2, 9)]
        for _ in steps(engine, requests, k):
            pass

    admissions()  # kernels of prompts are compiled at their first use
    with waits_raise():
        admissions()
        loop = steps(engine, long_requests(), k)
        next(loop)
    check_nothing_waits_or_allocates(loop, STEPS)


def test_a_step_is_one_launch(engine: Engine) -> None:
    capture_all(engine, {DRAFTS}, GREEDY)
    check_one_launch(steps(engine, long_requests(), DRAFTS), STEPS)
