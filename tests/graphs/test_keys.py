"""Keys of captured work: equal where one graph serves both, and told apart in words."""

from __future__ import annotations

from dataclasses import replace

from fastspec.graphs.keys import PartKey, PromptKey, StepKey, describe
from fastspec.sampling.rules import BLOCK, SyntheticAcceptance
from fastspec.shapes import FULL, GREEDY, UNTILED, StepShape

SHAPE = StepShape(4, GREEDY, 4, UNTILED)


def test_a_key_is_its_rows_and_its_shape() -> None:
    kept = {StepKey(2, SHAPE): "graph"}
    assert kept[StepKey(2, replace(SHAPE))] == "graph"
    assert StepKey(1, SHAPE) not in kept
    changes = ({"num_drafts": 3}, {"sampler": FULL}, {"num_blocks": 5}, {"top_logprobs": 0}, {"first_block": 17})
    for change in (*changes, {"verification": BLOCK}, {"verification": SyntheticAcceptance(pattern=[1, 2])}):
        assert StepKey(2, replace(SHAPE, **change)) not in kept


def test_keys_are_described_in_words() -> None:
    step = StepKey(2, replace(SHAPE, top_logprobs=3, first_block=17))
    assert describe(step) == "2 rows, k = 4, greedy, 3 top logprobs, 1024 positions, none before 4352"
    assert describe(PartKey("score", StepKey(1, SHAPE))) == "score: 1 rows, k = 4, greedy, 1024 positions"
    assert [describe(PromptKey(64, draft)) for draft in (False, True)] == [
        "prompt, 64 tokens",
        "prompt, 64 tokens, of the draft",
    ]
    assert describe("stamped") == "stamped"
