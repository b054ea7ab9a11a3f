"""`score` gives the log-probabilities that `generate` recorded, to the bit; prompts are scored by their passes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, InvalidLogits, NGram, Suffix, UnsupportedOption
from fastspec.engine.scores import SCORED, PromptScores
from fastspec.grammar.row import GivenTokens
from fastspec.inputs import scored as scored_inputs
from fastspec.models.decoder import Decoder
from fastspec.output import GenerateOutput, ScoreOutput
from fastspec.sampling import processors
from fastspec.sampling.distribution import SamplerRows, compute_probs, sampled_logits
from fastspec.shapes import LONG_PROMPT
from tests.helpers import families, hosted, hybrid, quantised
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, write_speculators
from tests.helpers.mtp import write_target

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
NEW = 21
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
OPTIONS: dict[str, Any] = {"max_length": 256, "max_batch_size": 3, "device": "cpu", "progress": False}
PROPOSERS = ("none", "ngram", "model", "coupled", "auto", "suffix", "eagle3", "dflash", "mtp")


def prompts_of(vocab: int, lengths: tuple[int, ...] = (1, 2, 70, 9)) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def made(kind: str, path: Path, dtype: str, **more: Any) -> FastSpecGenerator:
    if kind == "mtp":
        return FastSpecGenerator(write_target(path / "target", "nextn")[0], "mtp", dtype=dtype, **OPTIONS | more)
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS)
    drafts: dict[str, Any] = {
        "none": lambda: {"num_speculative_tokens": 0},
        "ngram": lambda: {"proposer": NGram()},
        "model": lambda: {"draft": make_checkpoint(path / "draft", "llama3", seed=1, num_hidden_layers=1)},
        "coupled": lambda: {
            "draft": make_checkpoint(path / "draft", "llama3", seed=1, num_hidden_layers=1),
            "verification": "coupled",
        },
        "auto": lambda: {"proposer": NGram(), "num_speculative_tokens": "auto"},
        "suffix": lambda: {"proposer": Suffix(remember="prompt"), "verification": "coupled"},
        "eagle3": lambda: {"draft": write_speculators(path / "head", eagle3_tensors(std=0.5), boundaries=[2, 4, 5])},
        "dflash": lambda: {"draft": write_z_lab(path / "head", Head(HIDDEN, VOCAB, target_layers=LAYERS, mask_id=10))},
    }
    return FastSpecGenerator(target, **{"dtype": dtype, **OPTIONS, **drafts[kind](), **more})


@pytest.fixture(scope="module", params=[(kind, "float32") for kind in PROPOSERS] + [("model", "bfloat16")], ids=str)
def gen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    kind, dtype = request.param
    with made(kind, tmp_path_factory.mktemp(kind), dtype) as generator:
        yield generator


def sampled(gen: FastSpecGenerator, prompts: list[list[int]], **more: Any) -> GenerateOutput:
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 3, "eos_token_id": [], "logprobs": 2}
    found = gen.generate(prompts, return_dict_in_generate=True, **options | more)
    assert isinstance(found, GenerateOutput)
    return found


def scored(gen: FastSpecGenerator, prompts: list[list[int]], answers: list[list[int]], **more: Any) -> ScoreOutput:
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return gen.score(rows, lengths=[len(prompt) for prompt in prompts], top_logprobs=2, **more)


def same(ours: list[list[float]], theirs: list[list[float]] | None) -> bool:
    """Equal to the bit, row for row."""
    assert theirs is not None
    return len(ours) == len(theirs) and all(map(torch.equal, map(torch.tensor, ours), map(torch.tensor, theirs)))


def check_law(gen: FastSpecGenerator, vocab: int) -> None:
    """Scores are those of generation, of rows together and alone, whatever k drew the tokens."""
    prompts = prompts_of(vocab)
    for more in ({}, {"num_speculative_tokens": 0, "temperature": 0.7}):
        drawn = sampled(gen, prompts, **more)
        found = scored(gen, prompts, drawn.new_tokens)
        assert same(found.logprobs, drawn.logprobs)
        assert found.top_logprobs == drawn.top_logprobs
        assert any(
            chosen != pairs[0][0] for chosen, pairs in zip(drawn.new_tokens[2], found.top_logprobs[2], strict=True)
        )
        backwards = scored(gen, prompts[::-1], drawn.new_tokens[::-1], prompt_logprobs=False)
        assert backwards.prompt_logprobs is None
        assert same(backwards.logprobs[::-1], drawn.logprobs)
    alone = [scored(gen, [prompt], [answer]) for prompt, answer in zip(prompts, drawn.new_tokens, strict=True)]
    assert same([each.logprobs[0] for each in alone], drawn.logprobs)
    assert same([each.prompt_logprobs[0] for each in alone if each.prompt_logprobs], found.prompt_logprobs)


def test_scores_are_those_of_generation(gen: FastSpecGenerator) -> None:
    check_law(gen, VOCAB if gen.vocab_size > VOCAB else gen.vocab_size)


def test_scores_of_prompts_are_those_that_generate_records(gen: FastSpecGenerator) -> None:
    prompts = prompts_of(gen.vocab_size)
    drawn = sampled(gen, prompts, prompt_logprobs=2)
    found = scored(gen, prompts, drawn.new_tokens)
    assert found.prompt_logprobs is not None
    assert same(found.prompt_logprobs, drawn.prompt_logprobs)
    assert found.prompt_top_logprobs == drawn.prompt_top_logprobs
    assert [len(values) for values in found.prompt_logprobs] == [len(prompt) - 1 for prompt in prompts]
    plain = sampled(gen, prompts)
    assert plain.prompt_logprobs is None
    assert plain.new_tokens == drawn.new_tokens
    assert same(drawn.logprobs or [], plain.logprobs)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    with made("model", tmp_path_factory.mktemp("pair"), "float32") as generator:
        yield generator


LAW: dict[str, Any] = {
    "do_sample": True,
    "temperature": [0.6, 1.3, 1.0, 0.0],
    "top_k": [0, 7, 40, 3],
    "top_p": [1.0, 0.9, 0.5, 1.0],
    "min_p": [0.0, 0.1, 0.02, 0.0],
    "repetition_penalty": [1.0, 1.4, 1.0, 1.0],
    "presence_penalty": [0.0, 0.0, 0.5, 0.0],
    "frequency_penalty": [0.0, 0.3, -0.4, 0.9],
    "logit_bias": [{}, {5: -float("inf"), 9: 3.0}, {}, {}],
    "min_new_tokens": [0, 0, 8, 8],
    "eos_token_id": [11, 12],
    "logprobs_mode": "processed",
}


def law_holds(gen: FastSpecGenerator, **more: Any) -> bool:
    """True if answers drawn under LAW have the same scores under the same options."""
    prompts = prompts_of(gen.vocab_size)
    drawn = sampled(gen, prompts, **{**LAW, "max_new_tokens": 9, **more})
    found = scored(gen, prompts, drawn.new_tokens, **LAW)
    return same(found.logprobs, drawn.logprobs) and found.top_logprobs == drawn.top_logprobs


def test_scores_under_options_are_those_of_generation(gen: FastSpecGenerator) -> None:
    """Whatever k drew the tokens."""
    assert law_holds(gen)
    assert law_holds(gen, num_speculative_tokens=0)


def test_values_under_options_are_those_of_the_definition(drafting: FastSpecGenerator) -> None:
    """Of the distribution that the sampler draws from, by torch in fp32, with penalties of the tokens so far."""
    (prompt,) = prompts_of(VOCAB, (20,))
    options = {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "frequency_penalty": 0.5, "do_sample": True}
    drawn = sampled(drafting, [prompt], **options, logprobs_mode="processed")
    (answer,), (values,) = drawn.new_tokens, drawn.logprobs or [[]]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(drafting._target.directory, dtype=torch.float32)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    rows = SamplerRows(torch.tensor([0.7]), torch.tensor([12]), torch.tensor([0.8]), torch.tensor([0.0]))
    for place, (token, value) in enumerate(zip(answer, values, strict=True)):
        counts = torch.bincount(torch.tensor(answer[:place], dtype=torch.int64), minlength=logits.shape[1])
        probs = compute_probs((logits[place] - 0.5 * counts)[None, None], rows)[0, 0]
        assert abs(float(probs[token].log()) - value) < 1e-4  # logits of transformers differ by fp32's rounding


def test_answers_of_another_law(drafting: FastSpecGenerator) -> None:
    """A token that a filter removes has log-probability -inf; raw and processed rows share steps."""
    (prompt,) = prompts_of(VOCAB, (20,))
    drawn = sampled(drafting, [prompt], max_new_tokens=30)
    handle = drafting.submit(prompt, max_new_tokens=30, do_sample=True, top_k=0, seed=3, eos_token_id=[], logprobs=True)
    law = {"do_sample": True, "top_k": 1, "logprobs_mode": "processed"}
    found = scored(drafting, [prompt], drawn.new_tokens, **law)
    assert {*found.logprobs[0]} == {0.0, -float("inf")}
    assert same(handle.result().logprobs or [], sampled(drafting, [prompt], max_new_tokens=30, seed=3).logprobs)
    assert scored(drafting, [prompt], drawn.new_tokens, logprobs_mode="raw").logprobs == drawn.logprobs
    whole = drafting.score([prompt], logprobs_mode="processed", do_sample=True, temperature=0.5)
    assert whole.prompt_logprobs == drafting.score([prompt]).prompt_logprobs  # a prompt is not sampled


@pytest.mark.parametrize("fault", ["penalties", "drafts"])
def test_faults_of_options_are_found(fault: str, drafting: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "penalties":
        made = scored_inputs._scored
        monkeypatch.setattr(
            scored_inputs, "_scored", lambda *row: replace(made(*row), frequency_penalty=0.0, presence_penalty=0.0)
        )
    else:  # tokens before a place in the same step do not count

        def forgetful(logits: torch.Tensor, rows: Any, work: Any) -> torch.Tensor:
            k = logits.shape[1] - 1
            judged = processors.process(logits, rows.processors, rows.lengths, rows.draft_tokens[:, :k] * 0 - 1)
            return torch.where(rows.processed[:, None, None], sampled_logits(judged, rows.sampler), logits)

        monkeypatch.setattr(drafting._loop.engine.modules.ops, "processed_logits", forgetful)
    assert not law_holds(drafting)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.5}, ValueError, "temperature does not change log-probabilities of the raw target"),
        ({"logprobs_mode": "cooked"}, ValueError, "logprobs_mode must be one of raw, processed, got 'cooked'"),
        ({"max_new_tokens": 3}, UnsupportedOption, "score has no option 'max_new_tokens'"),
        (
            {"logprobs_mode": "processed", "suppress_tokens": [3]},
            ValueError,
            "row 0, position 2: the options ban id 3",
        ),
        (
            {"logprobs_mode": "processed", "allowed_token_ids": [3]},
            ValueError,
            "row 0, position 3: the options ban id 4",
        ),
        (
            {"logprobs_mode": "processed", "min_new_tokens": 1, "eos_token_id": 4, "do_sample": True},
            ValueError,
            "row 0, position 3: id 4 ends an answer",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_scored_are_named(
    options: dict[str, Any], error: type[Exception], message: str, drafting: FastSpecGenerator
) -> None:
    with pytest.raises(error, match=message):
        drafting.score([[1, 2, 3, 4, 5]], lengths=2, **options)


def test_what_generate_does_not_record_is_named(drafting: FastSpecGenerator) -> None:
    with pytest.raises(ValueError, match="logprobs_mode='processed' needs logprobs"):
        drafting.generate([[1, 2]], logprobs_mode="processed")
    with pytest.raises(UnsupportedOption, match="logprobs_mode='processed' is not supported with regex"):
        drafting.generate([[1, 2]], logprobs_mode="processed", logprobs=True, regex="a")


def differs(gen: FastSpecGenerator) -> bool:
    """True if the scores of a drawn answer are not those of its generation."""
    prompts = prompts_of(VOCAB)[2:]
    drawn = sampled(gen, prompts, prompt_logprobs=1)
    found = scored(gen, prompts, drawn.new_tokens)
    assert found.prompt_logprobs is not None
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(gen._target.directory, dtype=torch.float32)
        exact = [model(torch.tensor([prompt])).logits.log_softmax(-1)[0] for prompt in prompts]
    close = all(
        torch.allclose(
            torch.tensor(values), logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4
        )
        for prompt, values, logprobs in zip(prompts, found.prompt_logprobs, exact, strict=True)
    )
    return not (same(found.logprobs, drawn.logprobs) and close)


def test_scores_of_prompts_are_those_of_transformers(drafting: FastSpecGenerator) -> None:
    assert not differs(drafting)


@pytest.mark.parametrize("fault", ["answer", "prompt"])
def test_a_shift_by_one_is_found(fault: str, drafting: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in the code that the tests above must find."""
    if fault == "answer":
        made = GivenTokens.__init__

        def late(self: GivenTokens, tokens: list[int], vocab_size: int) -> None:
            made(self, [*tokens[1:], tokens[0]], vocab_size)

        monkeypatch.setattr(GivenTokens, "__init__", late)
    else:
        add = PromptScores.add

        def rolled(self: PromptScores, target: Any, hidden: torch.Tensor, start: int, tiling: Any) -> None:
            add(self, target, hidden.roll(1, dims=1), start, tiling)

        monkeypatch.setattr(PromptScores, "add", rolled)
    assert differs(drafting)


