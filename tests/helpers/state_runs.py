"""Runs of one row whose drafts are scripted, and its recurrent states after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec import DeterministicProposer, FastSpecGenerator, GenerateOutput
from fastspec.engine.engine import Engine
from fastspec.inputs.row_options import RowOptions
from fastspec.models.decoder import Decoder
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from tests.helpers.hybrid import VOCAB

DRAFTS, PAGE = 7, 16
OPTIONS: dict[str, Any] = {"max_length": 400, "page_size": PAGE, "dtype": "float32", "device": "cpu", "progress": False}
PLAIN: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


class Texts(Protocol):
    """A checkpoint, and its plain texts."""

    @property
    def directory(self) -> Path:
        """Where it is."""

    @property
    def prompts(self) -> list[list[int]]:
        """What is read."""

    @property
    def texts(self) -> list[list[int]]:
        """What is written after each prompt."""


def output(gen: FastSpecGenerator, prompts: list[list[int]], new: int, **options: Any) -> GenerateOutput:
    out = gen.generate(prompts, max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out


class Scripted(DeterministicProposer):
    """Drafts the known text of the one row there is, but for the draft that the next number of a script names."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.script: list[int] = [0]
        self.steps = 0

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        known = torch.tensor([*self.text, *[0] * k])
        drafts = known[lengths[:1, None] + torch.arange(k)].repeat(len(lengths), 1)
        wrong = self.script[self.steps % len(self.script)]
        self.steps += 1
        if wrong < k:
            drafts[:, wrong] = (drafts[:, wrong] + 1) % VOCAB
        return drafts, torch.full_like(lengths, k)


class One:
    """A generator whose drafts are scripted, and its engine."""

    def __init__(self, model: Texts) -> None:
        self.proposer, self.model = Scripted(), model
        self.gen = FastSpecGenerator(
            model.directory, proposer=self.proposer, num_speculative_tokens=DRAFTS, max_batch_size=1, **OPTIONS
        )
        self.engine: Engine = self.gen._open().engine
        target = self.engine.modules.target
        assert isinstance(target, Decoder)
        assert target.cache.states is not None
        self.states, self.rules = target.cache.states, target.spec.state_rules
        self._plain: dict[tuple[int, int], tuple[list[int], Tensor, Tensor]] = {}

    def plain(self, row: int, new: int) -> tuple[list[int], Tensor, Tensor]:
        """`run` without drafts."""
        if (row, new) not in self._plain:
            self._plain[row, new] = self.run(row, new, [0], [0])
        return self._plain[row, new]

    def run(self, row: int, new: int, script: list[int], ks: list[int]) -> tuple[list[int], Tensor, Tensor]:
        """The new tokens of one prompt, the states behind its last token but one, and the inputs that count."""
        prompt = self.model.prompts[row]
        self.proposer.text, self.proposer.script, self.proposer.steps = prompt + self.model.texts[row], script, 0
        request = Request(prompt, new, RowOptions(**PLAIN))
        call = CallPlan((), GREEDY, lambda made: ks[made % len(ks)], lengths=lengths_of([request]))
        for _ in Scheduler(self.engine).run([request], call):
            pass
        fed, states, inputs = request.length - 1, self.states.states, self.states.inputs
        tail = inputs.shape[2] - states.shape[2]
        places = [position % inputs.shape[2] for position in range(max(0, fed - tail), fed)]
        return request.new_tokens, states[:, 0, (fed - 1) % states.shape[2]].clone(), inputs[:, 0, places].clone()


def same(one: One, row: int, new: int, script: list[int], ks: list[int]) -> None:
    text, states, inputs = one.plain(row, new)
    assert text == one.model.texts[row][:new]
    found, found_states, found_inputs = one.run(row, new, script, ks)
    assert found == text
    assert torch.equal(found_states, states)
    assert torch.equal(found_inputs, inputs)
