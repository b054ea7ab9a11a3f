"""bf16 on the device: text with drafts, and every logit behind it, is to the bit that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastspec import FastSpecGenerator, demo_pair
from fastspec.engine.engine import Engine
from fastspec.kernels.common import launch as device
from fastspec.kernels.gpu import has_pdl
from fastspec.output import GenerateOutput
from fastspec.shapes import GREEDY, chunks_of
from fastspec.state import RUNNING
from fastspec.step import prefill, score
from tests.helpers.modules import exchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
KS = (1, 3, 5, 8)
VOCAB = 32000


def small_gap_pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Random weights of real widths: the two largest logits lie close, so that one changed bit soon changes the text.

    The draft is the target with a little noise on the embedding: some drafts are accepted, some are not.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        target = LlamaForCausalLM(config).to(torch.bfloat16)
        for parameter in target.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
        draft = deepcopy(target)
        weight = draft.lm_head.weight.data
        weight += 0.1 * 0.02 * torch.randn_like(weight)
    return target, draft


def made(kind: str, max_length: int = 1024) -> FastSpecGenerator:
    target, draft = demo_pair() if kind == "shipped" else small_gap_pair()
    return FastSpecGenerator(
        target, draft, dtype=torch.bfloat16, num_speculative_tokens=max(KS), max_batch_size=8, max_length=max_length,
        progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["shipped", "small gap"])
def gen(request: pytest.FixtureRequest) -> Iterator[FastSpecGenerator]:
    with made(request.param) as generator:
        yield generator


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4096) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def told(gen: FastSpecGenerator, rows: list[list[int]], **options: Any) -> GenerateOutput:
    options = {"return_dict_in_generate": True, "eos_token_id": [], **options}
    out = gen.generate(rows, **options)
    assert isinstance(out, GenerateOutput)
    return out


def compare(gen: FastSpecGenerator, rows: list[list[int]], new: int, ks: tuple[int, ...]) -> list[float]:
    """Text of each k, alone and in batches with admissions, against plain decoding alone; tokens per step of each k."""
    plain = [told(gen, [row], max_new_tokens=new, num_speculative_tokens=0).new_tokens[0] for row in rows]
    assert told(gen, rows, max_new_tokens=new, num_speculative_tokens=0).new_tokens == plain
    pace = []
    for k in ks:
        together = told(gen, rows, max_new_tokens=new, num_speculative_tokens=k)
        assert together.new_tokens == plain, k
        pace.append(together.stats.tokens_per_step)
        for row, text in zip(rows, plain, strict=True):
            assert told(gen, [row], max_new_tokens=new, num_speculative_tokens=k).new_tokens[0] == text, k
    return pace


def test_text_is_that_of_plain_decoding(gen: FastSpecGenerator) -> None:
    # drafts are accepted and rejected: a text that never depends on them proves nothing
    assert all(1.1 < pace < k + 0.9 for k, pace in zip((3, 8), compare(gen, prompts(12), 150, (3, 8)), strict=True))


@pytest.mark.slow
@pytest.mark.long
def test_text_is_that_of_plain_decoding_at_length(gen: FastSpecGenerator) -> None:
    compare(gen, prompts(64, longest=20), 1000, KS)


def test_text_in_a_cache_whose_splits_grow() -> None:
    """Rows that come to where the size of splits changes, and short ones beside them."""
    rng = random.Random(1)
    rows = [[rng.randrange(4096) for _ in range(length)] for length in (1010, 12, 4330, 8170, 130)]
    with made("small gap", max_length=20_000) as gen:
        compare(gen, rows, 40, (3, 8))


def test_text_does_not_hang_on_max_length() -> None:
    """Which kernels decode a row hangs on its positions, not on how long a cache is."""
    if not has_pdl(torch.device("cuda")):
        pytest.skip("before sm_90 another kernel runs, whose splits are as the cache is long")
    rng = random.Random(2)
    rows = [[rng.randrange(4096) for _ in range(length)] for length in (12, 130, 400)]
    found = []
    for max_length in (512, 4096, 6000, 20_000):
        with made("small gap", max_length=max_length) as gen:
            for k in (0, 3):
                found.append(told(gen, rows, max_new_tokens=60, num_speculative_tokens=k, logprobs=2))
    for each in found[1:]:
        assert each.new_tokens == found[0].new_tokens
        assert each.logprobs == found[0].logprobs


def test_logits_behind_the_text(gen: FastSpecGenerator) -> None:
    rows = prompts(9)
    options = {"max_new_tokens": 60, "logprobs": 5}
    plain = [told(gen, [row], num_speculative_tokens=0, **options) for row in rows]
    for k in (1, 8):
        together = told(gen, rows, num_speculative_tokens=k, **options)
        assert together.logprobs == [each.logprobs[0] for each in plain]  # type: ignore[index]
        assert together.top_logprobs == [each.top_logprobs[0] for each in plain]  # type: ignore[index]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shipped", "small gap"])
def test_kernels_that_start_early_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand captured steps and more, with programmatic dependent launches and without."""
    if not has_pdl(torch.device("cuda")):
        pytest.skip("this GPU is older than sm_90, and no kernel starts early there")
    import fastspec.kernels.triton_ops  # noqa: F401  # all that launches is there before it is exchanged

    rows, completed = prompts(64, longest=20), device.completed
    found, early = [], set[bool]()

    def options_of(*given: Any, pdl: bool) -> dict[str, Any]:
        options = completed(*given)
        options["launch_pdl"] = pdl and options.get("launch_pdl", False)
        early.add(options["launch_pdl"])
        return options

    for pdl in (True, False):
        early.clear()
        with monkeypatch.context() as patch:
            exchange(patch, {completed: partial(options_of, pdl=pdl)})
            with made(kind) as gen:
                runs = [
                    told(gen, rows, max_new_tokens=900, num_speculative_tokens=k, logprobs=2, **options)
                    for k, options in ((0, {}), (3, {}), (3, {"temperature": 0.8, "do_sample": True, "seed": 1}))
                ]
        assert (True in early) == pdl
        assert sum(run.stats.steps for run in runs) >= 10_000 * 8  # steps of a row, of which a captured one has eight
        found.append([(run.new_tokens, run.logprobs, run.top_logprobs) for run in runs])
    for name, ours, theirs in zip(("plain", "drafted", "sampled"), *found, strict=True):
        assert ours == theirs, name


