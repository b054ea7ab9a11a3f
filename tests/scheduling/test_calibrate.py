"""What calibrate measures and says, on a CPU: the arithmetic by numbers made up, the rest on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import Calibration, FastSpecGenerator, NGram
from fastspec.adaptive.controller import ladder
from fastspec.scheduling.calibrate import Trial
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]


def trial(k: int, tokens: float, *, draft: float = 0.0, score: float = 1.0, rest: float = 0.0) -> Trial:
    step = draft + score + rest
    return Trial(k, 10, step, draft, score, tokens, tokens, tokens / step, tokens / step)


def of(*trials: Trial, device: str = "cuda:0") -> Calibration:
    return Calibration(device, 4, (trial(0, 1.0), *trials), (0.5, 0.25))


@pytest.mark.parametrize(
    ("found", "limit", "best", "says"),
    [
        (of(trial(4, 1.4, draft=0.2)), "acceptance", 4, "gives 1.40 tokens of 5, and must give 1.20 to break even"),
        (of(trial(4, 4.5, draft=4.0)), "draft", 0, "takes 1.00 plain steps, so even with every draft accepted k = 4"),
        (of(trial(4, 4.5, draft=0.1, score=3.0)), "scoring", 4, "with 4 rows the device is limited by arithmetic"),
        (of(trial(4, 4.5, draft=0.1, score=3.0), device="cpu"), "scoring", 4, "a CPU is limited by arithmetic"),
        (of(trial(4, 4.5, rest=2.0)), "overhead", 4, "take 2000.00 ms of a step"),
    ],
)
def test_what_limits_is_the_largest_loss(found: Calibration, limit: str, best: int, says: str) -> None:
    assert (found.limit, found.best) == (limit, best)
    assert says in str(found)


def test_a_calibration_prints_a_table_and_a_verdict() -> None:
    found = of(trial(1, 1.5, draft=0.25), trial(2, 1.75, draft=0.5))
    lines = str(found).splitlines()
    assert lines[0].startswith("4 rows at once on cuda:0")
    assert " ".join(lines[1].split()) == "k step ms draft ms score ms rest ms tokens/step predicted measured"
    assert lines[2].split() == ["0", "1000.000", "0.000", "1000.000", "0.000", "1.00", "1.00x", "1.00x"]
    assert lines[3].split() == ["1", "1250.000", "250.000", "1000.000", "0.000", "1.50", "1.20x", "1.20x"]
    assert "50%, 25%" in lines[5]
    assert lines[6] == "best: k = 1, 1.20x plain decoding"
    assert found.draft_pass_seconds == 0.25


def test_a_pair_that_loses_is_told_so() -> None:
    text = str(of(trial(1, 1.1, draft=0.5), trial(2, 1.2, draft=1.0)))
    assert "best: k = 0. Drafting does not pay here: at its best, k = 1, it is 0.73x" in text


@pytest.fixture(scope="module", params=devices())
def gen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    pair = [make_checkpoint(tmp_path_factory.mktemp(role), "llama2", seed=seed) for seed, role in enumerate("td")]
    with FastSpecGenerator(
        *pair,
        num_speculative_tokens=4,
        max_batch_size=2,
        max_length=80,
        dtype="float32",
        device=request.param,
        progress=False,
    ) as made:
        yield made


def test_every_k_is_tried_and_the_object_stays_usable(gen: FastSpecGenerator) -> None:
    before = gen.generate(PROMPTS, max_new_tokens=20, eos_token_id=None)
    found = gen.calibrate(PROMPTS, eos_token_id=None, max_new_tokens=24)
    assert tuple(one.k for one in found.trials) == ladder(4) == (0, 1, 2, 4)
    assert found.rows == 2
    for one in found.trials:
        assert one.steps > 0
        assert min(one.step_seconds, one.score_seconds, one.predicted, one.measured) > 0
        assert (one.draft_seconds > 0) == (one.k > 0)
        assert one.tokens == pytest.approx(one.predicted_tokens, abs=0.5)
    assert found.trials[0].measured == found.trials[0].predicted == 1.0
    assert len(found.survival) == 4
    assert list(found.survival) == sorted(found.survival, reverse=True)
    after = gen.generate(PROMPTS, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(torch.as_tensor(before), torch.as_tensor(after))


def test_acceptance_is_that_of_a_call(gen: FastSpecGenerator) -> None:
    found = gen.calibrate(PROMPTS, eos_token_id=None, max_new_tokens=24)
    output: Any = gen.generate(PROMPTS, eos_token_id=None, max_new_tokens=24, return_dict_in_generate=True)
    assert output.stats.accepted_per_position == pytest.approx(found.survival)


def test_auto_learns_from_it(gen: FastSpecGenerator) -> None:
    gen.calibrate(PROMPTS, eos_token_id=None, max_new_tokens=24)
    controller = gen._drafting.controller("greedy", None)
    assert controller.acceptance.seen
    assert {k for bucket, k in controller.times.measured if bucket == 2} == {0, 1, 2, 4}


def test_sampled_calls_and_default_lengths(gen: FastSpecGenerator) -> None:
    found = gen.calibrate(torch.tensor([[5, 6, 7]]), do_sample=True, seed=1, eos_token_id=None)
    assert found.rows == 1
    assert "what limits it" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 2}, "leave out num_speculative_tokens"),
        ({"num_speculative_tokens": "auto"}, "leave out num_speculative_tokens"),
        ({"logprobs": 2}, "leave out logprobs"),
        ({"max_new_tokens": 1000}, "more than max_length=80"),
        ({"max_new_tokens": 1}, "the texts end before a step"),
        ({"num_beams": 2}, "num_beams"),
    ],
)
def test_calibrate_refuses_what_it_cannot_time(gen: FastSpecGenerator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gen.calibrate(PROMPTS, **options)


def test_without_anything_that_drafts(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path, "llama2", seed=0)
    plain = FastSpecGenerator(target, max_length=64, device="cpu", progress=False)
    with plain, pytest.raises(ValueError, match="made without a draft or proposer"):
        plain.calibrate(PROMPTS)
    with FastSpecGenerator(target, proposer=NGram(), max_length=64, device="cpu", progress=False) as lookup:
        assert lookup.calibrate(PROMPTS, eos_token_id=None, max_new_tokens=16).trials[-1].draft_seconds > 0
