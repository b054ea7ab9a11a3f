"""`score` gives the log-probabilities of `generate` to the bit: with heads, PARD drafts and another tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.grammar.row import GivenTokens
from fastspec.output import GenerateOutput
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.dflash import WRITERS, Head, write_z_lab
from tests.helpers.dflash_definition import RELATIVES
from tests.helpers.heads import HIDDEN, LAYERS, eagle3_tensors, peagle_tensors, write_speculators
from tests.helpers.mtp import write_layers
from tests.proposers.test_two_tokenizers import ORDER, pair
from tests.scheduling.test_score import same, sampled, scored

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:the target .* have different tokenizers:UserWarning"),
]
VOCAB, DRAFTED, MASK = 11, 7, 10  # few ids, so that random heads guess right at times
SHARED = 90  # ids that two tokenizers have
LENGTHS = (2, 70, 9)
MAX_DRAFTS, NEW = 4, 9
Made = tuple[Path, Path | str]


def beside_a_target(family: str, write: Callable[[Path], Path], path: Path) -> Made:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    return make_checkpoint(path / "target", family, **sizes), write(path / "head")


def eagle3(path: Path) -> Path:
    return write_speculators(path, eagle3_tensors(std=0.5, vocab=VOCAB, drafted=DRAFTED), **READS)


def peagle(path: Path) -> Path:
    said = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}
    tensors = peagle_tensors(std=0.4, vocab=VOCAB, drafted=DRAFTED)
    return write_speculators(path, tensors, **READS, embed_requires_grad=True, **said)


def relative(name: str, path: Path) -> Path:
    layout, changes, _ = RELATIVES[name]
    return WRITERS[layout](path, replace(HEAD, **changes))


def pard(path: Path) -> Path:
    draft = make_checkpoint(path, "llama3", seed=1, num_hidden_layers=1, vocab_size=VOCAB)
    edit(draft / "config.json", pard_token=MASK)
    return draft


READS: dict[str, Any] = {"boundaries": [2, 4, 5], "vocab": VOCAB}
HEAD = Head(HIDDEN, VOCAB, target_layers=LAYERS, mask_id=MASK)
BESIDE: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "EAGLE-3": ("llama3", eagle3),
    "P-EAGLE": ("llama3", peagle),
    "DFlash": ("llama3", partial(write_z_lab, head=HEAD)),
    **{name: ("qwen3", partial(relative, name)) for name in RELATIVES},
    "PARD": ("llama3", pard),
}
KINDS: dict[str, Callable[[Path], Made]] = {
    **{name: partial(beside_a_target, *beside) for name, beside in BESIDE.items()},
    "MTP layers": lambda path: (write_layers(path / "target", "mimo-v2", 3)[0], "mtp"),
    "two tokenizers": lambda path: pair(path, SHARED),
}
RULES = ("coupled", "rejection", "block")
DAILY = {  # the rule that runs daily
    **{"EAGLE-3": "coupled", "P-EAGLE": "rejection", "DFlash": "coupled", "DSpark": "rejection", "DFlash2": "coupled"},
    **{"MTP layers": "rejection", "PARD": "coupled", "two tokenizers": "rejection"},
}
CASES = [
    pytest.param(kind, rule, marks=() if DAILY.get(kind) == rule else pytest.mark.slow)
    for kind in KINDS
    for rule in RULES
]


def opened(target: Path, drafter: Path | str | None, **more: Any) -> FastSpecGenerator:
    sizes: dict[str, Any] = {"max_length": 128, "max_batch_size": 4, "device": "cpu", "dtype": "float32"}
    return FastSpecGenerator(target, drafter, progress=False, **sizes, **more)


def drafting(kind: str, path: Path, rule: str = "coupled") -> FastSpecGenerator:
    return opened(*KINDS[kind](path), num_speculative_tokens=MAX_DRAFTS, verification=rule)


def prompts_of(kind: str) -> list[list[int]]:
    """Ragged rows, of ids that drafts know."""
    known = ORDER[1:SHARED] if kind == "two tokenizers" else torch.arange(3, VOCAB)
    rng = torch.Generator().manual_seed(5)
    return [known[torch.randint(len(known), (length,), generator=rng)].tolist() for length in LENGTHS]


def law_holds(gen: FastSpecGenerator, prompts: list[list[int]], drawn: GenerateOutput, **options: Any) -> bool:
    """True if the scores of drawn answers are those of their generation, whatever order the rows have."""
    found, backwards = (
        scored(gen, prompts[::way], drawn.new_tokens[::way], prompt_logprobs=way == 1, **options) for way in (1, -1)
    )
    tops = (found.top_logprobs, backwards.top_logprobs[::-1])
    values = (found.logprobs, backwards.logprobs[::-1])
    return all(same(each, drawn.logprobs) for each in values) and tops == (drawn.top_logprobs,) * 2


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_scores_are_those_of_generation(kind: str, rule: str, tmp_path: Path) -> None:
    """With few and many drafts, of rows together, alone, beside one that drafts, and by the target alone."""
    prompts = prompts_of(kind)
    with drafting(kind, tmp_path, rule) as gen:
        for k in (1, MAX_DRAFTS):
            drawn = sampled(gen, prompts, max_new_tokens=NEW, num_speculative_tokens=k)
            assert 0 < drawn.stats.accepted < drawn.stats.drafted
            assert law_holds(gen, prompts, drawn)
        options: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 3, "eos_token_id": [], "logprobs": 2}
        beside = gen.submit(prompts[0], max_new_tokens=NEW, **options)
        alone = [scored(gen, [prompt], [answer]) for prompt, answer in zip(prompts, drawn.new_tokens, strict=True)]
        assert same([each.logprobs[0] for each in alone], drawn.logprobs)
        drafted = beside.result()
        assert drafted.new_tokens == drawn.new_tokens[:1]
        assert same(drafted.logprobs or [], (drawn.logprobs or [])[:1])
        assert drafted.stats.accepted == drawn.stats.rows[0].accepted
    with opened(tmp_path / "target", None) as plain:
        assert law_holds(plain, prompts, drawn)


LAW: dict[str, Any] = {
    **{"do_sample": True, "temperature": 0.8, "top_k": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs_mode": "processed",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scores_under_options_are_those_of_generation(kind: str, tmp_path: Path) -> None:
    """Penalties of a place count the drafts before it, which a step of `score` has from the answer."""
    prompts = prompts_of(kind)
    with drafting(kind, tmp_path, "block") as gen:
        drawn = sampled(gen, prompts, **{**LAW, "max_new_tokens": NEW})
        assert law_holds(gen, prompts, drawn, **LAW)


@pytest.mark.parametrize("fault", ["temperature", "shift"])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of another temperature, and those of each token's follower."""
    prompts = prompts_of("EAGLE-3")
    with drafting("EAGLE-3", tmp_path) as gen:
        drawn = sampled(gen, prompts, max_new_tokens=NEW)
        if fault == "temperature":
            ops: Any = gen._loop.engine.modules.ops
            record = ops.record_logprobs
            monkeypatch.setattr(ops, "record_logprobs", lambda logits, *rest: record(logits / 0.7, *rest))
        else:
            made = GivenTokens.__init__

            def late(self: GivenTokens, tokens: list[int], vocab_size: int) -> None:
                made(self, [*tokens[1:], tokens[0]], vocab_size)

            monkeypatch.setattr(GivenTokens, "__init__", late)
        assert not law_holds(gen, prompts, drawn)