def fill(engine: Engine, texts: Tensor, rows: list[int], length: int) -> None:
    """Puts texts[rows] into rows 0.., prefilled but for the last of `length` tokens."""
    state = engine.state
    state.reset()
    engine.pages.release_all()
    for place, row in enumerate(rows):
        pages = engine.pages.reserve(place, 300)
        state.tokens[place, : texts.shape[1]] = texts[row]
        state.block_table[place, : len(pages)] = torch.tensor(pages, device=texts.device)
        state.lengths[place] = length
        state.limits[place] = 290
        state.finish[place] = RUNNING
        start = 0
        for chunk in chunks_of(engine.sizes.chunks, length - 1):
            view, shape = state.rows(place, place + 1), engine.shapes.chunk(start + chunk, chunk, GREEDY)
            prefill(engine.modules, view, shape, start, chunk)
            start += chunk


def scored(engine: Engine, texts: Tensor, rows: list[int], length: int, k: int, alone: bool) -> tuple[Tensor, Tensor]:
    """(logits [rows, k+1, V], K and V) of the k+1 tokens from `length - 1` on: in one pass, or in k+1 passes."""
    fill(engine, texts, rows, length)
    state = engine.state.rows(0, len(rows))
    state.draft_tokens[:, :k] = texts[rows, length : length + k]
    if alone:
        out = []
        for j in range(k + 1):
            state.lengths.fill_(length + j)
            out.append(score(engine.modules, state, engine.shapes.step(0, GREEDY, None, length + k)))
        logits = torch.cat(out, dim=1)
    else:
        logits = score(engine.modules, state, engine.shapes.step(k, GREEDY, None, length))
    cache = engine.modules.target.cache  # type: ignore[attr-defined]
    kept = [
        x[:, engine.state.block_table[place]].flatten(1, 2)[:, : length + k].clone()
        for place in range(len(rows))
        for x in (cache.keys, cache.values)
    ]
    state.reset()
    return logits.clone(), torch.stack(kept)


def test_logits_and_cache_of_one_pass(gen: FastSpecGenerator) -> None:
    """k + 1 rows against single rows, alone and among others, 1 to 72 rows of a product at once."""
    engine = gen._open().engine
    generator = torch.Generator().manual_seed(1)
    with engine.on_device():
        texts = torch.randint(4096, (8, 280), generator=generator).to(engine.state.tokens.device)
        for length in (5, 130, 260):
            single, cache = scored(engine, texts, [3], length, 8, True)
            for k, rows in ((8, [3]), (3, [3]), (0, [3]), (8, [3, 1, 0, 2, 4, 5, 6, 7]), (1, [6, 3, 2])):
                logits, kept = scored(engine, texts, rows, length, k, False)
                place = rows.index(3)
                assert torch.equal(logits[place], single[0, : k + 1]), (length, k, rows)
                ours = kept[2 * place : 2 * place + 2]
                assert torch.equal(ours, cache[:, :, : length + k]), (length, k, rows)
        engine.state.reset()
        engine.pages.release_all()
        torch.cuda.synchronize()


def test_the_check_sees_a_product_of_another_shape(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a library's product, which takes another kernel for another number of rows."""
    from fastspec.kernels import reference
    from fastspec.models.decoder import Decoder

    def library(self: Decoder, hidden: Tensor, tiling: Any) -> Tensor:
        norm = (self.weights.norm, self.spec.rms_eps)
        logits: Tensor = reference.linear(hidden, self.weights.head, norm=norm, out_dtype=torch.float32)
        return logits * (1 + 2.0**-20 * hidden.shape[1])

    monkeypatch.setattr(Decoder, "logits", library)
    engine = gen._open().engine
    with engine.on_device():
        texts = torch.randint(4096, (1, 280), device=engine.state.tokens.device)
        single, _ = scored(engine, texts, [0], 130, 3, True)
        assert not torch.equal(scored(engine, texts, [0], 130, 3, False)[0], single)
        engine.state.reset()
        engine.pages.release_all()
