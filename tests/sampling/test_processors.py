"""What rows do to logits, against transformers' own processors and a count token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from fastspec.inputs.options import resolve
from fastspec.sampling import processors
from fastspec.sampling.distribution import compute_probs
from fastspec.scheduling.admission import NewRow, fill_options, fill_prompt
from fastspec.shapes import FULL
from fastspec.state import DecodeState
from tests.helpers.checkpoints import make_model

VOCAB, PLACES = 90, 4
LENGTH = 12


def state_of(prompts: list[list[int]], outputs: list[list[int]], options: dict[str, Any], places: int) -> DecodeState:
    """A state whose rows were admitted with `options` and have emitted `outputs`."""
    width = len(prompts[0])
    chosen = resolve(None, None, options, num_rows=len(prompts), prompt_length=width, vocab_size=VOCAB, context=100)
    state = DecodeState.allocate(
        batch=len(prompts),
        max_drafts=places - 1,
        max_length=40,
        pages_per_row=1,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    state.bias.fill_(math.nan)  # whatever an earlier call left
    state.unbiased.fill_(True)
    state.output_counts.fill_(7)
    state.in_prompt.fill_(True)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        fill_prompt(state, row, prompt, (1,), chosen.stop_ids)
        fill_options(state, [NewRow(row, len(prompt), 40, chosen.rows[row])], FULL)
        state.lengths[row] += len(output)
        block = torch.tensor([output])
        processors.count(state.output_counts[row : row + 1], block, torch.tensor([len(output)]))
    assert torch.equal(state.unbiased, (state.bias == 0).all(dim=1))
    return state


def rows_at_random(seed: int, count: int = 6) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """(prompts, outputs so far, drafts int64 [B, k]) of few ids, so that they repeat."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(20) for _ in range(length)]

    prompts = [ids(LENGTH) for _ in range(count)]
    outputs = [ids(rng.randrange(1, 6)) for _ in range(count)]
    return prompts, outputs, torch.tensor([ids(PLACES - 1) for _ in range(count)])


def theirs(prompt: list[int], so_far: list[int], logits: Tensor, options: dict[str, Any]) -> Tensor:
    """Logits [V] as transformers' own list of processors leaves them, for one row after `so_far` new tokens."""
    config = GenerationConfig(**{"max_new_tokens": 30, "pad_token_id": 0, **options})
    model = make_model("llama2")
    model._prepare_special_tokens(config, device="cpu")
    chain: LogitsProcessorList = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    return chain(torch.tensor([prompt + so_far]), logits[None])[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "bias": {"sequence_bias": [[[3], 2.5], [[7], -4.0]]},
    "bias then repetition": {"sequence_bias": [[[3], 2.5], [[7], -4.0]], "repetition_penalty": 1.3},
    "bad words": {"bad_words_ids": [[3], [11], [5]], "eos_token_id": 5},
    "suppressed": {"suppress_tokens": [2, 4, 6]},
    "min new": {"min_new_tokens": 4, "eos_token_id": [1, 2]},
    "min length": {"min_length": LENGTH + 3, "eos_token_id": [1, 2]},
    "all": {
        "repetition_penalty": 1.2,
        "sequence_bias": [[[3], 1.5], [[8], -3.0]],
        "bad_words_ids": [[9]],
        "suppress_tokens": [10],
        "min_new_tokens": 5,
        "eos_token_id": [1, 12],
    },
}


