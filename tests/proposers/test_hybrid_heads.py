"""EAGLE-3 and DFlash heads on targets with recurrent states: drafts of the whole text, and text as without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec.engine.engine import Engine
from fastspec.inputs.row_options import RowOptions
from fastspec.models.decoder import Decoder
from tests.helpers import dflash_definition
from tests.helpers.dflash import Head, write_z_lab
from tests.helpers.heads import eagle3_tensors, engine_with, write_eagle3
from tests.helpers.heads_definition import Definition, learn
from tests.helpers.hybrid import KINDS, STATES, make_hybrid, make_states
from tests.proposers.test_dflash import TOLERANCE, VOCAB, distance, hidden_states, prompts, watch
from tests.proposers.test_eagle3 import Seen, Truth, watched, wrong_drafts
from tests.scheduling.test_scheduler import run, sampled_row, texts

DAILY = ("next", "nemotron_h")  # the delta rule; Mamba-2 in layers of one part each
READ = (1, 2)
GIVEN, CAPS = prompts(1, 2, 66, 5, 17), [12, 20, 16, 9, 14]  # more than rows: some are admitted while others run
SAMPLED = [sampled_row(seed) for seed in range(len(GIVEN))]
HEAD = Head(64, VOCAB, block_size=6, mask_id=10, ids=tuple(layer - 1 for layer in READ))


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in (*KINDS, *STATES)],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So few ids that a head without a clue is right now and then."""
    path, kind = tmp_path_factory.mktemp("target"), request.param
    make = make_hybrid if kind in KINDS else make_states
    make(kind, vocab_size=VOCAB, bos_token_id=None, eos_token_id=None).save_pretrained(path)
    return path


def with_head(target: Path, head: Path, **options: Any) -> Engine:
    engine = engine_with(target, head, k=5, batch=2, **options)
    decoder = engine.modules.target
    assert isinstance(decoder, Decoder)
    assert decoder.cache.states is not None
    return engine


def check_texts(engine: Engine, options: list[RowOptions] | None = None) -> int:
    """Texts with drafts are those of plain decoding. Returns how many drafts were accepted."""
    plain, accepted = texts(run(engine, GIVEN, CAPS, k=0, options=options)), 0
    for k in (1, 3, 5, lambda steps: (5, 0, 0, 3)[steps % 4]):
        found = run(engine, GIVEN, CAPS, k=k, options=options)
        assert texts(found) == plain
        accepted += sum(request.accepted for request in found)
    return accepted


class HybridTruth(Truth):
    """The same with hidden states that hooks find: families report them in different ways."""

    def __init__(self, target: Path, head: dict[str, Tensor]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.head: Any = Definition(head)

    @torch.no_grad()
    def features(self, text: list[int]) -> Tensor:
        return hidden_states(self.model, text, READ)[:-1]


def eagle(path: Path, tensors: dict[str, Tensor]) -> Path:
    ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READ], "layer_ids": READ}
    return write_eagle3(path, tensors, vocab=VOCAB, eagle_config=ids)


def test_eagle3(target: Path, tmp_path: Path) -> None:
    """With a head that has learnt the greedy texts, so that drafts are accepted at every place."""
    tensors = eagle3_tensors(vocab=VOCAB, drafted=VOCAB, read=len(READ))
    truth, known = HybridTruth(target, tensors), []
    plain = texts(run(with_head(target, eagle(tmp_path, tensors)), GIVEN, CAPS, k=0))
    for whole in ([*prompt, *text] for prompt, text in zip(GIVEN, plain, strict=True)):
        known.append((truth.features(whole)[:-1], torch.tensor(whole[1:-1]), torch.tensor(whole[2:])))
    learn(truth.head, known, steps=40)
    engine, seen = with_head(target, eagle(tmp_path, tensors), verification="coupled"), list[Seen]()
    check_texts(engine, SAMPLED)
    assert check_texts(watched(engine, seen)) > sum(CAPS)
    assert wrong_drafts(truth, seen) == 0


def test_dflash(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = write_z_lab(tmp_path, HEAD), watch(monkeypatch)
    engine = with_head(target, path, verification="coupled")
    assert check_texts(engine) > 0
    assert check_texts(engine, SAMPLED) > 0
    seen.clear()
    run(with_head(target, path, verification="rejection"), GIVEN, CAPS, k=5, options=SAMPLED)
    assert distance(target, path, HEAD, dflash_definition.full(HEAD), seen) < TOLERANCE