def test_rows_without_lengths_are_prompts(drafting: FastSpecGenerator) -> None:
    rows = [*prompts_of(VOCAB), prompts_of(VOCAB)[2] * 2]
    whole = drafting.score(rows, top_logprobs=1)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_top_logprobs is not None
    assert [len(values) for values in whole.prompt_logprobs] == [len(row) - 1 for row in rows]
    assert [len(pairs) for pairs in whole.prompt_top_logprobs] == [len(row) - 1 for row in rows]
    assert whole.logprobs == [[]] * len(rows)
    parted = drafting.score(rows, lengths=[max(1, len(row) - 1) for row in rows])
    joined = [a + b for a, b in zip(parted.prompt_logprobs or [], parted.logprobs, strict=True)]
    assert same(joined, whole.prompt_logprobs)
    array = drafting.score(torch.tensor(rows[2:3]), lengths=torch.tensor([5]))
    assert len(array.logprobs[0]) == 65
    assert drafting.score([[7]]).prompt_logprobs == [[]]
    full = drafting.score([[5] * 256, [5] * 40], lengths=[255, 3])  # rows of max_length beside long answers
    assert [len(values) for values in full.logprobs] == [1, 37]


def test_nothing_to_score_while_requests_run(drafting: FastSpecGenerator) -> None:
    """A row of one token has no score; its call ends also if another thread makes the steps."""
    handle = drafting.submit([3, 4, 5], max_new_tokens=40)
    assert drafting.score([[7]]).prompt_logprobs == [[]]
    assert len(handle.result().new_tokens[0]) == 40


