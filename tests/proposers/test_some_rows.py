"""Reduced vocabularies that the user chooses: drafts are those of a published head with the same rows and a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastspec import UnsupportedOption
from fastspec.models.checkpoints.pair import resolve_pair
from tests.helpers.checkpoints import edit, make_checkpoint, make_model
from tests.helpers.dflash import WRITERS, Head
from tests.helpers.dflash_definition import RELATIVES
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, engine_with, peagle_tensors
from tests.helpers.heads import write_eagle3 as eagle
from tests.helpers.heads import write_speculators as ours
from tests.proposers.test_eagle3 import Seen, watched
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts

IDS = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:30].tolist())
GIVEN, CAPS = prompts(3, seed=5), [9, 6, 8]
SHARED = {"hidden": HIDDEN, "own_embed": False, "own_head": False, "drafted": VOCAB}
BLOCK = Head(HIDDEN, VOCAB, mask_id=10, target_layers=LAYERS)


def _block(case: str) -> Callable[[Path], Path]:
    layout, changes, _ = RELATIVES[case]
    changes = {name: value for name, value in changes.items() if name != "draft_vocab"}

    def write(path: Path) -> Path:
        made = WRITERS[layout](path, replace(BLOCK, **changes))
        if layout == "speculators":
            verifier = {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/b"}}
            edit(made / "config.json", speculators_config=verifier)
        return made

    return write


KINDS: dict[str, Callable[[Path], Path]] = {
    "EAGLE-3 with the target's matrix": lambda path: ours(
        path, eagle3_tensors(**SHARED, std=0.5), boundaries=[2, 4, 5]
    ),
    "EAGLE-3, tied": lambda path: eagle(
        path, eagle3_tensors(own_head=False, drafted=VOCAB, std=0.5), tie_word_embeddings=True
    ),
    "P-EAGLE": lambda path: eagle(path, peagle_tensors(drafted=VOCAB), mask_token_id=7),
    "DSpark of speculators": _block("DSpark of speculators"),
    "DFlash2": _block("DFlash2"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama3", num_hidden_layers=LAYERS)


def published(target: Path, head: Path) -> Path:
    """Changes a head to one that is published with these rows and a table."""
    tensors, ids = load_file(head / "model.safetensors"), torch.tensor(IDS)
    shared = load_file(target / "model.safetensors")
    matrix: Tensor = tensors.get("lm_head.weight", shared["model.embed_tokens.weight"])  # this target is tied
    if 'tie_word_embeddings": true' in (head / "config.json").read_text():
        matrix = tensors["embed_tokens.weight"]
    tensors |= {"lm_head.weight": matrix[ids].contiguous(), "d2t": ids - torch.arange(len(ids))}
    if (name := "markov_head.markov_w2.weight") in tensors:
        tensors[name] = tensors[name][ids].contiguous()
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    edit(head / "config.json", draft_vocab_size=len(IDS))
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_published_table(kind: str, target: Path, tmp_path: Path) -> None:
    table = published(target, KINDS[kind](tmp_path / "table"))
    whole: dict[str, Any] = {"draft_vocab": IDS[::-1], "verification": "coupled"}
    seen: tuple[list[Seen], list[Seen]] = ([], [])
    engine = watched(engine_with(target, KINDS[kind](tmp_path / "whole"), **whole), seen[0])
    theirs = watched(engine_with(target, table, verification="coupled"), seen[1])
    found = texts(run(engine, GIVEN, CAPS, k=3))
    assert found == texts(run(theirs, GIVEN, CAPS, k=3)) == texts(run(engine, GIVEN, CAPS, k=0))
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed) for seed in range(3)]
    assert texts(run(engine, GIVEN, CAPS, k=2, options=options)) == texts(
        run(engine, GIVEN, CAPS, k=0, options=options)
    )
    run(theirs, GIVEN, CAPS, k=2, options=options)
    drafts = [[each.drafts for each in one if each.drafts] for one in seen]
    assert drafts[0] == drafts[1]
    assert {draft for each in drafts[0] for draft in each} <= {*IDS}
    assert len({draft for each in drafts[0] for draft in each}) > 3


def test_what_cannot_be_reduced_is_refused(target: Path, tmp_path: Path) -> None:
    def refused(head: Path, ids: list[int], scored: Any = target) -> str:
        with pytest.raises(UnsupportedOption) as caught:
            resolve_pair(scored, head, (None, None), (None, None), draft_vocab=ids)
        return str(caught.value)

    reduced = ours(tmp_path / "reduced", eagle3_tensors())
    assert "drafts 40 of 101 ids already, by its own table" in refused(reduced, [1])
    assert "chooses among 5 candidates" in refused(KINDS["DFlash2"](tmp_path / "two"), [1, 2])
    shared = KINDS["EAGLE-3 with the target's matrix"](tmp_path / "shared")
    module = make_model("llama3", num_hidden_layers=LAYERS)
    assert "is not a directory of safetensors" in refused(shared, [1], module)
    assert "is for learned drafters" in refused(target, [1])
