"""A draft with another tokenizer: its drafts are right where tokens are shared, and no text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.engine import build
from fastspec.proposers.draft_model import DraftModel
from tests.helpers.checkpoints import make_checkpoint, make_model, write_tokenizer

ROWS = 101
WORDS = [f"w{index}" for index in range(ROWS)]
# id 0 stays: it is the unknown token of both
ORDER = torch.cat((torch.tensor([0]), 1 + torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(0))))
PROMPTS = [[5, 17, 3], [88, 2, 61, 61, 9, 40], [1]]


def pair(path: Path, kept: int = ROWS) -> tuple[Path, Path]:
    """A target, and a draft with the same weights whose id i is the target's ORDER[i], with `kept` of the ids."""
    target = write_tokenizer(make_checkpoint(path / "target", "llama3"), WORDS)
    model = make_model("llama3")
    order = ORDER[:kept]
    with torch.no_grad():
        model.resize_token_embeddings(kept)
        model.get_input_embeddings().weight.copy_(make_model("llama3").get_input_embeddings().weight[order])
    model.save_pretrained(path / "draft")
    return target, write_tokenizer(path / "draft", [WORDS[index] for index in order.tolist()])


def generator(target: Path, draft: Path | None, **options: Any) -> FastSpecGenerator:
    return FastSpecGenerator(target, draft, device="cpu", max_length=96, max_batch_size=4, progress=False, **options)


@pytest.mark.parametrize("k", [1, 3, 5, 8, 15])
def test_all_drafts_of_a_renamed_copy_are_accepted(tmp_path: Path, k: int) -> None:
    target, draft = pair(tmp_path)
    with pytest.warns(UserWarning, match=f"Only the {ROWS} tokens that both have"):
        both = generator(target, draft, num_speculative_tokens=k)
    with both, generator(target, None) as alone:
        wanted = alone.generate(PROMPTS, max_new_tokens=24)
        found = both.generate(PROMPTS, max_new_tokens=24, return_dict_in_generate=True)
        assert torch.equal(found.sequences, wanted)
        assert found.stats.accepted == found.stats.drafted > 0
        assert "another tokenizer" in both.explain()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.3, "seed": 7}], ids=["greedy", "coupled"])
def test_a_draft_with_half_of_the_tokens_changes_no_text(tmp_path: Path, options: dict[str, Any]) -> None:
    target, draft = pair(tmp_path, kept=ROWS // 2)
    with pytest.warns(UserWarning, match=f"Only the {ROWS // 2} tokens that both have"):
        both = generator(target, draft, num_speculative_tokens=4, verification="coupled")
    with both, generator(target, None, verification="coupled") as alone:
        wanted = alone.generate(PROMPTS, max_new_tokens=40, **options)
        found = both.generate(PROMPTS, max_new_tokens=40, return_dict_in_generate=True, **options)
        assert torch.equal(found.sequences, wanted)
        assert 0 < found.stats.accepted < found.stats.drafted


def test_ids_that_the_target_lacks_are_never_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of shared ids come first when the draft is loaded; drafts are those of all logits, masked."""
    target, draft = pair(tmp_path)
    write_tokenizer(draft, [WORDS[index] if index % 3 else f"x{index}" for index in ORDER.tolist()])
    calls: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 1.3, "seed": 7}]

    def made() -> FastSpecGenerator:
        with pytest.warns(UserWarning, match="tokens that both have"):
            return generator(target, draft, num_speculative_tokens=4, verification="coupled")

    def found(of: FastSpecGenerator) -> list[tuple[list[list[int]], int, int]]:
        runs = [of.generate(PROMPTS, max_new_tokens=8, return_dict_in_generate=True, **options) for options in calls]
        return [(each.sequences.tolist(), each.stats.accepted, each.stats.drafted) for each in runs]

    with made() as ordered:
        drafter = ordered._loop.engine.modules.proposer
        assert isinstance(drafter, DraftModel)
        assert drafter._map is not None
        assert drafter._map.first == sum(index % 3 > 0 for index in range(ROWS))
        assert not drafter._map.known.all()
        before = found(ordered)
        ordered.update_weights(draft, model="draft")
        assert found(ordered) == before, "an update puts its rows in the same order"
        ordered.sleep(2)
        ordered.wake()
        assert found(ordered) == before
    monkeypatch.setattr(build, "in_front", lambda draft, shared: None)
    with made() as masked:
        drafter = masked._loop.engine.modules.proposer
        assert isinstance(drafter, DraftModel)
        assert drafter._map is not None
        assert drafter._map.first is None
        assert found(masked) == before
    assert 0 < before[0][1] < before[0][2]