def test_prompts_that_begin_alike(drafting: FastSpecGenerator) -> None:
    """Scores do not depend on the prefix cache, which serves prompts that are not scored themselves."""
    prompts = prompts_of(VOCAB, (150, 150))
    prompts[1][:140] = prompts[0][:140]
    drawn = sampled(drafting, prompts)
    assert drawn.stats.cached_tokens > 0
    scores = [scored(drafting, prompts, drawn.new_tokens, prompt_logprobs=wanted) for wanted in (True, False)]
    assert scores[0].stats.cached_tokens == 0
    assert scores[1].stats.cached_tokens > 0
    assert all(same(each.logprobs, drawn.logprobs) for each in scores)
    assert sampled(drafting, prompts).new_tokens == drawn.new_tokens  # shared pages have kept their bits


def test_first_tokens_of_long_prompts(tmp_path: Path) -> None:
    """They come from the last pass over the prompt, when scored as when drawn."""
    target = make_checkpoint(tmp_path / "target", "llama2", max_position_embeddings=2048)
    prompts = prompts_of(97, (LONG_PROMPT + 40, LONG_PROMPT + 1, 30))
    with FastSpecGenerator(target, proposer=NGram(), **OPTIONS | {"max_length": 1200}) as gen:
        drawn = sampled(gen, prompts, prompt_logprobs=True)
        found = scored(gen, prompts, drawn.new_tokens)
        assert same(found.logprobs, drawn.logprobs)
        assert same(found.prompt_logprobs or [], drawn.prompt_logprobs)
        assert [len(values) for values in found.prompt_logprobs or []] == [len(prompt) - 1 for prompt in prompts]