def compare(options: dict[str, Any], seed: int, more: dict[str, Any] | None = None) -> float:
    """The largest difference of any logit, at every place, to transformers'; -inf equals -inf alone."""
    prompts, outputs, drafts = rows_at_random(seed)
    state = state_of(prompts, outputs, {"max_new_tokens": 30, **options, **(more or {})}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    ours = processors.process(logits, state.processors, state.lengths, drafts)
    worst = 0.0
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for place in range(PLACES):
            wanted = theirs(prompt, output + drafts[row, :place].tolist(), logits[row, place], options)
            banned = wanted == -math.inf
            worst = math.inf if not torch.equal(ours[row, place] == -math.inf, banned) else worst
            worst = max(worst, (ours[row, place] - wanted)[~banned].abs().max().item())
    return worst


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_transformers_at_every_place(name: str, seed: int) -> None:
    assert compare(OPTIONS[name], seed) == 0.0


def test_laws_equal_transformers_with_filters_on_top() -> None:
    """Processors, then temperature, top-k, top-p, min-p: the whole chain of a sampling call."""
    options = {
        **OPTIONS["all"],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
    }
    prompts, outputs, drafts = rows_at_random(5)
    state = state_of(prompts, outputs, {"max_new_tokens": 30, **options}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    ours = compute_probs(processors.process(logits, state.processors, state.lengths, drafts), state.sampler)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for place in range(PLACES):
            wanted = theirs(prompt, output + drafts[row, :place].tolist(), logits[row, place], options).softmax(-1)
            assert torch.equal(ours[row, place] > 0, wanted > 0)
            # two fp32 softmaxes over 90 values: a few ulp (1.2e-7) of one
            torch.testing.assert_close(ours[row, place], wanted, rtol=1e-6, atol=1e-6)


def broken_order(logits: Tensor, rows: processors.ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    """The repetition penalty before the bias."""
    unbiased = replace(rows, bias=torch.zeros_like(rows.bias))
    return _process(logits, unbiased, lengths, drafts) + rows.bias[:, None]


def no_drafts(logits: Tensor, rows: processors.ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    """Drafts before a place are forgotten."""
    return _process(logits, rows, lengths, torch.full_like(drafts, -1))


def no_prompt(logits: Tensor, rows: processors.ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    return _process(logits, replace(rows, in_prompt=torch.zeros_like(rows.in_prompt)), lengths, drafts)


def one_late(logits: Tensor, rows: processors.ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    """Stop ids may come a token too early."""
    return _process(logits, replace(rows, min_lengths=rows.min_lengths - 1), lengths, drafts)


_process = processors.process


@pytest.mark.parametrize("invalid", [broken_order, no_drafts, no_prompt, one_late])
def test_the_comparison_finds_planted_bugs(invalid: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "process", invalid)
    assert compare(OPTIONS["all"], 1) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_presence_and_frequency_by_their_formula(seed: int) -> None:
    """vLLM's definition: logit - frequency * count - presence * (count > 0), counts of the output alone."""
    prompts, outputs, drafts = rows_at_random(seed)
    presence, frequency = [0.0, 0.5, 2.0, -1.0, 0.25, 0.0], [0.3, 0.0, -0.5, 2.0, 0.125, 1.0]
    given = {"presence_penalty": presence, "frequency_penalty": frequency, "max_new_tokens": 30}
    state = state_of(prompts, outputs, given, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(seed))
    ours = processors.process(logits, state.processors, state.lengths, drafts)
    for row in range(len(prompts)):
        for place in range(PLACES):
            so_far = outputs[row] + drafts[row, :place].tolist()
            wanted = logits[row, place].clone()
            for token in set(so_far):
                wanted[token] = wanted[token] - frequency[row] * so_far.count(token) - presence[row]
            # one product and two differences of numbers below 16, each rounded to fp32
            torch.testing.assert_close(ours[row, place], wanted, rtol=0, atol=3e-6)


def test_each_row_has_its_own() -> None:
    """Per-row lists: every row of a mixed batch is what it is alone."""
    prompts, outputs, drafts = rows_at_random(9)
    columns: dict[str, list[Any]] = {
        "repetition_penalty": [1.0, 1.5, 0.8, 1.0, 2.0, 1.1],
        "presence_penalty": [0.0, 0.5, 0.0, 1.0, 0.0, -1.0],
        "frequency_penalty": [0.5, 0.0, 0.0, 0.0, 0.0, 0.1],
        "min_new_tokens": [0, 3, 0, 5, 6, 2],
        "logit_bias": [None, {3: 1.0}, {4: -math.inf}, {}, None, {5: -2.0, 6: 1.0}],
        "allowed_token_ids": [None, [1, 2, 3, 4], None, [5, 6, 7], None, None],
        "bad_words_ids": [None, [[1]], None, None, [[3], [4]], None],
        "suppress_tokens": [None, None, [8], None, None, [9, 10]],
    }
    common = {"max_new_tokens": 30, "eos_token_id": [2, 3]}
    together = state_of(prompts, outputs, {**common, **columns}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(3))
    ours = processors.process(logits, together.processors, together.lengths, drafts)
    for row in range(len(prompts)):
        own = {name: values[row] for name, values in columns.items() if values[row] is not None}
        alone = state_of([prompts[row]], [outputs[row]], {**common, **own}, PLACES)
        at = slice(row, row + 1)
        got = processors.process(logits[at], alone.processors, alone.lengths, drafts[at])
        assert torch.equal(ours[at], got)
    allowed = (ours[1, 0] > -math.inf).nonzero().flatten().tolist()
    # 1 is a bad word, 2 and 3 are stop ids: transformers keeps stop ids out of bad words, and both wait for min_new
    assert allowed == ([4] if len(outputs[1]) < 3 else [2, 3, 4])


def test_neutral_rows_keep_every_bit() -> None:
    prompts, outputs, drafts = rows_at_random(2)
    state = state_of(prompts, outputs, {"max_new_tokens": 30, "eos_token_id": 3}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[0, 0, :5] = -math.inf
    logits[1, 1, 3] = 1e30
    assert torch.equal(processors.process(logits, state.processors, state.lengths, drafts), logits)


def test_a_smaller_vocabulary_sees_the_same() -> None:
    """A draft that knows fewer ids; ids that only the target knows are counted for nobody there."""
    prompts, outputs, drafts = rows_at_random(4)
    state = state_of(prompts, outputs, {"max_new_tokens": 30, **OPTIONS["all"], "frequency_penalty": 0.5}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(4))
    drafts[:, 1] = VOCAB - 1
    whole = processors.process(logits, state.processors, state.lengths, drafts)
    part = processors.process(logits[..., :15], state.processors, state.lengths, drafts)
    assert torch.equal(part, whole[..., :15])
    # the draft's own way to ask: one place, after j drafts
    for j in range(PLACES):
        one = processors.process(logits[:, j : j + 1], state.processors, state.lengths, drafts[:, :j])
        assert torch.equal(one[:, 0], whole[:, j])


def test_counts_take_in_what_was_emitted_and_no_more() -> None:
    counts = torch.zeros(3, 6, dtype=torch.int32)
    block = torch.tensor([[1, 1, 2, 5], [3, 3, 3, 99], [-1, 0, 0, 0]])
    processors.count(counts, block, torch.tensor([3, 2, 0]))
    assert counts.tolist() == [[0, 2, 1, 0, 0, 0], [0, 0, 0, 2, 0, 0], [0] * 6]


def test_broken_places_are_marked_where_they_are_needed() -> None:
    logits = torch.zeros(5, 3, 4)
    logits[0, 1, 2] = math.nan
    logits[1, 2] = -math.inf
    logits[2, 0, 0] = math.inf
    logits[3, :, 1:] = -math.inf  # one token is left: fine
    places = processors.invalid(logits)
    assert places.nonzero().tolist() == [[0, 1], [1, 2], [2, 0]]
    assert processors.flag_invalid(torch.tensor([2, 2, 2, 2, 2]), places).tolist() == [0, 1, -1, 2, 2]
    assert processors.flag_invalid(torch.tensor([0, 1, 0, 0, 1]), places).tolist() == [0, 1, -1, 0, 1]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": 1}, 1),
        ({"top_p": 0.0, "min_p": 1.0, "top_k": 1}, 1),
        ({"allowed_token_ids": [5]}, 1),
        ({"allowed_token_ids": [5, 6], "top_k": 50}, 2),
        ({"suppress_tokens": list(range(1, VOCAB)), "top_p": 0.01, "top_k": 0}, 1),
    ],
    ids=str,
)
def test_at_least_one_token_is_kept(options: dict[str, Any], left: int) -> None:
    prompts, outputs, drafts = rows_at_random(6)
    given = {"do_sample": True, "max_new_tokens": 30, **options}
    state = state_of(prompts, outputs, given, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(6))
    probs = compute_probs(processors.process(logits, state.processors, state.lengths, drafts), state.sampler)
    assert ((probs > 0).sum(-1) == left).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:2]))


def test_a_draft_law_of_nothing_is_one_on_some_id() -> None:
    probs = torch.tensor([[math.nan, math.nan, math.nan], [0.25, 0.75, 0.0], [0.5, math.nan, 0.5]])
    got = processors.drawable(probs)
    assert got.tolist() == [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]


def test_every_field_is_used() -> None:
    """A field that `process` forgot would leave some option without effect."""
    prompts, outputs, drafts = rows_at_random(7)
    state = state_of(prompts, outputs, {"max_new_tokens": 30, **OPTIONS["all"], "frequency_penalty": 0.5}, PLACES)
    state.presence.fill_(0.5)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(7))
    rows = state.processors
    before = processors.process(logits, rows, state.lengths, drafts)
    for field in fields(rows):
        value = getattr(rows, field.name)
        other = ~value if value.dtype == torch.bool else value + 1
        after = processors.process(logits, replace(rows, **{field.name: other}), state.lengths, drafts)
        assert not torch.equal(before, after), field.name


def drawn_options(rng: random.Random) -> dict[str, Any]:
    """A row's options, each there or not."""
    every: dict[str, Any] = {
        "repetition_penalty": rng.choice([0.7, 1.1, 1.8]),
        "sequence_bias": [[[rng.randrange(30)], rng.uniform(-4, 4)]],
        "bad_words_ids": [[token] for token in rng.sample(range(30), 3)],
        "suppress_tokens": rng.sample(range(30), 4),
        "allowed_token_ids": sorted(rng.sample(range(VOCAB), 60)),
        "min_new_tokens": rng.randint(1, 8),
        "temperature": rng.choice([0.3, 0.9, 1.7]),
        "top_k": rng.choice([1, 3, 40]),
        "top_p": rng.choice([0.2, 0.7, 0.95]),
        "min_p": rng.choice([0.02, 0.3]),
    }
    return {name: value for name, value in every.items() if rng.random() < 0.5}


def as_listed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The options of all rows as one call takes them: a list per option, neutral where a row has none."""
    columns: dict[str, Any] = {
        name: [row.get(name, neutral) for row in rows]
        for name, neutral in {
            "repetition_penalty": 1.0,
            "bad_words_ids": None,
            "suppress_tokens": None,
            "allowed_token_ids": None,
            "min_new_tokens": 0,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
        }.items()
    }
    biases = [{ids[0]: bias for ids, bias in row.get("sequence_bias", [])} for row in rows]
    return columns | {"logit_bias": biases}


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_random_options_equal_transformers(seed: int) -> None:
    """A batch whose every row has a mix of its own: the law at each place is that of transformers' own list."""
    rng = random.Random(seed)
    prompts, outputs, drafts = rows_at_random(seed, 8)
    asked = [drawn_options(rng) for _ in prompts]
    stops = [31, 32]
    common = {"max_new_tokens": 30, "eos_token_id": stops, "do_sample": True}
    state = state_of(prompts, outputs, {**common, **as_listed(asked)}, PLACES)
    logits = torch.randn(len(prompts), PLACES, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    ours = compute_probs(processors.process(logits, state.processors, state.lengths, drafts), state.sampler)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        options = {"top_k": 0, **common, **asked[row]}
        allowed = options.pop("allowed_token_ids", None)
        for place in range(PLACES):
            given = logits[row, place]
            if allowed is not None:
                so_far = torch.tensor([prompt + output])
                given = PrefixConstrainedLogitsProcessor(lambda batch, ids, allowed=allowed: allowed, 1)(
                    so_far, given[None]
                )[0]
            wanted = theirs(prompt, output + drafts[row, :place].tolist(), given, options).softmax(-1)
            assert torch.equal(ours[row, place] > 0, wanted > 0), asked[row]
            # two fp32 softmaxes over 90 values: a few ulp (1.2e-7) of one
            torch.testing.assert_close(ours[row, place], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_ids_without_a_bit_are_forbidden(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    logits = torch.randn(3, 2, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (3, 4, words), generator=generator).to(torch.int32)
    masks[0] = -1
    found = processors.allowed(logits, masks)
    assert torch.equal(found[0], logits[0])
    for row in range(3):
        for place in range(2):
            for token in range(vocab):
                bit = int(masks[row, place, token // 32]) >> (token % 32) & 1
                expected = float(logits[row, place, token]) if bit else -torch.inf
                assert float(found[row, place, token]) == expected
