"""Heads of targets that are rounded while they are loaded: text as that rounded target's without drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, GenerateOutput, NGram
from tests.helpers import dflash
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, write_speculators
from tests.helpers.mtp import write_target
from tests.scheduling.test_scheduler import prompts

GIVEN = [*prompts(3, seed=5), [5, 6, 7, 8, 9] * 4]
COMMON: dict[str, Any] = {"max_batch_size": 3, "max_length": 120, "progress": False, "dtype": "float32"}


def made(target: Path, device: str, form: str | None, **options: Any) -> tuple[Tensor, int]:
    """The text of all prompts, and how many drafts were accepted."""
    with FastSpecGenerator(target, device=device, target_quantization=form, **COMMON, **options) as generator:
        out = generator.generate(GIVEN, max_new_tokens=16, eos_token_id=[], return_dict_in_generate=True)
        assert isinstance(out, GenerateOutput)
        return out.sequences, out.stats.accepted


@cache
def plain(target: Path, device: str, form: str | None) -> Tensor:
    return made(target, device, form, num_speculative_tokens=0)[0]


@pytest.fixture(scope="module", params=["eagle3", "dflash", "mtp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path | str]:
    path = tmp_path_factory.mktemp("pair")
    if request.param == "mtp":
        return write_target(path, "nextn", hidden_size=128, intermediate_size=128)[0], "mtp"
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS, **sizes)
    if request.param == "dflash":
        head = dflash.Head(hidden=128, vocab=VOCAB, target_layers=LAYERS, inner=128, ids=(0, 2, 4), block_size=8)
        return target, dflash.write_z_lab(path / "head", head)
    tensors = eagle3_tensors(target_hidden=128, hidden=HIDDEN, std=0.5, drafted=VOCAB)
    return target, write_speculators(path / "head", tensors, boundaries=[2, 4, 5])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_text_is_that_of_the_rounded_target(form: str, device: str, pair: tuple[Path, Path | str]) -> None:
    target, head = pair
    wanted = plain(target, device, form)
    assert not torch.equal(wanted, plain(target, device, None)), "it is another model's"
    alone, _ = made(target, device, form, draft=head, num_speculative_tokens=4)
    assert torch.equal(alone, wanted)
    behind, accepted = made(target, device, form, draft=head, proposer=NGram(), num_speculative_tokens=4)
    assert torch.equal(behind, wanted)
    assert accepted > 0, "texts of random models repeat themselves"


@pytest.mark.parametrize("device", devices())
def test_with_keys_and_values_in_8_bits(device: str, pair: tuple[Path, Path | str]) -> None:
    """The head's own stay in the target's dtype; the text is that of a target whose are rounded."""
    target, head = pair
    options: dict[str, Any] = {"kv_dtype": "fp8"}
    wanted, _ = made(target, device, "fp8", num_speculative_tokens=0, **options)
    assert not torch.equal(wanted, plain(target, device, "fp8")), "it is another text"
    for form in (None, "int4"):
        options |= {"draft": head, "draft_quantization": form, "num_speculative_tokens": 4}
        assert torch.equal(made(target, device, "fp8", **options)[0], wanted)