def test_logits_of_few_positions_are_in_memory_at_a_time(
    drafting: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, logits = [], Decoder.logits

    def watched(self: Decoder, hidden: torch.Tensor, tiling: Any) -> torch.Tensor:
        rows.append(hidden.shape[0] * hidden.shape[1])
        return logits(self, hidden, tiling)

    monkeypatch.setattr(Decoder, "logits", watched)
    (prompt,) = prompts_of(VOCAB, (250,))
    drafting.score([prompt])
    assert 1 < max(rows) <= SCORED


def test_other_requests_go_on_meanwhile(drafting: FastSpecGenerator) -> None:
    prompts = prompts_of(VOCAB)
    drawn = sampled(drafting, prompts)
    handles = [drafting.submit(prompt, max_new_tokens=30, eos_token_id=[], logprobs=True) for prompt in prompts]
    found = scored(drafting, prompts, drawn.new_tokens)
    assert same(found.logprobs, drawn.logprobs)
    beside = [handle.result() for handle in handles]
    alone = sampled(drafting, prompts, do_sample=False, max_new_tokens=30)
    assert [each.new_tokens[0] for each in beside] == alone.new_tokens
    assert same([each.logprobs[0] for each in beside if each.logprobs], alone.logprobs)


def test_copies_of_a_prompt_share_its_scores(drafting: FastSpecGenerator) -> None:
    prompts = prompts_of(VOCAB)[1:]
    drawn = sampled(drafting, prompts, num_return_sequences=2, prompt_logprobs=True)
    assert len(drawn.new_tokens) == 6
    again = scored(drafting, [each for each in prompts for _ in range(2)], drawn.new_tokens)
    assert same((again.prompt_logprobs or [])[::2], drawn.prompt_logprobs)
    assert same(again.logprobs, drawn.logprobs)


@pytest.mark.parametrize("family", families.daily())
def test_every_family(family: str, tmp_path: Path) -> None:
    families.make_family(family).save_pretrained(tmp_path / "target")
    with FastSpecGenerator(tmp_path / "target", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        check_law(gen, families.VOCAB)


@pytest.mark.parametrize("kind", hybrid.KINDS)
def test_hybrids(kind: str, tmp_path: Path) -> None:
    hybrid.make_hybrid(kind).save_pretrained(tmp_path / "target")
    with FastSpecGenerator(tmp_path / "target", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        check_law(gen, hybrid.VOCAB)


@pytest.mark.parametrize("name", [*hosted.MODELS][:3])
def test_hosted_models(name: str) -> None:
    with FastSpecGenerator(hosted.make_model(name), proposer=NGram(), **OPTIONS) as gen:
        check_law(gen, gen.vocab_size)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_rounded_targets(form: str, tmp_path: Path) -> None:
    kv = {"kv_dtype": "fp8"} if form == "fp8" else {}
    with made("ngram", tmp_path, "bfloat16", target_quantization=form, **kv) as gen:
        check_law(gen, VOCAB)


def test_a_target_that_is_stored_quantised(tmp_path: Path) -> None:
    quantised.write(make_checkpoint(tmp_path / "values", "llama3"), tmp_path / "codes", AWQ, quantised.awq(8))
    with FastSpecGenerator(tmp_path / "codes", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        check_law(gen, VOCAB)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_ids": [[1, 2], [3, 4, 5]], "lengths": [2, 4]},
            "lengths must be a whole number between 1 and 3, got 4",
        ),
        ({"input_ids": [[1, 2]], "lengths": 0}, "lengths must be a whole number between 1 and 2, got 0"),
        ({"input_ids": [[1, 2]], "lengths": [1, 1]}, "lengths has 2 values for 1 prompts"),
        ({"input_ids": [[1, 2]], "prompt_logprobs": False}, "row 0 has nothing to score"),
        ({"input_ids": [[1] * 257]}, "row 0 has 257 tokens, more than max_length=256"),
        ({"input_ids": [[1, 500]]}, "prompt 0, position 1: token id 500 is outside"),
        ({"input_ids": [[1, 2]], "top_logprobs": 21}, "top_logprobs must be a whole number between 0 and 20, got 21"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_named(arguments: dict[str, Any], message: str, drafting: FastSpecGenerator) -> None:
    with pytest.raises(ValueError, match=message):
        drafting.score(**arguments)


def test_calibration_records_nothing(drafting: FastSpecGenerator) -> None:
    with pytest.raises(ValueError, match="leave out prompt_logprobs"):
        drafting.calibrate([[1, 2]], prompt_logprobs=True)


def test_invalid_logits_are_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "target", "llama2"), dtype=torch.float32)
    model.lm_head.weight.data[5] = float("nan")
    with (
        FastSpecGenerator(model, **OPTIONS) as gen,
        pytest.raises(InvalidLogits, match="row 1, position 1: the target's logits"),
    ):
        gen.score([[1], [1, 2, 3, 4]], lengths=[1, 2])
