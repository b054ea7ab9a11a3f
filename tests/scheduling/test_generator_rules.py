"""The constructor's `verification` and `proposer`: what they do to a generator, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, NGram, SyntheticAcceptance
from fastspec.sampling.rules import BLOCK, COUPLED, MODES, REJECTION
from tests.helpers.checkpoints import make_checkpoint

PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [1], [3, 3, 3]]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "seed": 5}

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning", "ignore:drafting does not pay")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    names = ("target", "draft")
    target, draft = (
        make_checkpoint(tmp_path_factory.mktemp(name), "llama2", seed=i, num_hidden_layers=2 - i)
        for i, name in enumerate(names)
    )
    return target, draft


def made(*models: Path, **options: Any) -> FastSpecGenerator:
    return FastSpecGenerator(*models, max_length=128, device="cpu", progress=False, **options)


def decoded(generator: FastSpecGenerator, **options: Any) -> Any:
    with generator:
        return generator.generate(PROMPTS, max_new_tokens=20, return_dict_in_generate=True, **options)


def test_coupled_text_depends_on_nothing_but_its_seed(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    plain = decoded(made(target, verification=COUPLED), **SAMPLED).new_tokens
    for k in (1, 4, 8):
        generator = made(target, draft, verification=COUPLED, num_speculative_tokens=k)
        assert decoded(generator, **SAMPLED).new_tokens == plain
    assert decoded(made(target, proposer=NGram(), verification=COUPLED), **SAMPLED).new_tokens == plain
    assert decoded(made(target, draft, proposer=NGram(), verification=COUPLED), **SAMPLED).new_tokens == plain
    assert decoded(made(target, draft, verification=COUPLED, max_batch_size=1), **SAMPLED).new_tokens == plain
    assert decoded(made(target, draft, verification=REJECTION), **SAMPLED).new_tokens != plain


def test_greedy_text_is_the_same_under_every_rule(pair: tuple[Path, Path]) -> None:
    plain = decoded(made(pair[0])).new_tokens
    for mode in MODES:
        assert decoded(made(*pair, verification=mode)).new_tokens == plain
    assert decoded(made(pair[0], proposer=NGram(2, 3))).new_tokens == plain


@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_the_targets_under_every_rule_and_penalty(pair: tuple[Path, Path], mode: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    options = {"repetition_penalty": 1.3, "presence_penalty": [0.5, 0.0, -0.4], "frequency_penalty": 0.2, "top_k": 20}
    out = decoded(made(*pair, verification=mode, dtype="float32"), **SAMPLED, **options, logprobs=2)
    for prompt, new, found, best in zip(PROMPTS, out.new_tokens, out.logprobs, out.top_logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)
        # fp32 sums in another order, over some tens of elements
        assert found == pytest.approx(want[range(len(new)), new].tolist(), abs=2e-5)
        assert [[token for token, _ in place] for place in best] == want.topk(2).indices.tolist()


def test_only_rules_that_read_laws_have_room_for_them(pair: tuple[Path, Path]) -> None:
    with made(*pair, num_speculative_tokens=3) as generator:
        laws = (8 + 1) * 3 * generator.vocab_size * 4  # rows and the prompts' lane, drafts, fp32
        kept = generator.memory_plan.buffers
        assert "all drafts of a step together (block verification)" in generator.explain()
    with made(*pair, num_speculative_tokens=3, verification=COUPLED) as generator:
        assert kept - generator.memory_plan.buffers == laws
        assert generator._open().engine.state.draft_probs.numel() == 0
    with made(pair[0], proposer=NGram(1, 3), num_speculative_tokens=3) as generator:
        assert generator.memory_plan.buffers < kept - laws
        assert generator._open().engine.state.draft_probs.numel() == 0


def test_lookup_alone_needs_no_draft(pair: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"proposer": NGram(1, 3), "num_speculative_tokens": 3}
    with made(pair[0], **options) as generator:
        assert "up to 3 tokens a step, by lookup of the last 1 to 3 tokens in the row itself" in generator.explain()
        output: Any = generator.generate(PROMPTS, max_new_tokens=60, return_dict_in_generate=True)
        assert output.stats.drafted > 0
        planned = FastSpecGenerator.plan(pair[0], max_length=128, device="cpu", **options)
        assert planned.total == generator.memory_plan.total
    with made(*pair, **options) as generator:
        assert "in the row itself, then the draft model in rows where lookup finds nothing" in generator.explain()


def test_the_default_is_block(pair: tuple[Path, Path]) -> None:
    with made(*pair) as generator:
        assert generator._settings.verification == BLOCK


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_synthetic_acceptance_says_so_everywhere(pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="synthetic acceptance at a rate of 1: .* the text is not the model's"):
        generator = made(*pair, verification=SyntheticAcceptance(rate=1.0))
    assert "THE TEXT IS NOT THE MODEL'S" in generator.explain()
    stats = decoded(generator, **options).stats
    assert stats.acceptance_rate == 1.0
    assert stats.synthetic == "synthetic acceptance at a rate of 1"
    assert "NOT THE MODEL'S TEXT: synthetic acceptance at a rate of 1" in str(stats)


def test_other_statistics_say_nothing_of_the_kind(pair: tuple[Path, Path]) -> None:
    stats = decoded(made(*pair)).stats
    assert stats.synthetic is None
    assert "NOT THE MODEL" not in str(stats)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verification": "typical"}, "verification must be one of 'rejection', 'coupled', 'block'.*got 'typical'"),
        ({"verification": 3}, "got 3"),
        ({"proposer": "ngram"}, "proposer str has no propose"),
        ({"proposer": NGram}, r"write NGram\(\)"),
    ],
    ids=str,
)
def test_what_is_neither_is_refused(pair: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(pair[0], **options)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_log_probabilities_of_what_is_accepted_by_fiat(pair: tuple[Path, Path]) -> None:
    """They are the target's: those of plain text where nothing is accepted, and else of text that is not its own."""
    plain = decoded(made(pair[0]), logprobs=3)
    refused = decoded(made(*pair, verification=SyntheticAcceptance(rate=0.0)), logprobs=3)
    assert refused.new_tokens == plain.new_tokens
    assert (refused.logprobs, refused.top_logprobs) == (plain.logprobs, plain.top_logprobs)
    accepted = decoded(made(*pair, verification=SyntheticAcceptance(rate=1.0)), logprobs=3)
    assert accepted.stats.accepted > 0
    for row, values, tops in zip(accepted.new_tokens, accepted.logprobs, accepted.top_logprobs, strict=True):
        assert len(row) == len(values) == len(tops)
        assert all(dict(top).get(token, value) == value for token, value, top in zip(row, values, tops, strict=True))
        assert any(value < top[0][1] for value, top in zip(values, tops, strict=True)), "not the target's own picks"
