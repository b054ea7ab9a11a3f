"""On the device: passes over prompts that are taken for alike leave the same bits; no text hangs on what is kept."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.engine.pass_sizes import PassSizes
from fastspec.kernels import triton_ops
from fastspec.kernels.product.dispatch import packed_linear
from fastspec.output import GenerateOutput
from fastspec.scheduling import admission
from tests.graphs.test_text_bits import VOCAB, small_gap_pair
from tests.helpers.prompt_groups import check, pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
LENGTH = 2700  # a cell of the largest pass, and a tail of several


def made(*, prefix_cache: bool = True, draft_quantization: str | None = "auto") -> FastSpecGenerator:
    target, draft = small_gap_pair()
    return FastSpecGenerator(
        target, draft, dtype=torch.bfloat16, max_batch_size=3, max_length=4096, prefix_cache=prefix_cache,
        draft_quantization=draft_quantization, progress=False,
    )  # fmt: skip


def prompt_of(length: int = LENGTH, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def fed(engine: Engine, prompt: list[int], chunks: list[int], of_draft: list[int] | None = None) -> list[Tensor]:
    """K and V of target and draft after these passes, but for the last two places; and what a first token comes of.

    The draft's passes are those of the target, unless it has its own.
    """
    with engine.on_device():
        pages = engine.pages.reserve(0, len(prompt) + 16)
        admission.fill_prompt(engine.state, 0, prompt, pages, ())
        for draft in (False, True):
            engine.prompts.feed_row(0, 0, of_draft if draft and of_draft else chunks, draft=draft, running=False)
        proposer = engine.modules.proposer
        caches = [engine.modules.target.cache, proposer.model.cache]  # type: ignore[attr-defined, union-attr]
        at = torch.tensor(pages, device=engine.state.tokens.device)
        kept = [x[:, at].flatten(1, 2)[:, : len(prompt) - 2] for each in caches for x in (each.keys, each.values)]
        assert engine.modules.prompt_ends is not None
        kept.append(engine.modules.prompt_ends.hidden[0].clone())
        engine.pages.release(0)
        engine.state.reset()
        torch.cuda.synchronize()
    return kept


@pytest.mark.parametrize("draft_quantization", [None, "int8"])
def test_passes_that_are_alike_leave_the_same_bits(
    draft_quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size that is taken for alike, and every way to take a prompt up again; products of steps are told apart.

    Rounded weights have kernels of steps for few tokens, so a rounded draft has no passes of 64.
    """
    prompt = prompt_of()
    with made(draft_quantization=draft_quantization) as gen:
        engine = gen._loop.engine
        assert engine.sizes.same_bits == (64, 128, 256, 512, 1024, 2048)
        of_draft = engine.sizes.draft_chunks or engine.sizes.same_bits
        assert of_draft == (engine.sizes.same_bits if draft_quantization is None else engine.sizes.same_bits[1:])
        whole = fed(engine, prompt, engine.sizes.passes(LENGTH), engine.sizes.passes(LENGTH, draft=True))
        for size in engine.sizes.same_bits:
            drafts = max(size, of_draft[0])
            again = fed(engine, prompt, *([each] * -(-LENGTH // each) for each in (size, drafts)))
            assert all(map(torch.equal, again, whole)), size
        for most in (64, 128, 256, 512):
            again = fed(engine, prompt, *(engine.sizes.passes(LENGTH, 0, most, draft=draft) for draft in (False, True)))
            assert all(map(torch.equal, again, whole)), most
        monkeypatch.setattr(triton_ops, "prefill_linear", partial(packed_linear, pdl=True))
        monkeypatch.setattr(PassSizes, "captured", lambda sizes, tokens: False)  # launched, and not replayed
        other = fed(engine, prompt, [2048, 2048])
        assert not all(map(torch.equal, other, whole)), "the check sees passes of another kind"


@pytest.mark.parametrize(
    ("groups", "formats"),
    [
        (1000, {"draft_quantization": None}),
        (300, {"draft_quantization": "int8"}),
        (300, {"target_quantization": "fp8", "draft_quantization": "int4"}),
    ],
    ids=["values", "a draft in codes", "both in codes"],
)
def test_a_prompt_has_the_bits_of_its_own_passes_in_every_group(groups: int, formats: dict[str, str | None]) -> None:
    """In bf16. Passes are replayed: of up to 1024 tokens, and of every size if weights are in codes."""
    target, draft = small_gap_pair()
    with FastSpecGenerator(
        target, draft, dtype=torch.bfloat16, max_batch_size=8, max_length=1024, progress=False, **formats
    ) as gen:
        engine = gen._loop.engine
        assert engine.sizes.most_blocks == 32
        with engine.on_device():
            check(engine, pool(900), groups, seed=5)


def told(gen: FastSpecGenerator, prompts: list[list[int]], **options: object) -> GenerateOutput:
    output = gen.generate(
        prompts, max_new_tokens=24, eos_token_id=[], return_dict_in_generate=True, logprobs=1, **options
    )
    assert isinstance(output, GenerateOutput)
    return output


def test_a_chats_turns_are_those_of_a_fresh_generator() -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "seed": 3}
    first, results = prompt_of(1100), []  # a long one, and shorter ones beside it
    for prefix_cache in (True, False):
        with made(prefix_cache=prefix_cache) as gen:
            one = told(gen, [first])
            chat = first + one.new_tokens[0] + prompt_of(40, seed=1)
            shorter = first[:600]
            turns = [one, told(gen, [chat]), told(gen, [chat], **sampled), told(gen, [first, chat, shorter])]
            turns.append(told(gen, [chat], num_return_sequences=3, **sampled))
            results.append([(turn.new_tokens, turn.logprobs) for turn in turns])
            cached = [turn.stats.cached_tokens for turn in turns]
            assert cached == ([0, 1088, 1152, 1088 + 1152 + 576, 3 * 1152] if prefix_cache else [0] * 5)
    assert results[0] == results[1]
